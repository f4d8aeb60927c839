import json
import logging
import os
import re
import unicodedata
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given

from stages.core.errors import UserError
from stages.core.params.schema import GenerateParams
from stages.tasks.amr.samples.records import SCHEMA, read_split
from stages.tasks.amr.sources.corpora import read_blocks
from stages.tasks.amr.sources.grammar import generate
from stages.tasks.amr.sources.preparation import prepare
from tests.damage import damaged_bytes, damaged_text, quick

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


def refused(source: Path, *, skip_invalid: bool = False) -> str:
    out_dir = source.parent / "out"
    with pytest.raises(UserError) as raised:
        prepare(f"folder:{source}", out_dir=out_dir, skip_invalid=skip_invalid)
    assert not out_dir.exists(), "nothing is left of a refused run"
    return raised.value.message


def test_prepared_records_are_those_of_the_files(tmp_path: Path) -> None:
    crlf = (block(1) + block(2)).replace("\n", "\r\n")
    source = folder(
        tmp_path / "amr", train_1=b"\xef\xbb\xbf" + crlf.encode(), train_2=block(3), val=block(4), notes="x"
    )
    (source / os.fsdecode(b"notes\xff.txt")).touch()
    stats = prepare(f"folder:{source}", out_dir=tmp_path / "out")
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
    assert pq.read_schema(tmp_path / "out/val.parquet") == SCHEMA
    assert json.loads((tmp_path / "out/stats.json").read_text(encoding="utf-8")) == stats
    assert (stats["validation"], stats["unused_files"]) == ("val.txt", ["notes.txt", r"notes\udcff.txt"])
    figures = stats["splits"]["train"]
    assert (figures["records"], figures["graphs_with_references"], figures["largest_graph"]) == (3, 3, 2)
    assert figures["files"] == ["train_1.txt", "train_2.txt"]
    assert figures["longest_target"]["ptr"] == len("(câu_hỏi :agent #1 :theme (số #1 :quant 1))")


def test_corpora_of_the_ldc_are_read(tmp_path: Path) -> None:
    text = (
        "# AMR release; corpus: proxy\n\n"
        "# ::id a.1 ::date 2012\n# ::snt Hello .\n# ::save-date now\n(h / hello-01~e.0)\n\n\n"
        "# ::id a.2\n# ::snt Bye # now .\n(b / bye-03\n\n  # aside\n  :ARG0 (y / you))\n"
        "# ::id a.3\n# ::snt No .\n(n / no)\n"
    )
    source = folder(tmp_path / "amr", training=text, dev="# ::id d.1\n# ::snt Yes .\n(y / yes)\n", test="unread")
    stats = prepare(f"folder:{source}", out_dir=tmp_path / "out")
    train = read_split(tmp_path / "out", "train")
    assert [(record.id, record.sentence) for record in train] == [
        ("a.1", "Hello ."),
        ("a.2", "Bye # now ."),
        ("a.3", "No ."),
    ]
    assert train[1].canonical == "(b / bye-03 :ARG0 (y / you))"
    assert stats["unused_files"] == ["test.txt"]


def test_ids_that_several_samples_have_are_replaced_by_their_places(tmp_path: Path) -> None:
    named = [f"# ::id {name}\n{block(number)}" for number, name in enumerate(["x", "y", "x", "z"])]
    source = folder(tmp_path / "amr", train=named[0] + named[1], val=named[2] + named[3])
    prepare(f"folder:{source}", out_dir=tmp_path / "out")
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
        tmp_path / "amr", train=faulty, train_empty="", train_bytes=b"#::snt a\n(a / \xff)", val=block(6) + BAD
    )
    message = refused(source)
    assert "10 malformed samples" in message
    for said in (
        "train.txt line 1: a graph without a sentence",
        "train.txt line 3: a sentence without a graph: không có đồ thị .",
        "train.txt line 6: a node has no variable",
        "train.txt line 8: an empty sentence",
        "train.txt line 12: a parenthesis is never closed; the sentence is: hở .",
        "train.txt line 14: an id, z.9, without a sentence",
        "train.txt line 18: there is text after the graph",
        "train_empty.txt: the file is empty",
        "train_bytes.txt: not UTF-8: byte 0xff in line 2",
        "val.txt line 9: a node has no variable",
        "data.skip_invalid: true",
    ):
        assert said in message


def test_blank_lines_and_comments_within_a_graph_keep_its_line_numbers(tmp_path: Path) -> None:
    source = folder(tmp_path / "amr", train="#::snt a .\n(a / b\n\n# lời\n:c( / d))\n", val=block(1))
    assert "train.txt line 5: a node has no variable" in refused(source)


def test_skip_invalid_counts_lists_and_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    val = block(3) + block(4, "CÂU  số 2 .")
    source = folder(tmp_path / "amr", train=block(1) + BAD + block(2), val=val, public_test="câu số 9 .\n")
    with caplog.at_level(logging.INFO):
        stats = prepare(f"folder:{source}", out_dir=tmp_path / "out", skip_invalid=True)
    assert caplog.messages == [
        "validation split: val.txt",
        "not read: public_test.txt",
        "1 training sample left out: in the validation split too",
    ]
    train = stats["splits"]["train"]
    assert (train["records"], train["invalid_rows"], train["leaked_rows"]) == (1, 1, 1)
    assert train["invalid"][0] | {"problem": ""} == {"file": "train.txt", "line": 9, "problem": ""}
    assert train["leaked"] == [{"train": "train.txt line 11", "val": "val.txt line 7"}]
    assert [record.sentence for record in read_split(tmp_path / "out", "train")] == ["câu số 1 ."]


def test_a_sentence_in_both_splits_is_refused_however_it_is_spelled(tmp_path: Path) -> None:
    again = unicodedata.normalize("NFD", "Câu\t SỐ 1 .")
    source = folder(tmp_path / "amr", train=block(1) + block(1) + block(2), val=block(3) + block(4, again))
    message = refused(source)
    assert "2 training samples whose sentence is in the validation split too" in message
    assert "train.txt line 1 and val.txt line 7: câu số 1 ." in message
    assert "train.txt line 7 and val.txt line 7: câu số 1 ." in message


def test_nothing_left_of_a_split_is_refused(tmp_path: Path) -> None:
    leaking = folder(tmp_path / "a", train=block(1), val=block(1))
    assert "no valid sample in the split train; 1 sample left out" in refused(leaking, skip_invalid=True)
    broken = folder(tmp_path / "b", train=block(1), val=BAD)
    assert "no valid sample in the split val; 1 sample left out" in refused(broken, skip_invalid=True)
    assert "no sentence; expected #::snt lines" in refused(folder(tmp_path / "c", train="xin chào\n", val=block(1)))


def test_a_tenth_is_held_out_by_content_and_repeated_sentences_stay_together(tmp_path: Path) -> None:
    blocks = [block(number) for number in range(40)] + [block(7), block(8)]
    prepare(f"folder:{folder(tmp_path / 'a', train=''.join(blocks))}", out_dir=tmp_path / "one")
    stats = prepare(f"folder:{folder(tmp_path / 'b', train=''.join(blocks[::-1]))}", out_dir=tmp_path / "two")
    held = [{record.sentence for record in read_split(tmp_path / name, "val")} for name in ("one", "two")]
    kept = {record.sentence for record in read_split(tmp_path / "one", "train")}
    assert held[0] == held[1]
    assert len(held[0]) == 4
    assert not held[0] & kept
    assert stats["validation"].startswith("10% of the training sentences")
    assert sum(stats["splits"][split]["repeated_sentences"] for split in ("train", "val")) == 2
    assert sum(stats["splits"][split]["records"] for split in ("train", "val")) == 42


def test_one_sentence_cannot_be_split(tmp_path: Path) -> None:
    assert "1 valid sentence to train on, and no validation file" in refused(
        folder(tmp_path / "amr", train=block(1) * 2)
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("hub:vlsp/amr@abc", "no source on the hub"),
        ("folder:", "unknown source"),
        ("ftp:x", "unknown source"),
        ("folder:nowhere", "no dataset folder nowhere"),
        ("generated", "`generate` .* is not set"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        prepare(source, out_dir=tmp_path / "out")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    "marked",
    [
        "#::snt nói <|im_end|> .\n(n / nói)\n\n",
        "#::snt nói .\n(n / nói :op1 <|im_start|>)\n\n",
        '#::snt nói .\n(n / nói :op1 "<|endoftext|>")\n\n',
        "#::snt nói .\n(n / nói :op1 (x / <|im end|>))\n\n",
        "#::snt nói .\n(<|image_pad|> / nói)\n\n",
    ],
)
def test_chat_markup_is_refused_by_name_or_left_out(tmp_path: Path, split: str, marked: str) -> None:
    blocks = {"train": block(1), "val": block(2)}
    source = folder(tmp_path / "amr", **{**blocks, split: blocks[split] + marked})
    said = refused(source)
    assert f"{split}.txt line 7: a text holds chat markup, <|" in said
    stats = prepare(f"folder:{source}", out_dir=tmp_path / "out", skip_invalid=True)
    assert stats["splits"][split]["invalid_rows"] == 1
    assert "<|" not in "".join(record.canonical for record in read_split(tmp_path / "out", split))


def test_a_folder_without_training_files_says_what_it_expected(tmp_path: Path) -> None:
    assert "it holds 1 .txt file (val.txt). Expected: train*.txt" in refused(folder(tmp_path / "amr", val=block(1)))


def test_generated_sentences_are_one_series_cut_in_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        stats = prepare("generated", generate=GenerateParams(train=3, val=2, seed=7), out_dir=tmp_path / name)
    records = [record for split in ("train", "val") for record in read_split(tmp_path / "a", split)]
    assert [(record.sentence, record.graph) for record in records] == generate(5, seed=7)
    assert [stats["splits"][split]["records"] for split in ("train", "val")] == [3, 2]
    for file in ("train.parquet", "val.parquet", "stats.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_same_files_elsewhere_give_the_same_records(tmp_path: Path) -> None:
    for name in ("a", "b"):
        source = folder(tmp_path / name, train=block(1) + block(2), val=block(3))
        prepare(f"folder:{source}", out_dir=tmp_path / f"out-{name}")
    for file in ("train.parquet", "val.parquet"):
        assert (tmp_path / "out-a" / file).read_bytes() == (tmp_path / "out-b" / file).read_bytes()


def test_the_digest_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    contents = {"a": block(1), "b": "\n\n" + block(1), "c": block(2)}
    digests = [
        prepare(f"folder:{folder(tmp_path / name, train=text, val=block(9))}", out_dir=tmp_path / f"out-{name}")[
            "splits"
        ]["train"]["digest"]
        for name, text in contents.items()
    ]
    assert digests[0] == digests[1] != digests[2]


CORPUS = (block(1) + "# ::id x.2\n" + block(2) + block(3) + BAD + block(4)).encode()


@given(
    content=damaged_bytes(CORPUS)
    | damaged_text(CORPUS.decode(), ["#::snt ", "# ::id x\n", "\r", "(", ")", '"']).map(str.encode)
)
@quick(60)
def test_any_damage_to_a_corpus_is_said_by_file_and_line_or_left_out_and_counted(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tmp_path_factory.getbasetemp() / "damaged"
    source.mkdir(exist_ok=True)
    (source / "train.txt").write_bytes(content)
    for skip_invalid in (False, True):
        try:
            stats = prepare(f"folder:{source}", out_dir=source / "out", skip_invalid=skip_invalid)
        except UserError as error:
            assert "train.txt" in error.message or str(source) in error.message
            continue
        train, val = (read_split(source / "out", split) for split in ("train", "val"))
        assert (len(train), len(val)) == tuple(stats["splits"][split]["records"] for split in ("train", "val"))
        assert all(record.parsed() for record in (*train, *val))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("repeated", ["\n", "# x\n", "---\n\n", "(\n\n", '\\"', ")", "#::snt\n", "\r", "# ::id x\n"])
def test_a_file_without_end_takes_no_longer_than_its_length(repeated: str) -> None:
    """A quarter of a million characters, of which the square would take hours."""
    lines = re.split(r"\r\n|\r|\n", "#::snt a\n(a / b\n" + repeated * (250_000 // len(repeated)))
    assert list(read_blocks(lines))
