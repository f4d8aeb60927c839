"""Stages run in this process, as the pipeline runs them, in the working folder."""

from contextlib import AbstractContextManager, chdir
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from tests import ROOT
from tests.documents import write_yaml
from tests.memory.test_fit import predicted

ANSWER_TOKENS = 64
"""Enough for every reference answer of a box."""


def run(stage: str, name: str) -> Result:
    return CliRunner().invoke(import_module(f"stages.{stage}").main, [name])


def done(stage: str, name: str) -> None:
    """Runs a stage that succeeds. The plan does not compare reference answers with the few tokens of `small_params`:
    untrained models generate as many as they may."""
    with patch("stages.memory.preview.require_answer_room", return_value=""):
        result = run(stage, name)
    assert result.exit_code == 0, result.output + str(result.exc_info)


def made_up_memory() -> AbstractContextManager[Any]:
    """A training is predicted to take a GiB. Recording its step takes most of a plan's time."""
    return patch("stages.memory.predict.predict", lambda *_: predicted(1))


def made(folder: Path, raw: dict[str, Any], *stages: tuple[str, str]) -> Path:
    """The folder, with these parameters and what these stages, (stage, name), make of them."""
    with chdir(folder):
        write_params(raw)
        for stage, name in stages:
            done(stage, name)
    return folder


def all_the_way(recipe: str) -> None:
    for stage in ("plan", "train", "merge", "evaluate"):
        done(stage, recipe)


def refused(stage: str, name: str) -> str:
    """The message, in one line, of a stage that stops as a user's fault does: exit 1, no traceback."""
    result = run(stage, name)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


def read_params(path: Path = Path("params.yaml")) -> dict[str, Any]:
    raw: dict[str, Any] = YAML(typ="safe").load(path)
    return raw


def write_params(raw: dict[str, Any]) -> None:
    write_yaml(raw, Path("params.yaml"))


def write_workspace(folder: Path, raw: dict[str, Any]) -> None:
    """Write these parameters and the data of the demo into a folder; nothing has run there yet."""
    write_yaml(raw, folder / "params.yaml")
    (folder / "data").mkdir()
    (folder / "data/tiny").symlink_to(ROOT / "data/tiny")


@cache
def few_photographs() -> TemporaryDirectory[str]:
    """Some of the demo's photographs: of a dataset each one is read, however few are kept."""
    folder = TemporaryDirectory()
    for path in (ROOT / "data/tiny/nutrition-tables/data").iterdir():
        pq.write_table(pq.read_table(path).slice(0, 40), Path(folder.name, path.name))
    return folder


def small_params(vlm_dir: Path | None = None, *, root: str = f"{ROOT}/", max_new_tokens: int = 8) -> dict[str, Any]:
    """The shipped parameters, with less of everything.

    vlm_dir: in place of the shipped vision-language base. root: of the shipped bases and data; "" in a clone.
    max_new_tokens: fewer than any answer has, unless stages run in processes of their own: their plans refuse that.
    """
    raw = read_params(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"] = {name: source.replace("folder:", f"folder:{root}") for name, source in tiny["bases"].items()}
    if vlm_dir is not None:
        tiny["bases"]["vlm"] = f"folder:{vlm_dir}"
    for dataset in tiny["datasets"].values():
        dataset["source"] = dataset["source"].replace("folder:", f"folder:{root}")
        if dataset["source"] != "mix":
            dataset["limit"] = {"train": 10, "val": 5}
    if root:
        tiny["datasets"]["nutrition-tables"]["source"] = f"folder:{few_photographs().name}"
    tiny["images"] = {"min_pixels": 3136, "max_pixels": 12544}
    tiny["memory"]["micro_batch"] = 2
    tiny["evaluation"] = {"batch_size": 3, "max_new_tokens": max_new_tokens}
    tiny["validation_limit"] = {"samples": 2, "score_samples": 1}
    for recipe in raw["recipes"].values():
        recipe.update(effective_batch=4, epochs=1)
    return raw
