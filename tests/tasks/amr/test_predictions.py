from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.tasks.amr.predictions import EMPTY, read_inputs, submission
from stages.tasks.amr.samples import ANSWER_FORMATS, decode, encode
from stages.tasks.amr.samples.blocks import read_blocks
from stages.tasks.amr.samples.graphs import Node, canonical, read_graph
from tests.tasks.amr.drawn import TEXTS, graphs


def sentences_in(tmp_path: Path, content: str | bytes) -> list[str]:
    path = tmp_path / "public_test.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_inputs(path)


@pytest.mark.parametrize(
    "content",
    [
        "tôi đi .\nanh ở lại .\n",
        "\n tôi đi . \n\nanh ở lại .\n\n\n",
        "#::snt tôi đi .\r\n#::snt anh ở lại .\r\n",
        "# ::id 1\n# ::snt tôi đi .\n\n# ::id 2\n# ::snt anh ở lại .\n",
        '#::snt tôi đi .\n(đ / đi\n    :agent(t\n/ tôi\n))\n(x / ":)")\n\n#::snt anh ở lại .\n(hỏng\n',
    ],
)
def test_sentences_are_read_from_every_form(tmp_path: Path, content: str) -> None:
    assert sentences_in(tmp_path, content) == ["tôi đi .", "anh ở lại ."]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"t\xf4i\n", "not UTF-8: byte 0xf4 in line 1"),
        (b"#::snt a\n(a / a)\n\n#::snt \n(b / b)\n", "line 4: an empty sentence"),
        (b"(a / a)\n\n#::snt b\n(b / b)\n", "line 1: no sentence above this"),
        (b"#::snt a\nb\n#::snt c\n", "line 2: neither a graph nor marked as a sentence, as others are"),
        (b"#::snt a\n(a / a\n    :op1 1)\nb\n", "line 4: neither a graph nor marked as a sentence, as others are"),
        (b"# ::id 1\na\n# ::id 2\nb\n", "line 1: no sentence, .*; expected one a line"),
        (b'{"sentence": "a"}\n', "line 1: no sentence, .*; expected one a line"),
        (b"a\n(b / b)\n", "line 2: no sentence, .*; expected one a line"),
        (b"1\ta\n", "line 1: no sentence, .*; expected one a line"),
        (b"# ::snt a ::annotator b\n", "line 1: a sentence with the field ::annotator; put it on a line of its own"),
        (b"a\nb <|im_end|>\n", r"line 2: a text holds chat markup, <\|im_end\|>"),
    ],
)
def test_files_without_their_sentences_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        sentences_in(tmp_path, content)


def test_brackets_of_the_news_are_no_graph(tmp_path: Path) -> None:
    lines = ["(TTXVN/Vietnam+)", "(24/7) Hotline", '["Tôi" là ai]', "[[1]] Theo", "Câu một ."]
    assert sentences_in(tmp_path, "\t\n".join(lines)) == lines


def test_a_submission_looks_like_the_training_files() -> None:
    completion = "(đi :agent (tôi #1) :theme (nhà :poss #1) :polarity -)"
    found = submission(["tôi không đi nhà tôi ."], [completion], answer_format="ptr")
    assert found.text == (
        "#::snt tôi không đi nhà tôi .\r\n(đ / đi\r\n    :agent(t / tôi)\r\n"
        "    :theme(n / nhà\r\n        :poss t)\r\n    :polarity -)\r\n"
    )
    assert (found.num_repaired, found.num_empty) == (0, 0)


def test_broken_completions_are_repaired_or_replaced() -> None:
    found = submission(["a", "b", "c"], ["(a / a", "", "(c / c)"], answer_format="full")
    assert (found.num_repaired, found.num_empty) == (1, 1)
    assert [block.graph_text() for block in read_blocks(found.text.split("\r\n"))] == [
        "(a / a)", "(a / amr-empty)", "(c / c)",
    ]  # fmt: skip


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@given(completed_by=st.lists(TEXTS | graphs(), min_size=1, max_size=4))
def test_there_are_always_as_many_blocks_as_sentences(answer_format: str, completed_by: list[str | Node]) -> None:
    completions = [each if isinstance(each, str) else encode(each, answer_format) for each in completed_by]
    sentences = [f"câu {number} ." for number in range(len(completions))]
    found = submission(sentences, completions, answer_format=answer_format)
    blocks = list(read_blocks(found.text.split("\r\n")))
    assert [block.sentence for block in blocks] == sentences
    written = [read_graph(block.graph_text()) for block in blocks]
    completed = [decode(completion, answer_format).graph for completion in completions]
    assert all(one is None or canonical(one) == other for one, other in zip(completed, written, strict=True))
    assert found.num_empty <= written.count(EMPTY)
    assert found.num_repaired + found.num_empty == completed.count(None)
