"""`make plan`: its prediction, the inputs that it takes it from, and that it leaves no trace."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stages.core.environment import pinned_instructions
from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import BuildParams, ExpertParams, Params
from stages.launcher.pipeline import declared_stages
from stages.launcher.record import digests, used_params
from stages.memory import predict as predictor
from stages.models.folders import GEOMETRIES_DIR
from stages.planning.plan import Plan
from stages.planning.prediction import Prediction
from tests import ROOT
from tests.made_up_records import PROVENANCE
from tests.memory.test_fit import predicted as prediction_of
from tests.stage_runs import done, few_photographs, read_params, refused, write_params, write_workspace
from tools import plan as tool
from tools import timing
from tools.plan import available_data, available_inputs, other_settings, root_base, trainable_recipes
from tools.timing import MeasuredTime, Speed

GPU_PROFILE = "qwen2-vl-2b"
MEASURED = MeasuredTime(num_steps=1, step_s=1.0, hours={}, validation_s=0.0, num_threads=1)
COMMIT = "895c3a49bc3fa70a340399125c650a463535e71c"
GEOMETRY = GEOMETRIES_DIR / "Qwen/Qwen2-VL-2B-Instruct"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped recipes on a small model and small data, with a CPU and with a GPU; no network."""
    raw = read_params(ROOT / "params.yaml")
    raw["profiles"] = {name: raw["profiles"][name] for name in ("tiny", GPU_PROFILE)}
    raw["profiles"][GPU_PROFILE]["device"]["memory_gb"] = 24
    for profile in raw["profiles"].values():
        profile["bases"]["vlm"] = "folder:data/tiny/qwen2-vl"
        profile["images"] = {"min_pixels": 3136, "max_pixels": 50176}
        profile["memory"] |= {"micro_batch": 16, "fit": "refuse"}
        profile["evaluation"]["batch_size"] = 8
    photographs = raw["profiles"]["tiny"]["datasets"]["nutrition-tables"]
    photographs |= {"source": f"folder:{few_photographs().name}", "limit": {"train": 8, "val": 4}}
    for recipe in raw["recipes"].values():
        recipe["max_length"] = 512
    write_workspace(tmp_path, raw)
    monkeypatch.chdir(tmp_path)
    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, no_network)
    return tmp_path


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The predicted plans, in order: a GiB per sample of a micro-batch, a quarter of one per sample of a generation."""
    plans: list[Plan] = []

    def predict(plan: Plan, *_: Any, **__: Any) -> Prediction:
        plans.append(plan)
        return prediction_of(plan.memory.micro_batch)

    monkeypatch.setattr(timing, "measured_time", lambda *_: None)
    monkeypatch.setattr(predictor, "predict", predict)
    monkeypatch.setattr(predictor, "predict_generation", lambda *_, batch_size, **__: prediction_of(batch_size / 4))
    return plans


def no_network(*_: Any, **__: Any) -> None:
    raise AssertionError("the network was used")


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(tool.main, arguments)


def output_of(*arguments: str) -> str:
    result = ask(*arguments)
    assert result.exit_code == 0, result.output + str(result.exc_info)
    return result.stdout


def on_gpu(*arguments: str) -> tuple[str, ...]:
    return (*arguments, "--profile", GPU_PROFILE)


def command(text: str) -> str | None:
    return next(iter(re.findall(r"^run it by   (.*)$", text, re.MULTILINE)), None)


def test_a_prediction_has_budget_and_verdict_and_nothing_is_written(workspace: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in workspace.rglob("*")}
    text = output_of(*on_gpu("r1-llm-only", "--gpu", "24"))
    assert {path: path.stat().st_mtime_ns for path in workspace.rglob("*")} == before
    prepare = f"dvc exp run -S profile={GPU_PROFILE} -S gpu=24 prepare@nutrition-tables"
    assert f"the worst within max_length 512 and max_pixels 50176; for that of your samples, first: {prepare}\n" in text
    entries = {name: float(gib) for name, gib in re.findall(r"^([a-z]+) +(\d+\.\d\d) GiB +\d", text, re.MULTILINE)}
    total = entries.pop("total")
    assert len(entries) > 3
    assert sum(entries.values()) == pytest.approx(total, abs=0.05)
    assert "verdict   fits" in text


def test_other_values_are_tried_without_an_edit(workspace: Path, predicted: list[Plan]) -> None:
    rank = "recipes.r1-llm-only.lora.rank=8"
    small, own = (output_of(*on_gpu("r1-llm-only", *more)) for more in (("--set", rank, "--set", "seed=1"), ()))
    assert "disk      456 KiB trained" in small
    assert "disk      3.56 MiB trained" in own
    assert "changes   trainable 933,888 -> 116,736\n" in small
    assert "changes" not in own
    half = output_of(*on_gpu("r1-llm-only", "--set", f"profiles.{GPU_PROFILE}.memory.micro_batch=8"))
    assert "changes   GiB 16.00 -> 8.00, micro_batch 16 -> 8, grad_accumulation 1 -> 2\n" in half
    assert f"-S '++{rank}' -S '++seed=1' evaluate@r1-llm-only" in str(command(small))
    both = output_of(*on_gpu("r1-llm-only", "--set", "recipes.r1-llm-only.lora={rank: 8, dropout: 0.1}  seed=1"))
    assert "-S '++recipes.r1-llm-only.lora={rank: 8, dropout: 0.1}' -S '++seed=1' " in str(command(both))
    for change, problem in (
        ("recipes.r1-llm-only.lora.ranks=8", "did you mean 'rank'"),
        ("seed", "KEY.KEY=VALUE"),
        ("recipes.r1-llm-only.data=visempar", "is visempar, which has the task amr"),
    ):
        assert problem in ask(*on_gpu("r1-llm-only", "--set", change)).output


def test_it_ends_with_the_command_that_runs_the_cheapest_change_that_fits(
    workspace: Path, predicted: list[Plan]
) -> None:
    start = f"dvc exp run --temp -S profile={GPU_PROFILE}"
    text = output_of(*on_gpu("r1-llm-only", "--gpu", "8"))
    assert "verdict   does not fit" in text
    assert "micro_batch 16 -> 4, grad_accumulation 1 -> 4: 4.00 GiB" in text
    auto = f"-S ++profiles.{GPU_PROFILE}.memory.fit=auto"
    assert command(text) == f"{start} -S gpu=8 {auto} evaluate@r1-llm-only"
    text = output_of(*on_gpu("r1-llm-only", "--gpu", "0.5"))
    assert "micro_batch 16 -> 1, grad_accumulation 1 -> 16" in text
    assert command(text) is None
    card = output_of(*on_gpu("r1-llm-only", "--gpu", "rtx 3090"))
    assert command(card) == f"{start} -S 'gpu=\"RTX 3090\"' evaluate@r1-llm-only"
    assert command(output_of(*on_gpu("r1-llm-only"))) == f"{start} evaluate@r1-llm-only"


def test_json_has_the_same_fields_and_the_batch_size_auto_is_what_fits(workspace: Path, predicted: list[Plan]) -> None:
    raw = read_params()
    raw["profiles"][GPU_PROFILE]["evaluation"]["batch_size"] = "auto"
    write_params(raw)
    assert "4.00 GiB, 16 at once: fits" in output_of(*on_gpu("r1-llm-only", "--gpu", "6"))
    found = json.loads(output_of(*on_gpu("r1-llm-only", "--gpu", "8", "--json")))
    assert (found["recipe"], found["profile"], found["memory_gb"]) == ("r1-llm-only", GPU_PROFILE, 8)
    assert (found["memory"]["verdict"], found["memory"]["prediction"]["total_bytes"]) == ("does not fit", 2**34)
    assert (found["cheapest"]["verdict"], found["cheapest"]["settings"]["micro_batch"]) == ("fits", "4")
    assert found["disk"]["merged_bytes"] > found["disk"]["trained_bytes"] > 0
    assert found["command"] == command(output_of(*on_gpu("r1-llm-only", "--gpu", "8")))


def test_all_recipes_are_compared_and_no_plan_is_predicted_twice(workspace: Path, predicted: list[Plan]) -> None:
    text = output_of(*on_gpu("--all", "--gpu", "24GB,8 GB,0.5,RTX 3090"))
    asked = [repr(replace(plan, name="", device=replace(plan.device, memory_gb=None))) for plan in predicted]
    assert len(asked) == len(set(asked))
    assert all(recipe in text for recipe in trainable_recipes(load_params().on(GPU_PROFILE)))
    header, _, verdicts, sizes, changes, *_ = text.splitlines()
    assert header.split("  ")[0] == "Recipe"
    assert [title in header for title in ("24 GB", "8 GB", "0.5 GB", "RTX 3090")] == [True] * 4
    assert verdicts.split()[0] == "r1-llm-only"
    assert (verdicts.count("fits"), verdicts.count("does not fit")) == (3, 1)
    assert sizes.split() == ["16.00", "GiB", "4.00", "GiB", "1.00", "GiB", "16.00", "GiB"]
    assert changes.split() == ["micro_batch", "4"]
    cells = json.loads(output_of(*on_gpu("r1-llm-only", "--all", "--gpu", "8,RTX 3090", "--json")))
    assert [(cell["recipe"], cell["memory_gb"], cell["card"]) for cell in cells] == [
        ("r1-llm-only", 8, None),
        ("r1-llm-only", 24, "RTX 3090"),
    ]
    assert [cell["cheapest"] is None for cell in cells] == [False, True]


def test_a_cpu_offers_the_machines_memory(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    for total, verdict in ((2**35, "fits"), (2**29, "does not fit")):
        monkeypatch.setattr(predictor, "free_and_total_bytes", lambda total=total: (0, total))
        text = output_of("r1-llm-only")
        assert f"verdict   {verdict}" in text
        assert command(text) == ("dvc repro evaluate@r1-llm-only" if verdict == "fits" else None)


@pytest.mark.parametrize(("precision", "warned"), [("fp32", False), ("bf16", bool(pinned_instructions({})))])
def test_a_precision_that_this_cpu_emulates_is_said(
    workspace: Path, predicted: list[Plan], precision: str, warned: bool
) -> None:
    text = output_of("r1-llm-only", "--set", f"profiles.tiny.memory.precision={precision}")
    assert ("is emulated with AVX2" in text) == warned


@pytest.mark.parametrize(
    ("together", "apart"),
    [
        ("a.b=1  ++c=[2, 3]", ["a.b=1", "++c=[2, 3]"]),
        ('a={b: "say k=v", c: d} gpu="RTX 4090"', ['a={b: "say k=v", c: d}', 'gpu="RTX 4090"']),
        ("licenses.hub:a/b=mit seed=1", ["licenses.hub:a/b=mit", "seed=1"]),
        ("seed", ["seed"]),
    ],
)
def test_settings_are_told_apart_where_a_value_is_whole(together: str, apart: list[str]) -> None:
    assert tool.separate(together) == apart


def test_what_the_profile_limits_is_said_and_without_another_plan_nothing_changes(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1.0)  # no two measurements agree
    monkeypatch.setattr(timing, "measured_time", lambda *_: replace(MEASURED, hours={"this machine": next(clock)}))
    monkeypatch.setattr(predictor, "free_and_total_bytes", lambda: (0, 2**35))
    limited = {"epochs": 100, "validation.samples": 500}
    text = output_of("r1-llm-only", *(f"--set=recipes.r1-llm-only.{name}={value}" for name, value in limited.items()))
    assert "changes   time on this machine " in text, "three epochs became eight"
    for name, value in limited.items():
        assert re.search(rf"{name}: \d+, by profile tiny; the recipe says {value}\n", text)
    assert "changes   nothing\n" in output_of("r1-llm-only", "--set=recipes.r1-llm-only.validation.samples=500")


def test_with_base_and_data_it_predicts_what_the_plan_stage_does_and_no_file_knows_the_machines_speed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both predict the same plan on the same batch: the prediction that is made up follows from them."""

    def predict(plan: Plan, config: Any, processor: Any, batch: dict[str, Any]) -> Prediction:
        shapes = {name: tensor.shape for name, tensor in batch.items()}
        return prediction_of(1 + hash(repr((replace(plan, base_dir="", instructions=None), shapes))) % 999 / 1000)

    monkeypatch.setattr(predictor, "predict", predict)
    for stage, name in (("base", "vlm"), ("prepare", "nutrition-tables"), ("plan", "r1-llm-only")):
        done(stage, name)
    paths = [Path("data/runs/r1-llm-only") / name for name in ("plan.yaml", "memory.json")]
    texts, predictions, steps = [path.read_text() for path in paths], [], []
    for seconds in (1.0, 100.0):
        speed = Speed(micro_batch_s=seconds, update_s=0, loss_s=seconds, prompts_s=seconds, token_s=seconds)
        monkeypatch.setattr(timing, "measured_speed", lambda *_, speed=speed: (speed, {}))
        predictions.append(json.loads(output_of("r1-llm-only", "--json")))
        steps.append(predictions[-1].pop("duration")["step_s"])
    assert steps == [1.0, 100.0]
    assert predictions[0] == (found := predictions[1])
    assert found["memory"] == json.loads(texts[1])
    done("plan", "r1-llm-only")
    assert [path.read_text() for path in paths] == texts
    assert found["batch"] == "the largest samples of data/prepared/nutrition-tables"
    raw = read_params()
    raw["profiles"]["tiny"]["evaluation"]["max_new_tokens"] = 8
    write_params(raw)
    assert "4 of 4 are longer than profiles.tiny.evaluation.max_new_tokens, 8" in refused("plan", "r1-llm-only")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r1-llm"], r"did you mean 'r1-llm-only'"),
        (["r1-llm-only", "--profile", "tinny"], r"did you mean 'tiny'"),
        (["r1-llm-only", "--set", "seed=[1,"], r"'seed=\[1,': the value is not plain YAML"),
        (
            ["r1-llm-only", "--set", "profiles.tiny.datasets.nutrition-tables.reader={catgory: cup}"],
            r"nutrition-tables\.reader\.catgory.*did you mean 'category'",
        ),
        (["r1-llm-only", "--set", "profiles.tiny.bases.vlm=folder:nowhere"], "base folder nowhere of profiles"),
        (
            ["r1-llm-only", "--gpu", "24"],
            rf"with gpu=24, params.yaml has 1 problem: gpu: 24, though profile tiny runs on a CPU.*{GPU_PROFILE}",
        ),
        (["r1-llm-only", "--set", "profiles.tiny.bases.vlm=folder:data/tiny/qwen2"], r"boxes.* the base is a qwen2$"),
        (
            ["amr-baseline", "--set", "profiles.tiny.bases.llm=folder:data/tiny/qwen2-vl"],
            r"text models; the base, a qwen2_vl, is trained with images$",
        ),
        (["r1-llm-only", "--profile", GPU_PROFILE, "--gpu", "24,48"], r"at most one GPU.*--all"),
        (["r1-llm-only", "--profile", GPU_PROFILE, "--gpu", "RTX 309"], r"no card is called 'RTX 309'.*'RTX 3090'"),
    ],
)
def test_a_wrong_question_is_refused(workspace: Path, arguments: list[str], message: str) -> None:
    result = ask(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert re.search(message, " ".join(result.output.split()))


# --- Base and data before their stages have run


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The 2B profile, in an empty folder."""
    params = replace(load_params(ROOT / "params.yaml").on(GPU_PROFILE), gpu=24)
    monkeypatch.chdir(tmp_path)
    return params


def built(source: str) -> Path:
    folder = Path("data/bases/vlm")
    folder.mkdir(parents=True)
    replace(PROVENANCE, params={"profiles.any.bases.vlm": source}).write(Path("data/provenance/base@vlm.json"))
    return folder


def test_the_geometry_of_every_shipped_base_is_known() -> None:
    in_file = load_params(ROOT / "params.yaml")
    for profile in in_file.profiles:
        params = in_file.on(profile)
        recipes = trainable_recipes(params)
        assert recipes
        assert all((ROOT / available_inputs(params, recipe).config_dir / "config.json").is_file() for recipe in recipes)
    assert trainable_recipes(in_file) == list(in_file.recipes)
    chat = ["chat-lora", "chat-full"]
    assert trainable_recipes(in_file.on("qwen25-7b")) == ["amr-baseline", "amr-ptr", "amr-mtup", *chat]


def test_a_chain_of_recipes_and_a_build_has_the_base_at_its_root(params: Params) -> None:
    experts = tuple(ExpertParams(recipe=name) for name in ("r1-llm-only", "r2-vision-only"))
    build = BuildParams(task="detection", base="bases/vlm", experts=experts)
    after = replace(params.recipes["r1-llm-only"], base="builds/moe")
    recipes = {**params.recipes, "after": after, "further": replace(after, base="runs/after/merged")}
    params = replace(params, recipes=recipes, builds={"moe": build})
    assert root_base(params, "r3-two-stage") == ("vlm", None)
    assert [root_base(params, recipe) for recipe in ("after", "further")] == [("vlm", build)] * 2


@pytest.mark.parametrize(
    ("source", "taken"),
    [(f"hub:Qwen/Qwen2-VL-2B-Instruct@{COMMIT}", True), ("hub:Qwen/Qwen2-VL-2B-Instruct@main", False)],
)
def test_a_fetched_base_is_taken_unless_it_is_another_profiles(params: Params, source: str, taken: bool) -> None:
    folder, found = built(source), available_inputs(params, "r1-llm-only")
    assert (found.config_dir, found.has_tokenizer) == ((folder, True) if taken else (GEOMETRY, False))


def test_an_unknown_repository_has_to_be_fetched_first(params: Params) -> None:
    source = f"hub:Nobody/Knows@{COMMIT}"
    profile = replace(params.active, bases={"vlm": source})
    unknown = replace(params, profiles={**params.profiles, params.profile: profile})
    with pytest.raises(UserError, match=r"Nobody/Knows.*dvc exp run -S profile=qwen2-vl-2b -S gpu=24 base@vlm"):
        available_inputs(unknown, "r1-llm-only")
    folder = built(source)
    assert available_inputs(unknown, "r1-llm-only").config_dir == folder


def test_data_are_taken_only_if_they_are_the_profiles(params: Params) -> None:
    tiny = load_params(ROOT / "params.yaml")
    assert available_data(tiny, "nutrition-tables") is None
    (folder,) = prepared(tiny, "nutrition-tables")
    assert available_data(tiny, "nutrition-tables") == folder
    assert available_data(params, "nutrition-tables") is None


@pytest.mark.parametrize(
    ("name", "changed", "different"),
    [
        ("nutrition-tables", "profiles.tiny.datasets.nutrition-tables.limit={train: 8}", ["limit"]),
        ("nutrition-tables", "profiles.tiny.datasets.nutrition-tables.splits={train: a*}", ["splits"]),
        ("nutrition-tables", "profiles.tiny.datasets.nutrition-tables.reader={strict: true}", ["reader"]),
        ("nutrition-tables", "data.selection=0.1", ["selection"]),
        ("nutrition-tables", "profiles.tiny.datasets.visempar.limit={train: 8}", []),
        ("nutrition-tables", "seed=2", []),
        ("finetune-mix", "profiles.tiny.datasets.finetune-mix.repeat={'qmsum/*': 3}", ["repeat"]),
        ("finetune-mix", "profiles.tiny.datasets.finetune-mix.mix={truthfulqa: 200, qmsum: 0}", ["mix"]),
        ("finetune-mix", "profiles.tiny.datasets.qmsum.limit={val: 8}", ["limit of qmsum"]),
        ("finetune-mix", "profiles.tiny.datasets.qmsum.source=folder:data/qmsum", ["source of qmsum"]),
    ],
)
def test_data_of_other_settings_are_not_taken(params: Params, name: str, changed: str, different: list[str]) -> None:
    before, after = (load_params(ROOT / "params.yaml", changes=changes) for changes in ((), (changed,)))
    prepared(before, "nutrition-tables", "truthfulqa", "qmsum", "finetune-mix")
    assert other_settings(before, name) == []
    assert other_settings(after, name) == different
    assert (available_data(after, name) is None) == bool(different)
    shutil.rmtree(Path("data/prepared") / name)
    assert other_settings(after, name) == [], "data that are gone were not made otherwise"


def test_a_mix_of_parts_that_were_prepared_again_is_not_taken(params: Params) -> None:
    tiny = load_params(ROOT / "params.yaml")
    _, qmsum, _ = prepared(tiny, "truthfulqa", "qmsum", "finetune-mix")
    (qmsum / "train.parquet").write_bytes(b"other samples")
    assert other_settings(tiny, "finetune-mix") == ["content of qmsum"]


def test_a_plan_says_which_settings_of_prepared_data_are_others(workspace: Path, predicted: list[Plan]) -> None:
    prepared(load_params(changes=["data.selection=0.1"]), "nutrition-tables")
    why = "as data/prepared/nutrition-tables was made with another selection: the worst within max_length 512"
    assert f"no data yet, {why}" in output_of("r1-llm-only")


@pytest.mark.parametrize(("recipe", "counted"), [("r1-llm-only", False), ("chat-lora", True), ("moe-finetune", True)])
def test_likelihoods_are_counted_for_a_task_that_scores_them(
    workspace: Path, predicted: list[Plan], monkeypatch: pytest.MonkeyPatch, recipe: str, counted: bool
) -> None:
    asked: list[bool] = []

    def predict_generation(*_: Any, likelihoods: bool, **__: Any) -> Prediction:
        asked.append(likelihoods)
        return prediction_of(1)

    monkeypatch.setattr(predictor, "predict_generation", predict_generation)
    output_of(recipe)
    assert set(asked) == {counted}


def prepared(params: Params, *names: str) -> list[Path]:
    """Folders of datasets as `prepare` leaves them, with its records."""
    stages = {stage.name: stage for stage in declared_stages(ROOT)}
    folders = [Path("data/prepared") / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "stats.json").write_text("{}")
        stage = stages[f"prepare@{folder.name}"]
        record = replace(PROVENANCE, params=used_params(params, stage), inputs=digests(Path(), stage.inputs("data")))
        record.write(Path(str(stage.provenance)))
    return folders
