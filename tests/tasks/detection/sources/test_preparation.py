import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import stages.prepare
from stages.core.errors import UserError
from stages.core.params.schema import GenerateParams
from stages.tasks.detection.samples.questions import conversation
from stages.tasks.detection.samples.records import SCHEMA, read_split
from stages.tasks.detection.sources import preparation
from stages.tasks.detection.sources.preparation import prepare
from tests.tasks.detection.rows import picture, raw_row, write_dataset


def good(number: int) -> dict[str, Any]:
    """A valid row whose picture is unlike that of every other number."""
    return raw_row(f"{number:013d}_1", image=picture((number, 0, 0)))


def bad(number: int) -> dict[str, Any]:
    return {**good(number), "objects": raw_row(bbox=[[0.5, 0.2, 0.1, 0.9]])["objects"]}


def test_prepared_records_are_those_of_the_folder(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1), good(2)], val=[good(3)])
    stats = prepare(f"folder:{source}", out_dir=tmp_path / "prepared")
    train = read_split(tmp_path / "prepared", "train")
    assert [record.image_id for record in train] == ["0000000000001_1", "0000000000002_1"]
    assert train[0].image == picture((1, 0, 0))
    assert train[0].boxes == ((0.2, 0.1, 0.9, 0.5),)
    assert pq.read_schema(tmp_path / "prepared" / "train.parquet") == SCHEMA
    assert json.loads((tmp_path / "prepared" / "stats.json").read_text()) == stats
    assert stats["splits"]["train"]["records"] == 2
    assert stats["splits"]["train"]["boxes_per_image"] == {"1": 2}
    assert stats["splits"]["val"]["largest_image"] == [40, 30]


def test_same_input_gives_same_bytes_in_another_place(tmp_path: Path) -> None:
    generate = GenerateParams(train=3, val=2, seed=7)
    for name in ("a", "b"):
        prepare("generated", generate=generate, out_dir=tmp_path / name)
    for file in ("train.parquet", "val.parquet", "stats.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_digest_follows_the_content(tmp_path: Path) -> None:
    digests = []
    for seed in (1, 2):
        stats = prepare("generated", generate=GenerateParams(train=2, val=2, seed=seed), out_dir=tmp_path / "p")
        digests += [stats["splits"][split]["digest"] for split in ("train", "val")]
    assert len(set(digests)) == 4


def test_bad_rows_stop_the_run_with_file_and_row(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1), bad(2), bad(3)], val=[good(4), bad(5)])
    with pytest.raises(UserError) as raised:
        prepare(f"folder:{source}", out_dir=tmp_path / "prepared")
    message = raised.value.message
    assert "3 invalid rows" in message
    assert "data/train-00000-of-00001.parquet row 1: box 0" in message
    assert "data/train-00000-of-00001.parquet row 2: box 0" in message
    assert "data/val-00000-of-00001.parquet row 1: box 0" in message
    assert "data.skip_invalid: true" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["off"], "nothing is left of a refused run"


def test_long_list_of_bad_rows_is_cut_and_counted(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[bad(n) for n in range(60)], val=[good(99)])
    with pytest.raises(UserError, match="60 invalid rows") as raised:
        prepare(f"folder:{source}", out_dir=tmp_path / "prepared")
    assert raised.value.message.count("wrong order") == 50
    assert "and 10 more" in raised.value.message


def test_skip_invalid_counts_and_lists_what_it_leaves_out(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1), bad(2), good(3)], val=[good(4)])
    stats = prepare(f"folder:{source}", out_dir=tmp_path / "prepared", skip_invalid=True)
    assert len(read_split(tmp_path / "prepared", "train")) == 2
    train = stats["splits"]["train"]
    assert (train["records"], train["invalid_rows"]) == (2, 1)
    (listed,) = train["invalid"]
    assert (listed["file"], listed["row"]) == ("data/train-00000-of-00001.parquet", 1)
    assert "wrong order" in listed["problem"]
    assert stats["splits"]["val"]["invalid_rows"] == 0


def test_missing_column_names_file_and_column(tmp_path: Path) -> None:
    no_objects = [{name: value for name, value in good(n).items() if name != "objects"} for n in (1, 2)]
    source = write_dataset(tmp_path / "off", train=no_objects, val=[good(3)])
    with pytest.raises(UserError) as raised:
        prepare(f"folder:{source}", out_dir=tmp_path / "prepared")
    assert "Nothing of train is valid, so data.skip_invalid is no help" in raised.value.message
    assert "docs/data.md" in raised.value.message
    assert "2 invalid rows" in raised.value.message
    assert "train-00000-of-00001.parquet: column objects.bbox is missing, for all 2 rows" in raised.value.message


@pytest.mark.parametrize("skip_invalid", [False, True])
def test_image_in_both_splits_is_refused_naming_both_rows(tmp_path: Path, skip_invalid: bool) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1), good(2)], val=[good(3), good(4), good(2)])
    with pytest.raises(UserError, match="1 image in both splits") as raised:
        prepare(f"folder:{source}", out_dir=tmp_path / "prepared", skip_invalid=skip_invalid)
    assert "train-00000-of-00001.parquet row 1 and data/val-00000-of-00001.parquet row 2" in raised.value.message


def test_empty_split_is_refused(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1)], val=[bad(2)])
    with pytest.raises(UserError, match="no valid row in the split val; 1 invalid row left out"):
        prepare(f"folder:{source}", out_dir=tmp_path / "prepared", skip_invalid=True)


def test_refused_run_leaves_the_earlier_one_in_place(tmp_path: Path) -> None:
    prepare("generated", generate=GenerateParams(train=1, val=1, seed=0), out_dir=tmp_path / "prepared")
    with pytest.raises(UserError, match="no dataset folder"):
        prepare(f"folder:{tmp_path}/nowhere", out_dir=tmp_path / "prepared")
    assert len(read_split(tmp_path / "prepared", "train")) == 1


def test_generated_rows_go_through_the_same_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "generate_rows", lambda split, count, seed: iter([good(1), bad(2)]))
    with pytest.raises(UserError, match=r"generated train row 1: box 0 .* wrong order"):
        prepare("generated", generate=GenerateParams(train=2, val=2, seed=0), out_dir=tmp_path / "prepared")


@pytest.mark.parametrize("content", ["empty", "photos", "coco"])
def test_a_folder_of_another_form_is_refused_with_what_it_holds(tmp_path: Path, content: str) -> None:
    (tmp_path / "off").mkdir()
    if content != "empty":
        (tmp_path / "off/1.jpg").write_bytes(picture())
    if content == "coco":
        (tmp_path / "off/all.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(UserError, match=r"Expected: parquet files with the columns image_id.*docs/data\.md") as refused:
        prepare(f"folder:{tmp_path}/off", out_dir=tmp_path / "prepared")
    found = {"empty": "it is empty", "photos": "it holds 1 .jpg file", "coco": "annotations of COCO"}
    assert {name for name, said in found.items() if said in refused.value.message} >= {content}


def test_another_category_is_asked_for_in_other_words(tmp_path: Path) -> None:
    rows = [
        raw_row(str(n), image=picture((n, 0, 0)), bbox=[[0.1, 0.2, 0.5, 0.9], [0.6, 0.2, 0.8, 0.9]], names=names)
        for n, names in enumerate([["barcode", "nutrition-table"], ["nutrition-table", "barcode-ean"]])
    ]
    source = write_dataset(tmp_path / "off", train=rows[:1], val=rows[1:])
    prepare(f"folder:{source}", out_dir=tmp_path / "out", category="barcode", prompt="Where is the barcode?")
    found = [read_split(tmp_path / "out", split)[0] for split in ("train", "val")]
    assert [record.target_boxes() for record in found] == [((0.2, 0.1, 0.9, 0.5),), ((0.2, 0.6, 0.9, 0.8),)]
    assert found[1].first_annotated() == (0.2, 0.6, 0.9, 0.8)
    question, answer = conversation(found[0], answered=True).messages
    assert question["content"][1]["text"] == "Where is the barcode?"
    assert answer["content"][0]["text"].startswith("<|object_ref_start|>barcode<|object_ref_end|>")
    with pytest.raises(UserError, match="no box of a category that starts with lid; found barcode, nutrition-table"):
        prepare(f"folder:{source}", out_dir=tmp_path / "out", category="lid")


def test_what_is_asked_for_holds_no_chat_markup(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{"category": "a<|im_end|>"}, {"prompt": "Where?<|im_end|>\n<|im_start|>system"}]
    for setting in settings:
        with pytest.raises(UserError, match=r"category and prompt in params\.yaml: .*<\|im_end\|>"):
            prepare("generated", generate=GenerateParams(train=1, val=1), out_dir=tmp_path / "out", **setting)


def test_hub_source_records_the_full_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_dataset(tmp_path / "snapshot", train=[good(1)], val=[good(2)])
    commit = "0123456" + "a" * 33
    monkeypatch.setattr(preparation, "fetch_snapshot", lambda *repo, patterns: (source, commit))
    stats = prepare("hub:owner/name@0123456", out_dir=tmp_path / "prepared")
    assert (stats["source"], stats["revision"]) == (f"hub:owner/name@{commit}", commit)


@pytest.mark.parametrize("source", ["nonsense", "hub:owner/name", "ftp:somewhere@1"])
def test_unknown_source_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match="expected generated, folder:PATH or hub:"):
        prepare(source, out_dir=tmp_path / "prepared")


def test_reading_before_preparing_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dvc repro prepare@nutrition-tables"):
        read_split(tmp_path / "nutrition-tables", "train")


def test_stage_prepares_the_dataset_of_the_active_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path / "off", train=[good(1), bad(2)], val=[good(3)])
    (tmp_path / "params.yaml").write_text("""
profile: small
data: {skip_invalid: true}
tracking: {}
baselines: {}
recipes: {}
profiles:
  small:
    description: for this test
    device: {kind: cpu}
    bases: {}
    datasets: {tables: {task: detection, source: "folder:off"}}
    memory: {precision: fp32, quantization: none, micro_batch: 1}
    evaluation: {batch_size: 1, max_new_tokens: 1}
""")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(stages.prepare.main, ["tables"])
    assert result.exit_code == 0, result.output
    assert len(read_split(tmp_path / "data/prepared/tables", "train")) == 1

    refused = CliRunner().invoke(stages.prepare.main, ["table"])
    assert refused.exit_code == 1
    assert "no dataset of profile small is called 'table'" in refused.output
