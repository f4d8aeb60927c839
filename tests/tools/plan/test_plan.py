"""The command that says whether a recipe fits: what it shows, what it takes it from, and that it leaves no trace."""

from __future__ import annotations

import json
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from stages import base, plan, prepare
from stages.kit.memory import predict as predictor
from stages.kit.memory.stand_in import stand_in_batch
from stages.kit.models.folders import geometry_config_path
from stages.kit.models.load import load_config
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import PHASES, Prediction
from tests import ROOT
from tests.documents import write_yaml
from tools.plan import __main__ as fit

GPU_PROFILE = "qwen2-vl-2b-24gb"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped recipes on a model and data that are small, with a CPU and with a GPU; no network."""
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["profiles"] = {name: raw["profiles"][name] for name in ("tiny", GPU_PROFILE)}
    for profile in raw["profiles"].values():
        profile["bases"]["vlm"] = "folder:data/tiny/qwen2-vl"
        profile["images"] = {"min_pixels": 3136, "max_pixels": 50176}
        profile["memory"]["micro_batch"] = 16
        profile["evaluation"]["batch_size"] = 8
    raw["profiles"]["tiny"]["datasets"]["nutrition-tables"]["limit"] = {"train": 8, "val": 4}
    for recipe in raw["recipes"].values():
        recipe["max_length"] = 512
    (tmp_path / "data").mkdir()
    (tmp_path / "data/tiny").symlink_to(ROOT / "data/tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_yaml(raw, Path("params.yaml"))
    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return tmp_path


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that a prediction was made of, in order: a GiB for each sample of a micro-batch, and of an
    evaluation's batch a quarter of one."""
    plans: list[Plan] = []

    def predict(plan: Plan, *_: Any, **__: Any) -> Prediction:
        plans.append(plan)
        return of_size(plan.schedule.micro_batch * 2**30)

    def predict_answers(*_: Any, batch_size: int, **__: Any) -> Prediction:
        return of_size(batch_size * 2**28)

    def of_size(size: int) -> Prediction:
        return Prediction(
            allocated_bytes=size,
            reserved_bytes=size,
            total_bytes=size,
            low_bytes=size,
            high_bytes=size,
            peak_phase="forward",
            phases=dict.fromkeys(PHASES, size),
            budget={"weights": size},
            calibration="assumed",
        )

    monkeypatch.setattr(predictor, "predict", predict)
    monkeypatch.setattr(predictor, "predict_answers", predict_answers)
    return plans


def no_network(*_: Any, **__: Any) -> None:
    raise AssertionError("the network was reached for")


def ask(*arguments: str, charset: str = "utf-8") -> Result:
    return CliRunner(charset=charset).invoke(fit.main, arguments)


def shown(*arguments: str, charset: str = "utf-8") -> str:
    result = ask(*arguments, charset=charset)
    assert result.exit_code == 0, result.output + str(result.exc_info)
    return result.stdout


def refused(*arguments: str) -> str:
    """The message where it stops as a user's fault does, without a traceback."""
    result = ask(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    return " ".join(result.output.split())


def on_gpu(*arguments: str) -> tuple[str, ...]:
    return (*arguments, "--profile", GPU_PROFILE)


def total_gib(text: str) -> float:
    (total,) = re.findall(r"total +(\d+\.\d\d) +100\.0%", text)
    return float(total)


def command(text: str) -> str | None:
    """That runs the recipe so; None where the text has none."""
    return next(iter(re.findall(r"^run it by   (.*)$", text, re.MULTILINE)), None)


def run_on(memory_gb: int, *rest: str) -> str:
    command = f"dvc exp run --temp -S profile={GPU_PROFILE} -S profiles.{GPU_PROFILE}.device.memory_gb={memory_gb}"
    return " ".join([command, *rest])


AUTO = f"-S ++profiles.{GPU_PROFILE}.memory.fit=auto"


def test_a_recipe_is_shown_with_its_budget_and_verdict_and_nothing_is_written(workspace: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in workspace.rglob("*")}
    text = shown(*on_gpu("r1-llm-only", "--gpu-gb", "24"))
    assert {path: path.stat().st_mtime_ns for path in workspace.rglob("*")} == before
    assert "no data yet: the worst within max_length 512 and max_pixels 50176" in " ".join(text.split())
    assert f"{total_gib(text):.2f} of 21.84 GiB" in text  # the bar's figures
    entries = [float(amount) for amount in re.findall(r"^[WDGOALTH] +[a-z]+ +(\d+\.\d\d) ", text, re.MULTILINE)]
    assert len(entries) > 3
    assert sum(entries) == pytest.approx(total_gib(text))
    assert "verdict   fits" in text
    assert "\x1b" not in text, "colours, though no terminal"
    assert max(map(len, text.splitlines())) <= 80


def test_it_ends_with_the_command_that_runs_the_cheapest_change_that_fits(
    workspace: Path, predicted: list[Plan]
) -> None:
    text = shown(*on_gpu("r1-llm-only", "--gpu-gb", "8"))
    assert total_gib(text) == 16
    assert "verdict   does not fit" in text
    assert "it fits with micro_batch 16 -> 4, grad_accumulation 1 -> 4: 4.00 GiB" in " ".join(text.split())
    assert command(text) == run_on(8, AUTO, "evaluate@r1-llm-only")
    text = shown(*on_gpu("r1-llm-only", "--gpu-gb", "1"))
    assert "the least is with micro_batch 16 -> 1, grad_accumulation 1 -> 16" in " ".join(text.split())
    assert command(text) is None
    assert command(shown(*on_gpu("r1-llm-only", "--gpu-gb", "40"))) == run_on(40, "evaluate@r1-llm-only")
    own = f"dvc exp run --temp -S profile={GPU_PROFILE} evaluate@r1-llm-only"
    assert command(shown(*on_gpu("r1-llm-only"))) == own
    assert command(shown("r1-llm-only")) == "dvc exp run --temp evaluate@r1-llm-only"


def test_a_recipe_that_continues_one_which_does_not_fit_has_no_command(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_batch = vars(predictor)["predict"]

    def more_in_full(plan: Plan, *_: Any, **__: Any) -> Prediction:
        prediction = of_batch(plan, *_, **__)
        in_full = 2**40 if plan.parts.vision == "full" else 0
        return replace(prediction, low_bytes=prediction.low_bytes + in_full, high_bytes=2**41)

    monkeypatch.setattr(predictor, "predict", more_in_full)
    text = shown(*on_gpu("r3-two-stage"))
    assert "before it   r2-vision-only is trained: does not fit" in text
    assert command(text) is None
    assert command(shown(*on_gpu("r1-llm-only"))) is not None


def test_an_evaluation_that_does_not_fit_is_left_out_of_the_command(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(*on_gpu("r1-llm-only", "--gpu-gb", "2"))
    assert "evaluation  2.00 GiB: does not fit; it halves its batch to 4" in text
    of_batch = vars(predictor)["predict_answers"]

    def enlarged(*args: Any, **kwargs: Any) -> Prediction:
        prediction = of_batch(*args, **kwargs)
        return replace(prediction, low_bytes=2**35, high_bytes=2**35)

    monkeypatch.setattr(predictor, "predict_answers", enlarged)
    text = shown(*on_gpu("r1-llm-only", "--gpu-gb", "24"))
    assert "evaluation  2.00 GiB: does not fit, nor does a batch of 1" in text.replace(";", ",")
    assert command(text) == f"dvc exp run --temp -S profile={GPU_PROFILE} train@r1-llm-only"


def test_an_evaluation_by_prediction_takes_what_fits(workspace: Path, predicted: list[Plan]) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["profiles"][GPU_PROFILE]["evaluation"]["batch_size"] = "auto"
    write_yaml(raw, Path("params.yaml"))
    assert "evaluation  16.00 GiB, 64 at once: fits" in shown(*on_gpu("r1-llm-only", "--gpu-gb", "24"))
    assert "evaluation  4.00 GiB, 16 at once: fits" in shown(*on_gpu("r1-llm-only", "--gpu-gb", "6"))


def test_json_says_the_same(workspace: Path, predicted: list[Plan]) -> None:
    answer = json.loads(shown(*on_gpu("r1-llm-only", "--gpu-gb", "8", "--json")))
    assert (answer["recipe"], answer["profile"], answer["memory_gb"]) == ("r1-llm-only", GPU_PROFILE, 8)
    assert (answer["memory"]["verdict"], answer["memory"]["total_gib"]) == ("does not fit", 16)
    assert (answer["cheapest"]["verdict"], answer["cheapest"]["settings"]["micro_batch"]) == ("fits", "4")
    assert answer["disk"]["merged_bytes"] > answer["disk"]["trained_bytes"] > 0
    assert answer["command"] == command(shown(*on_gpu("r1-llm-only", "--gpu-gb", "8")))
    several = json.loads(shown(*on_gpu("--all", "--gpu-gb", "8 24", "--json")))
    assert [(each["recipe"], each["memory_gb"]) for each in several][:3] == [
        ("r1-llm-only", 8),
        ("r1-llm-only", 24),
        ("r2-vision-only", 8),
    ]
    assert answer in several


def test_a_cpus_recipe_is_held_against_the_machines_memory(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "free_and_total_bytes", lambda: (2**28, 2**35))
    assert "verdict   fits" in shown("r1-llm-only")
    monkeypatch.setattr(predictor, "free_and_total_bytes", lambda: (2**28, 2**29))
    text = shown("r1-llm-only")
    assert "usable    0.50 GiB\nverdict   does not fit" in text
    assert command(text) is None


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        *((size, [24]) for size in ("24GB", "24 GB", "24GiB", " 24gb", "24.0", "24g")),
        ("24GB 48 GB, 80 16", [24, 48, 80, 16]),
    ],
)
def test_sizes_may_have_their_unit(text: str, sizes: list[float]) -> None:
    assert list(fit.gpu_sizes(text)) == sizes


def test_the_matrix_has_the_cheapest_setting_that_fits_and_predicts_nothing_twice(
    workspace: Path, predicted: list[Plan]
) -> None:
    text = shown(*on_gpu("--all", "--gpu-gb", "24", "--gpu-gb", "8", "--gpu-gb", "1"))
    heading = next(line for line in text.splitlines() if line.startswith("Recipe"))
    assert heading.split() == ["Recipe", "1", "GB", "8", "GB", "24", "GB"]
    assert f"detection on 8 GB: {run_on(8, AUTO, 'compare@detection')}" in text
    cells = re.split(r"\n(?=r\d-)", text.partition("\n\nWith")[0])[1:]
    rows = {row.split()[0]: " ".join(row.split()[1:]) for row in cells}
    expected = "does not fit fits fits 1.00 GiB 4.00 GiB 16.00 GiB micro_batch 4"
    assert rows == dict.fromkeys(("r1-llm-only", "r2-vision-only", "r3-two-stage", "r4-joint"), expected)
    asked = [repr(replace(plan, recipe="")) for plan in predicted]
    assert len(asked) == len(set(asked)) == 3 * 7, "7 plans of r1, r2 and r4; r3 is planned like r1"
    table, _, last = shown(*on_gpu("r2-vision-only", "--all", "--gpu-gb", "1 24")).partition("\n\nWith")
    assert re.findall(r"^r\d-\S+", table, re.MULTILINE) == ["r2-vision-only"]
    assert "r2-vision-only on 24 GB: dvc exp run --temp" in last
    assert "detection: none of these sizes runs it whole" in shown(*on_gpu("--all", "--gpu-gb", "1"))


def test_it_says_what_the_plan_stage_says_once_base_and_data_are_there(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage, name in ((base, "vlm"), (prepare, "nutrition-tables"), (plan, "r1-llm-only")):
        result = CliRunner().invoke(stage.main, [name])
        assert result.exit_code == 0, result.output
    planned = json.loads(Path("data/runs/r1-llm-only/memory.json").read_text())
    text = shown("r1-llm-only")
    assert (planned["verdict"], planned["usable_gib"]) == ("fits", None)
    with monkeypatch.context() as machine:
        machine.setattr(predictor, "free_and_total_bytes", lambda: (2**20, 2**20))
        refusal = CliRunner().invoke(plan.main, ["r1-llm-only"])
    assert refusal.exit_code == 1
    assert "r1-llm-only does not fit the memory of this machine, the CPU of profile tiny" in refusal.output
    assert "verdict   fits" in text
    assert "the largest samples of data/prepared/nutrition-tables" in text
    assert total_gib(text) == pytest.approx(planned["total_gib"], abs=0.006)

    of_other_data = " ".join(shown(*on_gpu("r1-llm-only")).split())
    assert "no data yet" in of_other_data
    shutil.rmtree("data/bases")
    worst = shown("r1-llm-only")
    assert "no tokenizer yet" in " ".join(worst.split())
    assert total_gib(worst) > total_gib(text)


def test_a_narrow_terminal_without_utf_8_shows_it_all(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = shown(*on_gpu("r1-llm-only"), charset="ascii")
    assert text.isascii()
    assert "?" not in text
    # A command is on one line, to be copied.
    assert max(len(line) for line in text.splitlines() if not line.startswith("run it by")) <= 40
    sizes = [option for size in (8, 16, 24, 40) for option in ("--gpu-gb", str(size))]
    matrix = shown(*on_gpu("r1-llm-only", "--all", *sizes), charset="ascii")
    assert max(len(line) for line in matrix.splitlines() if "dvc exp run" not in line) <= 40
    table = matrix.partition("With")[0]
    assert re.findall(r"\d+ GB", table) == ["8 GB", "16 GB", "24 GB", "40 GB"]
    assert table.count("r1-llm-only") > 1, "one table for all sizes"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["r1-llm"], ["no recipe is called 'r1-llm' (did you mean 'r1-llm-only'?)"]),
        (["r1-llm-only", "--profile", "tinny"], ["no profile is called 'tinny' (did you mean 'tiny'?)"]),
        (["r1-llm-only", "--gpu-gb", "24"], ["profile tiny runs on a CPU,", f"(make: PROFILE=): {GPU_PROFILE}"]),
        (["--all"], ["profile tiny runs on a CPU"]),
        ([], ["name a recipe, or take --all (make: RECIPE=, or ALL=1); profile tiny can train: r1-llm-only, r2"]),
        (["r1-llm-only", "--gpu-gb", "24", "--gpu-gb", "48"], ["at most one --gpu-gb, or take --all"]),
        (["r1-llm-only", "--gpu-gb", "24 48"], ["at most one --gpu-gb, or take --all"]),
        (["r1-llm-only", "--gpu-gb", "0"], ["'0' is no size of a GPU; expected GB as the card is sold by"]),
        (["r1-llm-only", "--gpu-gb", "24TB"], ["'24TB' is no size of a GPU; expected GB as the card is sold by"]),
    ],
)
def test_what_cannot_be_answered_is_refused(workspace: Path, arguments: list[str], messages: list[str]) -> None:
    assert all(message in refused(*arguments) for message in messages)


def test_a_picture_of_the_worst_batch_leaves_room_within_max_length() -> None:
    config = load_config(geometry_config_path("qwen2-vl-tiny").parent)
    batch = stand_in_batch(config, micro_batch=2, max_length=50, max_pixels=1_000_000)
    assert batch["input_ids"].shape == (2, 50)
    merged = batch["image_grid_thw"].prod(1) // config.vision_config.spatial_merge_size**2
    assert (batch["input_ids"] == config.image_token_id).sum(1).tolist() == merged.tolist() == [48, 48]
    assert (batch["labels"] >= 0).any(1).all()
