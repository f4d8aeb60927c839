"""The first steps of a training and some samples of an evaluation, run again after an edit of the code.

Of the real trainer: tests/test_interrupted.py.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stages.launcher.pipeline import DeclaredStage
from tests.launcher.small_checkout import CALLER, run, small_checkout
from tools.verify.__main__ import main
from tools.verify.rerun import launch

TRAIN, EVALUATE = "train@r1-llm-only", "evaluate@r1-llm-only"
SPLIT, TRACE = "data/prepared/nutrition-tables/val.parquet", "data/runs/r1-llm-only/training/trace.csv"

# Stages that do next to nothing. A training of five steps, which can be stopped where it has a checkpoint.

PLAN = """
import pathlib

pathlib.Path("data/runs/r1-llm-only/plan.yaml").write_text({!r})
"""

TRAINING = """
import pathlib, re, signal, sys, time

RATE = 1.0
run_dir = pathlib.Path("data/runs/r1-llm-only")
trace = [((2 - 0.1 * step * (RATE if step > 1 else 1)).hex(), (1 / step).hex()) for step in range(1, 6)]
if steps := re.search(r"every_steps: (\\d+)", pathlib.Path("params.yaml").read_text()):
    import torch

    saved = pathlib.Path(f".bakeoff/checkpoints/r1-llm-only/0123/.step.partial")
    saved.mkdir(parents=True)
    torch.save({"trace": trace[: int(steps[1])]}, saved / "process-0.pt")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    saved.rename(saved.with_name(f"step-{int(steps[1]):06d}"))
    signal.pause()
(run_dir / "training").mkdir(exist_ok=True)
rows = (f"{step},{loss},{norm}" for step, (loss, norm) in enumerate(trace, start=1))
(run_dir / "training/trace.csv").write_text("\\n".join(("step,loss,grad_norm", *rows)))
"""

EVALUATION = """
import pathlib
import pyarrow as pa
import pyarrow.parquet as pq

WORD = "table"
samples = pq.read_table("data/prepared/nutrition-tables/val.parquet").to_pylist()
rows = [{"id": each["id"], "answer": f"{WORD} {each['id']}" if each["id"] > 3 else "no"} for each in samples]
for number, row in enumerate(rows):  # what depends on all samples, and not on this one alone
    row |= {"group": number, "examples": [f"random-{len(rows) - number}"]}
pathlib.Path("data/runs/r1-llm-only").mkdir(parents=True, exist_ok=True)
pq.write_table(pa.Table.from_pylist(rows), "data/runs/r1-llm-only/predictions.parquet")
"""

PIPELINE = """
stages:
  plan:
    foreach: [r1-llm-only]
    do:
      cmd: exec docker/run plan
      deps: [data/guards, stages/plan.py]
      outs: ["data/runs/${item}/plan.yaml"]
  train:
    foreach: [r1-llm-only]
    do:
      cmd: exec docker/run train
      params: [tracking]
      deps: [data/prepared/nutrition-tables, "data/runs/${item}/plan.yaml", stages/train.py]
      outs: ["data/runs/${item}/training/trace.csv"]
  evaluate:
    foreach: [r1-llm-only]
    do:
      cmd: exec docker/run evaluate
      params: [scored]
      deps: [data/prepared/nutrition-tables, stages/evaluate.py]
      outs: ["data/runs/${item}/predictions.parquet"]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all stages run by DVC."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    workspace = small_checkout(
        tmp_path_factory.mktemp("finished") / "a workspace",
        pipeline=PIPELINE,
        train=TRAINING,
        evaluate=EVALUATION,
    )
    plan = (workspace / "data/runs/r1-llm-only/plan.yaml").read_text()
    (workspace / "stages/plan.py").write_text(PLAN.format(plan))
    (workspace / "data/prepared/nutrition-tables").mkdir(parents=True)
    (workspace / "data/guards").mkdir()
    pq.write_table(pa.table({"id": list(range(8))}), workspace / "data/prepared/nutrition-tables/val.parquet")
    run(workspace, "bash", "-c", "dvc init --quiet --no-scm && dvc repro --quiet")
    return workspace


@pytest.fixture
def workspace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in CALLER.items():
        monkeypatch.setenv(name, value)
    copy = Path(shutil.copytree(finished, tmp_path / "a copy", symlinks=True))
    monkeypatch.chdir(copy)
    yield copy
    assert not list(copy.glob(".bakeoff/verify/*")), "the temporary workspace is removed"


def verify(*options: str) -> Result:
    return CliRunner().invoke(main, options)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def out_of_date(workspace: Path) -> set[str]:
    """The stages that DVC would run again."""
    status = run(workspace, "dvc", "status", code=None)
    return {line.removesuffix(":") for line in status.splitlines() if line.endswith(":") and line[0].isalpha()}


def test_the_same_bits_keep_a_training(workspace: Path) -> None:
    edit(workspace / "stages/train.py", "2 - 0.1 * step", "2.0 - 0.1 * step")
    edit(workspace / "stages/plan.py", "import pathlib", "import pathlib  # a comment")
    assert out_of_date(workspace) == {"plan@r1-llm-only", TRAIN}
    result = verify("--rerun", TRAIN, "--steps", "3")
    assert result.exit_code == 0, result.output
    command = "dvc commit --force plan@r1-llm-only train@r1-llm-only"
    assert f"the same bits in the first 3 of 5 steps of {TRAIN}, loss and gradient norm; keep" in result.output
    assert result.output.rstrip().endswith(command)
    assert out_of_date(workspace) == {"plan@r1-llm-only", TRAIN}, "without --keep nothing changes"
    trace = (workspace / "data/runs/r1-llm-only/training/trace.csv").read_bytes()
    run(workspace, *command.split())
    assert out_of_date(workspace) == set()
    assert (workspace / "data/runs/r1-llm-only/training/trace.csv").read_bytes() == trace


def test_the_first_step_that_differs_is_named(workspace: Path) -> None:
    edit(workspace / "stages/train.py", "RATE = 1.0", "RATE = 1.0001")
    result = verify("--rerun", TRAIN, "--steps", "3", "--keep")
    assert result.exit_code == 1, result.output
    loss = [(2 - 0.1 * 2 * rate).hex() for rate in (1.0001, 1)]
    assert f"at step 2 the loss is {loss[0]}, and was {loss[1]}" in result.output
    assert out_of_date(workspace) == {TRAIN}


def test_another_plan_is_another_training(workspace: Path) -> None:
    edit(workspace / "stages/plan.py", "seed: 42", "seed: 43")
    result = verify("--rerun", TRAIN, "--steps", "3", "--keep")
    assert result.exit_code == 1
    assert "data/runs/r1-llm-only/plan.yaml comes out DIFFERENT" in result.output
    assert out_of_date(workspace) == {"plan@r1-llm-only"}


def test_the_same_completions_keep_an_evaluation(workspace: Path) -> None:
    edit(workspace / "stages/evaluate.py", '"no"', '"n" + "o"')
    result = verify("--rerun", EVALUATE, "--samples", "5", "--keep")
    assert result.exit_code == 0, result.output
    assert "the same completions and scores of 5 of 8 samples" in result.output
    assert out_of_date(workspace) == set()


def test_a_sample_that_differs_is_named(workspace: Path) -> None:
    edit(workspace / "stages/evaluate.py", 'WORD = "table"', 'WORD = "tables"')
    result = verify("--rerun", EVALUATE, "--samples", "4", "--keep")
    assert result.exit_code == 1
    assert "sample 5 differs in answer; answer is 'tables 4', and was 'table 4'" in result.output
    assert out_of_date(workspace) == {EVALUATE}


def test_a_plan_with_other_data_is_not_kept_with_its_training(workspace: Path) -> None:
    Path("data/guards/more").write_text("")
    edit(workspace / "stages/train.py", "2 - 0.1 * step", "2.0 - 0.1 * step")
    edit(
        workspace / "stages/plan.py",
        "import pathlib",
        "import pathlib; assert pathlib.Path('data/guards/more').exists()",
    )
    result = verify("--rerun", TRAIN, "--steps", "3", "--keep")
    assert result.exit_code == 0, result.output
    assert out_of_date(workspace) == {"plan@r1-llm-only"}


@pytest.mark.parametrize(
    ("edited", "message"),
    [("stages/evaluate.py", "the code was edited while evaluate@r1-llm-only ran"), (SPLIT, f"  {SPLIT} (")],
)
def test_what_is_edited_meanwhile_is_not_kept(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, edited: str, message: str
) -> None:
    def launch_and_edit(folder: Path, stage: DeclaredStage) -> None:
        launch(folder, stage)
        path = workspace / edited
        content = path.read_bytes()
        path.unlink()  # it may be a link to DVC's cache
        path.write_bytes(content + b"\n")

    monkeypatch.setattr("tools.verify.beginning.launch", launch_and_edit)
    result = verify("--rerun", EVALUATE, "--samples", "5", "--keep")
    assert result.exit_code == 1
    assert message.partition("/val")[0] in result.output
    assert EVALUATE in out_of_date(workspace)


@pytest.mark.parametrize(
    ("asked", "path", "edited", "different"),
    [
        ((TRAIN, "--steps", "1"), SPLIT, "", "data/prepared/nutrition-tables"),
        ((TRAIN, "--steps", "1", "--keep"), TRACE, "step,loss,grad_norm", TRACE),
        ((TRAIN, "--steps", "1", "--keep"), "dvc.lock", "{schema: '2.0'}", TRACE),
        ((EVALUATE, "--samples", "1", "--keep"), SPLIT, "", "data/prepared/nutrition-tables"),
        ((EVALUATE, "--samples", "1"), "params.yaml", "scored: test", "params.yaml: scored"),
    ],
)
def test_other_data_settings_and_outputs_are_refused_before_anything_runs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], path: str, edited: str, different: str
) -> None:
    monkeypatch.setattr("tools.verify.beginning.temporary_workspace", None)
    Path(path).unlink()
    Path(path).write_text(edited)
    result = verify("--rerun", *asked)
    assert result.exit_code == 1
    assert f"  {different} (" in result.output
    assert f"make them again with: dvc repro {asked[0]}" in result.output
    assert "commit" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rerun", EVALUATE, "--steps", "3"), "STEPS goes with RERUN=train@RECIPE"),
        (("--rerun", TRAIN, "--samples", "3"), "SAMPLES goes with RERUN=evaluate@RECIPE"),
        (("--rerun", TRAIN, "--steps", "3", "--samples", "3"), "--rerun takes --steps or --samples"),
        (("--rerun", TRAIN, "--keep"), "--rerun takes --steps or --samples"),
        (("--steps", "3"), "--rerun takes --steps or --samples"),
    ],
)
def test_options_that_do_not_go_together_are_refused(workspace: Path, options: tuple[str, ...], message: str) -> None:
    result = verify(*options)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
