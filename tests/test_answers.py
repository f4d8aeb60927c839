"""Answers files as rows of a table: scored as a model's completions are, and refused where they do not fit."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.launcher.pipeline import Request
from stages.tasks.amr.samples import Record, read_split
from tests.stage_runs import done, read_params, refused, small_params, write_params
from tests.tasks import TASKS, asked_of_a_model

pytestmark = pytest.mark.pipeline
DATA = {"amr": "visempar", "chat": "conversations", "detection": "nutrition-tables", "moe": "both-domains"}
ROWS = {task: {"task": task, "base": "answers/peer.jsonl", "data": DATA[task]} for task in TASKS}


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = small_params()
    raw["baselines"] = {f"peer-{task}": row for task, row in ROWS.items()}
    raw["baselines"]["peer-amr"]["answer_format"] = "full"
    raw["baselines"]["submission"] = {**raw["baselines"]["peer-amr"], "base": "answers/submission.txt"}
    write_params(raw)
    Path("data/answers").mkdir(parents=True)


def write_answers(answers: Iterable[tuple[str, Any]]) -> None:
    lines = (json.dumps({"id": sample_id, "answer": answer, "model": "a peer's"}) for sample_id, answer in answers)
    Path("data/answers/peer.jsonl").write_text("".join(f"{line}\n" for line in lines))


def amr_records() -> tuple[list[Record], list[str]]:
    """The validation samples, and a graph for each: right, of other words, or broken."""
    done("prepare", "visempar")
    records = read_split(Path("data/prepared/visempar"), "val")
    graphs = [record.graph for record in records]
    return records, [graphs[0], graphs[1].replace("(", "(x", 1), graphs[2][:-1], "", *graphs[4:]]


def results(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run_dir = Path("data/runs", name)
    return json.loads((run_dir / "metrics.json").read_text()), pq.read_table(
        run_dir / "predictions.parquet"
    ).to_pylist()


def test_a_row_of_answers_has_the_scorers_figures_in_both_forms() -> None:
    records, graphs = amr_records()
    expected, expected_rows = load_task("amr", "scoring").score(records, graphs, answer_format="full")
    assert 0 < expected["smatch_f1"] < 1
    # In another order, as nothing but the id or the sentence tells the sample.
    pairs = list(zip(records, graphs, strict=True))[::-1]
    write_answers((record.id, graph) for record, graph in pairs)
    blocks = (f"#::snt {record.sentence.upper()}\r\n{graph}\r\n\r\n" for record, graph in pairs)
    Path("data/answers/submission.txt").write_text("".join(blocks), newline="")
    for name in ("peer-amr", "submission"):
        done("evaluate", name)
        metrics, rows = results(name)
        assert metrics.pop("answers") == f"data/{read_params()['baselines'][name]['base']}"
        assert metrics.pop("ordered_by") == "f1"
        assert {name: value for name, value in metrics.items() if not name.startswith("failure_")} == expected
        figures = [key for key in expected_rows[0] if key not in ("text", "problem")]
        assert [[row[key] for key in figures] for row in rows] == [
            [row[key] for key in figures] for row in expected_rows
        ]
    done("compare", "amr")
    table = Path("data/report/amr/table.txt").read_text()
    assert "submission: answers of data/answers/submission.txt" in table


def test_every_task_scores_answers_but_those_that_need_a_model() -> None:
    for task in ("detection", "chat"):
        data = DATA[task]
        done("prepare", data)
        records = load_task(task, "samples").read_split(Path("data/prepared", data), "val")
        answered = [asked_of_a_model(task).conversation(record, answered=True) for record in records]
        write_answers((each.sample_id, each.messages[-1]["content"][0]["text"]) for each in answered)
        done("evaluate", f"peer-{task}")
        metrics, rows = results(f"peer-{task}")
        assert min(row[metrics["ordered_by"]] for row in rows) > 0.99, task
        assert "perplexity" not in metrics
        done("compare", task)
    for data in ("truthfulqa", "qmsum", "both-domains"):
        done("prepare", data)
    records = load_task("moe", "samples").read_split(Path("data/prepared/both-domains"), "val")
    write_answers((record.id, record.best) for record in records)
    assert "ranks models by perplexity" in refused("evaluate", "peer-moe")


def test_a_grouped_chat_is_compared_by_its_groups() -> None:
    Path("chats").mkdir()
    for split, customers in (("train", range(2)), ("val", range(2, 10))):
        chats = [
            (f"{split} {who} asks {number}?", f"Answer {number}.", who) for who in customers for number in range(3)
        ]
        lines = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}], "who": who}
            for asked, told, who in chats
        ]
        Path(f"chats/{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    raw = read_params()
    reader = {"group": "who", "metrics": ["exact"]}
    raw["profiles"]["tiny"]["datasets"]["conversations"] = {"task": "chat", "source": "folder:chats", "reader": reader}
    raw["baselines"]["other"] = {**ROWS["chat"], "base": "answers/other.jsonl"}
    write_params(raw)
    done("prepare", "conversations")
    records = load_task("chat", "samples").read_split(Path("data/prepared/conversations"), "val")
    write_answers((record.id, record.answer) for record in records)
    Path("data/answers/peer.jsonl").rename("data/answers/other.jsonl")
    write_answers((record.id, record.answer if "2 asks" in record.question else "No.") for record in records)
    for name in ("peer-chat", "other"):
        done("evaluate", name)
    metrics, rows = results("peer-chat")
    assert [row["group"] for row in rows] == [number // 3 for number in range(24)]
    assert metrics["exact_low"] == 0 < 1 / 8 == metrics["exact"] < metrics["exact_high"]
    done("compare", "chat")
    table = Path("data/report/chat/table.txt").read_text()
    assert "24 samples in 8 groups; intervals are 95%, paired by group." in table


def refusal(answers: Sequence[tuple[str, Any]]) -> str:
    write_answers(answers)
    message = refused("evaluate", "peer-amr")
    assert "data/answers/peer.jsonl" in message
    assert not Path("data/runs/peer-amr/metrics.json").exists()
    return message


def test_answers_that_do_not_fit_are_refused_with_their_samples() -> None:
    records, graphs = amr_records()
    right = [(record.id, graph) for record, graph in zip(records, graphs, strict=True)]
    ids = [sample_id for sample_id, _ in right]
    message = refusal([*right[1:], right[1], ("elsewhere", "x")])
    for problem in (f"no answer: {ids[0]!r}", f"a second answer: {ids[1]!r} in line 5", "'elsewhere' in line 6"):
        assert problem in message
    other = refusal([(f"other-{number}", graph) for number, graph in enumerate(graphs)])
    assert "no such sample: 'other-0' in line 1" in other
    assert "of the 5 samples" in other
    assert f"line 2: {{'id': {ids[1]!r}, 'answer': None" in refusal([right[0], (ids[1], None)])
    assert "line 1: the answer holds half of a surrogate pair" in refusal([(ids[0], "\ud800"), *right[1:]])
    Path("data/answers/peer.jsonl").write_text(f'{{"id": "{ids[0]}", "answer": "(a)", "answer": "(b)"}}\n')
    assert "peer.jsonl line 1: the key 'answer' is there twice" in refused("evaluate", "peer-amr")
    elsewhere = Path("elsewhere.jsonl")
    Path("data/answers/peer.jsonl").rename(elsewhere)
    Path("data/answers/peer.jsonl").symlink_to(elsewhere.absolute())
    assert "data/answers/peer.jsonl leads out of data/answers by a link" in refused("evaluate", "peer-amr")
    Path("data/answers/submission.txt").write_text(
        f"#::snt {records[0].sentence}\n{graphs[0]}\n\n#::snt Không .\n(k)\n"
    )
    message = refused("evaluate", "submission")
    assert "no such sample: 'Không .' in line" in message
    assert f"no answer: {ids[1]!r}" in message


def test_a_row_of_answers_has_the_form_of_its_format_and_needs_no_gpu() -> None:
    params = load_params().on("qwen25-7b")
    request = Request(stage="evaluate", args=("peer-amr",), params=params, stages=(), workspace_dir=Path(), caller={})
    assert request.num_gpus == 0
    amr_records()
    raw = read_params()
    raw["baselines"]["submission"]["answer_format"] = "ptr"
    write_params(raw)
    Path("data/answers/submission.txt").write_text("#::snt a\n(a / a)\n")
    assert "submission.txt has #::snt lines" in refused("evaluate", "submission")
    raw["baselines"]["r1-llm-only"] = raw["baselines"]["peer-amr"]
    write_params(raw)
    assert "baselines.r1-llm-only" in refused("evaluate", "peer-amr")
