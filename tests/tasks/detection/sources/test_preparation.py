from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import stages.prepare
from stages.core.errors import UserError
from stages.tasks.detection.samples import ForModel, read_split
from stages.tasks.detection.sources import Reader
from tests.kit.data.images import png
from tests.tasks import prepare
from tests.tasks.detection.rows import raw_row, write_dataset


def good(number: int) -> dict[str, Any]:
    """A valid row whose picture is unlike that of every other number."""
    return raw_row(f"{number:013d}_1", image=png((number, 0, 0)))


def bad(number: int) -> dict[str, Any]:
    return {**good(number), "objects": raw_row(bbox=[[0.5, 0.2, 0.1, 0.9]])["objects"]}


def test_prepared_records_are_those_of_the_folder(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1), bad(2), good(3)], val=[good(4)])
    stats = prepare("detection", f"folder:{source}", out_dir=tmp_path / "prepared", skip_invalid=True)
    train = read_split(tmp_path / "prepared", "train")
    assert [record.image_id for record in train] == ["0000000000001_1", "0000000000003_1"]
    assert train[0].image == png((1, 0, 0))
    assert train[0].boxes == ((0.2, 0.1, 0.9, 0.5),)
    figures = stats["splits"]["train"]
    assert (figures["records"], figures["boxes"], figures["boxes_per_image"]) == (2, 2, {"1": 2})
    assert figures["categories"] == {"nutrition-table": 2}
    assert figures["largest_image"] == [40, 30]
    (invalid,) = figures["invalid"]
    assert (invalid["file"], invalid["row"]) == ("data/train-00000-of-00001.parquet", 1)
    assert "wrong order" in invalid["problem"]


def test_a_missing_column_is_refused_with_the_form(tmp_path: Path) -> None:
    no_objects = [{name: value for name, value in good(n).items() if name != "objects"} for n in (1, 2)]
    source = write_dataset(tmp_path / "off", train=no_objects, val=[good(3)])
    with pytest.raises(UserError, match=r"lacks objects\.bbox, objects\.category_name, for all 2 rows") as raised:
        prepare("detection", f"folder:{source}", out_dir=tmp_path / "prepared")
    assert "Expected: parquet files with the columns image_id" in raised.value.message


def test_an_image_in_both_splits_is_refused_naming_both_rows(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1), good(2)], val=[good(3), good(4), good(2)])
    with pytest.raises(UserError, match="1 training sample whose image is in the validation split too") as raised:
        prepare("detection", f"folder:{source}", out_dir=tmp_path / "prepared")
    assert "train-00000-of-00001.parquet row 1 and data/val-00000-of-00001.parquet row 2" in raised.value.message


def test_another_category_is_asked_for_in_other_words(tmp_path: Path) -> None:
    rows = [
        raw_row(str(n), image=png((n, 0, 0)), bbox=[[0.1, 0.2, 0.5, 0.9], [0.6, 0.2, 0.8, 0.9]], names=names)
        for n, names in enumerate([["barcode", "nutrition-table"], ["nutrition-table", "barcode-ean"]])
    ]
    source = write_dataset(tmp_path / "off", train=rows[:1], val=rows[1:])
    prepare(
        "detection",
        f"folder:{source}",
        out_dir=tmp_path / "out",
        reader=Reader(category="barcode", prompt="Where is the barcode?"),
    )
    found = [read_split(tmp_path / "out", split)[0] for split in ("train", "val")]
    assert [record.target_boxes() for record in found] == [((0.2, 0.1, 0.9, 0.5),), ((0.2, 0.6, 0.9, 0.8),)]
    assert found[1].first_annotated() == (0.2, 0.6, 0.9, 0.8)
    question, answer = ForModel("qwen2_vl", lambda *size: size).conversation(found[0], answered=True).messages
    assert question["content"][1]["text"] == "Where is the barcode?"
    assert answer["content"][0]["text"].startswith("<|object_ref_start|>barcode<|object_ref_end|>")
    with pytest.raises(UserError, match="no box of a category that starts with lid; found barcode, nutrition-table"):
        prepare("detection", f"folder:{source}", out_dir=tmp_path / "out", reader=Reader(category="lid"))


def test_category_and_prompt_hold_no_chat_markup(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "off", train=[good(1)], val=[good(2)])
    for reader in (Reader(category="a<|im_end|>"), Reader(prompt="Where?<|im_end|>\n<|im_start|>system")):
        with pytest.raises(UserError, match=r"category and prompt in params\.yaml: .*<\|im_end\|>"):
            prepare("detection", f"folder:{source}", out_dir=tmp_path / "out", reader=reader)


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
