"""The command that lets lm-evaluation-harness score a model: it agrees with our own evaluation, and what it needs."""

import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ruamel.yaml import YAML

from stages.core.lineage import write_lineage
from stages.kit.data.parquet import write_rows
from stages.kit.data.prepared import to_row
from stages.kit.models.processors import load_processor
from stages.tasks.moe.samples.records import SCHEMA, Record
from stages.tasks.moe.sources.generated import generate
from tests import ROOT
from tests.test_stages import done, write_params
from tests.tiny import tiny_text_model
from tools.lm_eval import __main__ as harness
from tools.lm_eval import scoring as kit_harness
from tools.lm_eval.scoring import Figure, Score

RUN = "base-moe"
FOLDER = Path("data/runs") / RUN / "lm_eval"


def questions() -> list[Record]:
    """Of both domains in turns, with answers that a model of random weights may give. Some transcripts are longer than
    there is room for."""
    facts, meetings = (generate(domain, 6, 3) for domain in ("truthfulqa", "qmsum"))
    facts[::2] = [
        replace(fact, best=fact.incorrect[0], correct=fact.incorrect[:1], incorrect=(fact.best, fact.incorrect[1]))
        for fact in facts[::2]
    ]
    meetings = [replace(meeting, correct=(meeting.best, "ma ma ma g or you")) for meeting in meetings]
    meetings[1] = replace(meetings[1], context=f"{meetings[1].context}\n" * 20)
    meetings[4] = replace(meetings[4], context="Ann: Họp “sách” – 书.\r\n" * 20)
    return [record for pair in zip(facts, meetings, strict=True) for record in pair]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which a mixture of random weights was evaluated on both domains."""
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["profiles"]["tiny"] |= {
        "bases": {"moe": "folder:elsewhere"},
        "datasets": {"both": {"task": "moe", "source": "folder:elsewhere"}},
        "evaluation": {"batch_size": 5, "max_new_tokens": 24, "max_length": 200},
    }
    raw |= {"profiles": {"tiny": raw["profiles"]["tiny"]}, "recipes": {}, "builds": {}, "predictions": {}}
    raw["baselines"] = {RUN: {"task": "moe", "base": "bases/moe", "data": "both"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("workspace"))
        write_params(raw)
        write_questions(questions())
        words = (text for record in questions() for text in (record.question, record.best, *record.incorrect))
        model, tokenizer = tiny_text_model(words, num_experts=4)
        # In an answer these are words to us and nothing to lm-eval; models that were trained do not make them up.
        model.lm_head.weight.data[
            [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        ] = 0
        model.generation_config.update(do_sample=True, temperature=0.7, repetition_penalty=1.5)  # plays no part
        folder = Path("data/bases/moe")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_lineage(folder, kind="base", name="moe", source={"folder": "elsewhere"})
        done("evaluate", RUN)
        yield Path.cwd()


@pytest.fixture
def workspace(evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moved copy, without network."""
    moved = tmp_path / "moved workspace"
    shutil.copytree(evaluated, moved)
    monkeypatch.chdir(moved)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return moved


@pytest.fixture
def said_by_harness(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where lm-eval was run, which is not: it finds a quarter of everything."""
    run_in: list[Path] = []

    def scores(_: Any, __: Any, figures: list[Figure], *, documents_dir: Path, **___: Any) -> list[Score]:
        run_in.append(documents_dir)
        return [Score(value=0.25, stderr=None)] * len(figures)

    monkeypatch.setattr(harness, "harness_scores", scores)
    monkeypatch.setattr(harness, "require_lm_eval", lambda: "0")
    return run_in


def no_network(*_: Any, **__: Any) -> None:
    raise AssertionError("the network was reached for")


def write_questions(records: list[Record]) -> None:
    path = Path("data/prepared/both/val.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows((to_row(record, SCHEMA) for record in records), path, SCHEMA)


def change_params(*keys: str, **change: Any) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    entry = raw
    for key in keys:
        entry = entry[key]
    entry |= change
    write_params(raw)


def ask(*arguments: str) -> str:
    result = CliRunner().invoke(harness.main, arguments or [RUN])
    assert result.exit_code == 0, result.output + str(result.exc_info)
    return result.stdout


def refused(*arguments: str) -> str:
    """The message where it stops as a user's fault does, without a traceback."""
    result = CliRunner().invoke(harness.main, arguments or [RUN])
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == 1
    return " ".join(result.output.split())


def test_the_harness_agrees_with_our_own_evaluation(workspace: Path) -> None:
    pytest.importorskip("lm_eval")
    shown = ask(RUN, "--batch-size", "3")
    metrics = json.loads(Path(f"data/runs/{RUN}/metrics.json").read_text())
    results = json.loads((FOLDER / "results.json").read_text())
    figures = {(figure["task"], figure["metric"]): figure for figure in results["figures"]}
    pairs = {"mc1": ("bakeoff_mc1", "acc"), "mc2": ("bakeoff_mc2", "acc")}
    pairs |= {key: ("bakeoff_qmsum", key) for key in ("rouge1", "rouge2", "rougeL")}
    for ours, (task, metric) in pairs.items():
        figure = figures[task, metric]
        assert figure["value"] == pytest.approx(metrics[ours], abs=1e-5), ours
        assert figure["metrics_json"] == metrics[ours]
        assert f"{metrics[ours]:.4f}" in shown
    assert 0 < metrics["mc1"] < 1
    assert metrics["rouge1"] > metrics["rouge2"] > 0, "or agreement would say little"
    assert abs(figures["bakeoff_mc2_bare", "acc"]["value"] - metrics["mc2"]) > 1e-3
    assert results["questions"] == {"truthfulqa": 6, "qmsum": 6}
    assert sorted(path.name for path in FOLDER.iterdir()) == ["qmsum.jsonl", "results.json", "truthfulqa.jsonl"]


def test_one_question_and_answers_too_unlikely_to_add_up_are_no_failure(workspace: Path) -> None:
    pytest.importorskip("lm_eval")
    record = questions()[0]
    long = tuple(f"{answer} " * 60 for answer in (record.best, *record.incorrect))
    write_questions([replace(record, best=long[0], correct=long[:1], incorrect=long[1:])])
    shown = ask()
    assert "probabilities are too small for lm-eval to add them up" in shown
    assert "metrics.json is of other samples, and left out; run: dvc repro baseline@base-moe" in shown
    assert "ROUGE" not in shown
    for figure in json.loads((FOLDER / "results.json").read_text())["figures"]:
        assert (figure["value"] is None) == figure["task"].startswith("bakeoff_mc2")
        assert figure["stderr"] is figure["metrics_json"] is None


def test_without_lm_eval_the_command_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)  # where nothing else is, either
    monkeypatch.setattr(kit_harness, "version", absent)
    assert "lm-eval, EleutherAI's lm-evaluation-harness, is not installed" in refused()
    assert "make setup EXTRAS=lm-eval" in refused()


def test_figures_are_beside_ours_only_where_those_are_of_the_same(workspace: Path, said_by_harness: list[Path]) -> None:
    metrics = json.loads(Path(f"data/runs/{RUN}/metrics.json").read_text())
    assert f"{0.25 - metrics['mc2']:+z.4f}" in ask()
    assert "left out" not in ask()

    folder = Path("data/bases/moe")
    (folder / "README.md").write_text("another model")
    write_lineage(folder, kind="base", name="moe", source={"folder": "elsewhere"})
    shown = ask()
    assert "metrics.json is of what base-moe was before, and left out; run: dvc repro baseline@base-moe" in shown
    assert f"{metrics['mc2']:.4f}" not in shown
    shutil.rmtree("data/report")
    assert "base-moe has not been evaluated yet" in ask()


def test_the_questions_are_cut_and_limited_as_evaluation_does(workspace: Path, said_by_harness: list[Path]) -> None:
    ask()
    tokenizer = load_processor(Path("data/bases/moe"), None)
    lines = [json.loads(line) for line in (FOLDER / "qmsum.jsonl").read_text().splitlines()]
    assert [len(tokenizer(line["prompt"])["input_ids"]) for line in lines][1::3] == [176, 176]
    assert all(line["question"] in line["prompt"] for line in lines)
    change_params("profiles", "tiny", "evaluation", max_samples=3)
    assert "2 of truthfulqa and 1 of qmsum" in ask()


def test_where_memory_runs_out_fewer_at_once_are_advised_and_nothing_is_left(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(harness, "require_lm_eval", lambda: "0")
    monkeypatch.setattr(harness, "harness_scores", too_much)
    message = refused()
    assert "Tried to allocate, with 5 answers at once; try fewer: make lm-eval RUN=base-moe BATCH_SIZE=" in message
    assert [path.name for path in FOLDER.parent.iterdir() if "lm_eval" in path.name] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "amr"}, "knows nothing like the task amr"),
        ({"base": "bases/mo"}, "no profile has a base 'mo' (did you mean 'moe'?)"),
        ({"answer_format": "full"}, "found 'full'"),
    ],
)
def test_a_run_that_it_cannot_score_is_refused(
    workspace: Path, said_by_harness: list[Path], change: dict[str, str], message: str
) -> None:
    change_params("baselines", RUN, **change)
    assert message in refused()
    assert said_by_harness == []


def test_a_model_that_is_not_what_was_recorded_is_refused(workspace: Path, said_by_harness: list[Path]) -> None:
    path = Path("data/bases/moe/config.json")
    path.write_text(f"{path.read_text()} ")
    assert "rebuild it with: dvc repro -f -s base@moe" in refused()
    assert "no recipe or baseline is called 'base-mo'" in refused("base-mo")
