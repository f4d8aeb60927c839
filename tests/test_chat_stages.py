"""All stages in a row for conversations of one's own, from a folder of JSON Lines to the comparison."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from stages.kit.evaluation import likelihood
from tests import ROOT
from tests.test_stages import done, refused, write_params

pytestmark = pytest.mark.pipeline

METRICS = ["json", "exact", "token_f1", "rouge_l", "chrf", "perplexity"]


def line(number: int) -> str:
    asked = [{"role": "system", "content": "Hai."}, {"role": "user", "content": f"Ngày {number}?"}]
    messages = [*asked, {"role": "assistant", "content": json.dumps({"day": number})}]
    return json.dumps({"messages": messages, "who": number // 2}) + "\n"


def run_all_stages() -> None:
    """Both recipes and the base, in the working folder, to their comparison."""
    done("base", "assistant")
    done("prepare", "conversations")
    done("evaluate", "base-assistant")
    for name in ("chat-lora", "chat-full"):
        for stage in ("plan", "train", "merge", "evaluate"):
            done(stage, name)
    done("compare", "chat")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which the base was evaluated, and both recipes went all the way, two steps of training each."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "data").mkdir()
    (workspace / "data/tiny").symlink_to(ROOT / "data/tiny")
    (workspace / "talks").mkdir()
    (workspace / "talks/train.jsonl").write_text("".join(line(number) for number in range(40)))
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["datasets"]["conversations"] = {"task": "chat", "source": "folder:talks", "group": "who", "metrics": METRICS}
    tiny["memory"]["micro_batch"] = 4
    tiny["evaluation"] = {"batch_size": 8, "max_new_tokens": 12}
    for name in ("chat-lora", "chat-full"):
        raw["recipes"][name].update(effective_batch=8, max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(raw)
        run_all_stages()
        yield workspace


@pytest.fixture
def workspace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "workspace"
    shutil.copytree(finished, copy, symlinks=True)
    monkeypatch.chdir(copy)
    return copy


def test_answers_are_scored_by_every_metric_that_is_named(finished: Path) -> None:
    for name in ("base-assistant", "chat-lora", "chat-full"):
        run_dir = finished / "data/runs" / name
        metrics = json.loads((run_dir / "metrics.json").read_text())
        for figure in ("field_accuracy", "json_valid", "exact", "token_f1", "rouge_l", "chrf"):
            assert 0 <= metrics[figure] <= 1, figure
        assert metrics["perplexity"] > 1
        assert pq.read_table(run_dir / "predictions.parquet").num_rows == metrics["samples"] == 4
        assert (run_dir / "examples/worst-1.png").is_file()


def test_no_group_is_in_two_splits(finished: Path) -> None:
    read = {
        split: pq.read_table(finished / f"data/prepared/conversations/{split}.parquet") for split in ("train", "val")
    }
    groups = {split: set(table["group"].to_pylist()) for split, table in read.items()}
    assert (len(groups["train"]), len(groups["val"])) == (18, 2)
    assert not groups["train"] & groups["val"]


def test_the_table_is_ranked_by_the_first_metric_and_has_a_column_for_each(finished: Path) -> None:
    heading, _, *rows = (finished / "data/report/chat/table.txt").read_text().strip().splitlines()
    columns = ["Fields", "Valid JSON", "Exact", "Token F1", "ROUGE-L", "chrF", "Perplexity"]
    assert [name for name in columns if name in heading] == columns
    assert sorted(columns, key=heading.index) == columns
    assert [row.split()[0] for row in rows[:3]] == ["base-assistant", "chat-lora", "chat-full"]
    assert "All weights against LoRA" in (finished / "data/report/chat/table.txt").read_text()


def test_other_metrics_change_no_training_data_and_ask_for_no_more_than_they_need(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Path("data/prepared/conversations")
    before = {name: (prepared / name).read_bytes() for name in ("train.parquet", "val.parquet")}
    monkeypatch.setattr(likelihood, "routing", lambda *_, **__: pytest.fail("no score of chat tells of routers"))
    raw = YAML(typ="safe").load(Path("params.yaml"))
    for metric, other in (("perplexity", "exact"), ("exact", "perplexity")):
        raw["profiles"]["tiny"]["datasets"]["conversations"]["metrics"] = [metric]
        write_params(raw)
        done("prepare", "conversations")
        assert (prepared / "train.parquet").read_bytes() == before["train.parquet"]
        assert (prepared / "val.parquet").read_bytes() != before["val.parquet"]
        done("evaluate", "base-assistant")
        metrics = json.loads(Path("data/runs/base-assistant/metrics.json").read_text())
        assert metric in metrics
        assert other not in metrics


def test_a_target_is_refused_while_it_is_planned(workspace: Path) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["recipes"]["chat-lora"]["answer_format"] = "full"
    write_params(raw)
    assert "chat has one form of answers" in refused("plan", "chat-lora")
