import json
import os
import shutil
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.lineage import (
    LINEAGE_FILE,
    folder_digest,
    map_largest_first,
    read_lineage,
    require_base,
    true_base,
    verified_lineage,
    write_lineage,
)


def model_folder(path: Path, content: str) -> Path:
    (path / "nested").mkdir(parents=True)
    (path / "weights.safetensors").write_text(content)
    (path / "nested" / "config.json").write_text("{}")
    return path


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """base -> stage 1 (trained, merged) -> stage 2 (trained), as r3 makes them."""
    base = model_folder(tmp_path / "bases/vlm", "base")
    root = write_lineage(base, kind="base", name="vlm", source={"hub": "a/b", "revision": "0" * 40})
    stage1 = model_folder(tmp_path / "runs/r2-vision-only/trained", "vision")
    trained = write_lineage(stage1, kind="trained", name="r2-vision-only", parents={"base": (base, root)})
    merged = model_folder(tmp_path / "runs/r2-vision-only/merged", "base+vision")
    middle = write_lineage(
        merged, kind="merged", name="r2-vision-only", parents={"base": (base, root), "trained": (stage1, trained)}
    )
    stage2 = model_folder(tmp_path / "runs/r3-two-stage/trained", "adapter")
    write_lineage(stage2, kind="trained", name="r3-two-stage", parents={"base": (merged, middle)})
    return tmp_path


def test_an_adapter_is_accepted_on_its_own_base_also_in_a_moved_workspace(chain: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    for name in ("bases", "runs"):
        shutil.copytree(chain / name, moved / name)
    adapter = moved / "runs/r3-two-stage/trained"
    assert true_base(adapter) == moved / "runs/r2-vision-only/merged"
    trained, base = require_base(adapter, true_base(adapter), fix="")
    assert trained.parents["base"].lineage == base
    assert [*trained.bases()][-1].source == {"hub": "a/b", "revision": "0" * 40}


@pytest.mark.parametrize("damage", ["change", "add", "remove", "rename"])
def test_a_changed_folder_is_refused(chain: Path, damage: str) -> None:
    folder = chain / "bases/vlm"
    if damage == "change":
        (folder / "weights.safetensors").write_text("basf")
    elif damage == "add":
        (folder / "more.json").write_text("{}")
    elif damage == "remove":
        (folder / "nested/config.json").unlink()
    else:
        (folder / "weights.safetensors").rename(folder / "w.safetensors")
    with pytest.raises(UserError, match=r"recorded with content [0-9a-f]{12}, but now holds .*dvc repro base@vlm"):
        verified_lineage(folder, fix="dvc repro base@vlm")


def test_the_digest_does_not_depend_on_place_time_or_lineage(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one", "x"), model_folder(tmp_path / "two", "x")
    write_lineage(two, kind="base", name="two")
    (two / "weights.safetensors").chmod(0o444)
    assert folder_digest(one) == folder_digest(two)


def test_names_and_contents_cannot_be_confused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, files in ((one, {"a": "bc", "d": ""}), (two, {"a": "b", "cd": ""})):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    assert folder_digest(one) != folder_digest(two)


@pytest.mark.parametrize(
    "path", ["/etc", "../../../../etc", "../a/../../b", "..", "", "bases/vlm", "../\0", "../../../.dvc/cache", "../a/"]
)
def test_a_path_out_of_the_workspace_is_never_followed(path: str, chain: Path) -> None:
    folder = chain / "runs/r3-two-stage/trained"
    content = json.loads((folder / LINEAGE_FILE).read_text())
    content["parents"]["base"]["path"] = path
    (folder / LINEAGE_FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lineage\.json is damaged: parents\.base\.path: "):
        true_base(folder)
    with pytest.raises(UserError, match="rebuild it with: dvc repro train@r3-two-stage"):
        require_base(folder, chain / "runs/r2-vision-only/merged", fix="dvc repro train@r3-two-stage")


def test_a_damaged_base_is_rebuilt_by_its_own_stage(chain: Path) -> None:
    base = chain / "runs/r2-vision-only/merged"
    (base / "stray").touch()
    with pytest.raises(UserError, match=r"r2-vision-only/merged was recorded .*; rebuild it with: merge it"):
        require_base(chain / "runs/r3-two-stage/trained", base, fix="train it", fix_base="merge it")


def test_a_file_that_cannot_be_read_or_named_is_no_traceback(chain: Path) -> None:
    folder = chain / "bases/vlm"
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.json")).write_text("{}")
    with pytest.raises(UserError, match=r"bases/vlm cannot be read: .*; rebuild it with: dvc repro base@vlm"):
        verified_lineage(folder, fix="dvc repro base@vlm")


def test_a_missing_folder_or_lineage_gives_a_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing or empty"):
        folder_digest(tmp_path / "nothing")
    with pytest.raises(UserError, match="was not made by a stage"):
        read_lineage(tmp_path)


def test_threads_give_each_item_its_result_in_order_and_raise_its_error() -> None:
    sizes = {f"file {number}": number % 5 for number in range(40)}
    assert list(map_largest_first(str.upper, sizes).items()) == [(name, name.upper()) for name in sizes]
    with pytest.raises(ZeroDivisionError):
        map_largest_first(lambda number: 1 // number, {0: 1, 1: 2})
