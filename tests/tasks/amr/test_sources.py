import re
import unicodedata
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.tasks import PlainReader
from stages.tasks.amr.samples import read_split
from stages.tasks.amr.samples.blocks import read_blocks
from tests.tasks import prepare, refusal

BAD = "#::snt hỏng .\n(h / hỏng\n    :time( / 1900))\n\n"


def block(number: int, sentence: str | None = None) -> str:
    """ViSemPar's form: tight roles, a word of two syllables, a variable used before it is defined."""
    graph = f"(c / câu hỏi\n    :agent s\n    :theme(s / số\n        :quant {number}))"
    return f"#::snt {sentence or f'câu số {number} .'}\n{graph}\n\n"


def folder(path: Path, **files: str | bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (path / f"{name}.txt").write_bytes(data)
    return path


def test_prepared_records_are_those_of_the_files(tmp_path: Path) -> None:
    crlf = (block(1) + block(2)).replace("\n", "\r\n")
    source = folder(
        tmp_path / "amr", train_1=b"\xef\xbb\xbf" + crlf.encode(), train_2=block(3), val=block(4), notes="x"
    )
    stats = prepare("amr", f"folder:{source}", out_dir=tmp_path / "out")
    train, val = (read_split(tmp_path / "out", split) for split in ("train", "val"))
    assert [(record.file, record.line) for record in train] == [
        ("train_1.txt", 1),
        ("train_1.txt", 7),
        ("train_2.txt", 1),
    ]
    assert len({record.id for record in train + val}) == 4
    assert train[0].sentence == "câu số 1 ."
    assert train[0].graph == "(c / câu hỏi\n    :agent s\n    :theme(s / số\n        :quant 1))"
    assert train[0].canonical == "(c / câu_hỏi :agent s :theme (s / số :quant 1))"
    assert (stats["validation"], stats["unused_files"]) == ("val.txt", ["notes.txt"])
    figures = stats["splits"]["train"]
    assert (figures["records"], figures["graphs_with_references"], figures["largest_graph"]) == (3, 3, 2)
    assert figures["files"] == ["train_1.txt", "train_2.txt"]
    assert figures["longest_answer"]["ptr"] == len("(câu_hỏi :agent #1 :theme (số #1 :quant 1))")


def test_corpora_of_the_ldc_are_read(tmp_path: Path) -> None:
    text = (
        "# AMR release; corpus: proxy\n\n"
        "# ::id a.1 ::date 2012\n# ::snt Hello .\n# ::save-date now\n(h / hello-01~e.0)\n\n\n"
        "# ::id a.2\n# ::snt Bye # now .\n(b / bye-03\n\n  # aside\n  :ARG0 (y / you))\n"
        "# ::id a.3\n# ::snt No .\n(n / no)\n"
    )
    source = folder(tmp_path / "amr", training=text, dev="# ::id d.1\n# ::snt Yes .\n(y / yes)\n", test="unread")
    stats = prepare("amr", f"folder:{source}", out_dir=tmp_path / "out")
    train = read_split(tmp_path / "out", "train")
    assert [(record.id, record.sentence) for record in train] == [
        ("a.1", "Hello ."),
        ("a.2", "Bye # now ."),
        ("a.3", "No ."),
    ]
    assert train[1].canonical == "(b / bye-03 :ARG0 (y / you))"
    assert stats["unused_files"] == ["test.txt"]
    assert stats["unread_fields"] == {"::date": 1, "::save-date": 1}
    strict = refusal("amr", f"folder:{source}", tmp_path / "strict", reader=PlainReader(strict=True))
    assert "fields that are not read: ::date (1), ::save-date (1)" in strict


def test_ids_that_several_samples_have_are_replaced_by_their_places(tmp_path: Path) -> None:
    named = [f"# ::id {name}\n{block(number)}" for number, name in enumerate(["x", "y", "x", "z"])]
    source = folder(tmp_path / "amr", train=named[0] + named[1], val=named[2] + named[3])
    prepare("amr", f"folder:{source}", out_dir=tmp_path / "out")
    ids = [[record.id for record in read_split(tmp_path / "out", split)] for split in ("train", "val")]
    assert ids == [["train.txt:2", "y"], ["val.txt:2", "z"]]


def test_every_malformed_sample_is_named_with_file_line_and_reason(tmp_path: Path) -> None:
    faulty = (
        "(l / lạc)\n\n"  # line 1
        "#::snt không có đồ thị .\n"  # line 3
        + BAD  # the fault is in line 6
        + "#::snt\n(r / rỗng)\n\n"  # line 8
        + "#::snt hở .\n(h / hở\n\n"  # line 11
        + "# ::id z.9\n# ::id z.8\n"  # line 14
        + "#::snt hai .\n(h / hai)\n(b / ba)\n\n"  # the fault is in line 18
        + block(5)
    )
    source = folder(
        tmp_path / "amr",
        train=faulty,
        train_empty="",
        train_bytes=b"#::snt a\n(a / \xff)",
        train_other="xin chào\n",
        train_marked="#::snt nói .\n(n / nói :op1 <|im_start|>)\n\n#::snt đi .\n(<|image_pad|> / đi)\n\n",
        val=block(6) + BAD,
    )
    message = refusal("amr", f"folder:{source}", tmp_path / "out")
    assert "13 invalid samples" in message
    for problem in (
        "train.txt line 1: a graph without a sentence",
        "train.txt line 3: a sentence without a graph: không có đồ thị .",
        "train.txt line 6: a node has no variable",
        "train.txt line 8: an empty sentence",
        "train.txt line 12: a parenthesis is never closed; the sentence is: hở .",
        "train.txt line 14: an id, z.9, without a sentence",
        "train.txt line 18: there is text after the graph",
        "train_empty.txt: the file is empty",
        "train_bytes.txt: not UTF-8: byte 0xff in line 2; save it as UTF-8",
        "train_marked.txt line 1: a text holds chat markup, <|im_start|>",
        "train_marked.txt line 4: a text holds chat markup, <|image_pad|>",
        "train_other.txt: no sentence; expected #::snt lines",
        "val.txt line 9: a node has no variable",
        "data.skip_invalid: true",
    ):
        assert problem in message


def test_a_sentence_in_both_splits_is_refused_however_it_is_spelled(tmp_path: Path) -> None:
    val = block(3) + block(4, unicodedata.normalize("NFD", "Câu\t SỐ 1 ."))
    source = folder(tmp_path / "amr", train=block(1) + block(2), val=val)
    assert "train.txt line 1 and val.txt line 7: câu số 1 ." in refusal("amr", f"folder:{source}", tmp_path / "out")


def test_a_test_split_is_read_where_it_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "amr", train=block(1) + block(2), val=block(3), public_test=block(4) + block(5))
    prepare("amr", f"folder:{source}", out_dir=tmp_path / "two")
    with pytest.raises(UserError, match=r"no test split; name its files in params.yaml, below splits.test"):
        read_split(tmp_path / "two", "test")
    prepare("amr", f"folder:{source}", out_dir=tmp_path / "three", splits={"test": "public_test*"})
    assert [record.sentence for record in read_split(tmp_path / "three", "test")] == ["câu số 4 .", "câu số 5 ."]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("repeated", ["\n", "# x\n", "---\n\n", "(\n\n", '\\"', ")", "#::snt\n", "\r", "# ::id x\n"])
def test_an_endless_file_takes_linear_time(repeated: str) -> None:
    """A quarter of a million characters, of which the square would take hours."""
    lines = re.split(r"\r\n|\r|\n", "#::snt a\n(a / b\n" + repeated * (250_000 // len(repeated)))
    assert list(read_blocks(lines))
