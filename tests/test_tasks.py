"""Recipes of AMR and chat through all stages, from a folder of data to the comparison, on the shipped tiny bases.

Detection: test_stages.py. Mixtures: test_build.py.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from markupsafe import escape
from transformers import AutoModelForImageTextToText, AutoTokenizer

from stages.core.lineage import read_lineage
from stages.data.guards import read_guard
from stages.internals.torch_internals import cpu_peak
from stages.models.certificate import MergeCertificate
from stages.models.prompts import load_processor
from stages.planning.plan import read_plan
from stages.planning.prediction import read_memory
from stages.tasks.amr.samples.blocks import read_blocks, read_lines
from stages.tasks.amr.samples.graphs import read_graph
from tests import ROOT
from tests.data.images import png
from tests.stage_runs import all_the_way, done, made_up_memory, read_params, refused, small_params, write_params
from tests.tiny import generator_of

pytestmark = pytest.mark.pipeline

COLOURS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220), "grey": (120, 120, 120)}


def line(number: int, colour: str) -> str:
    """A conversation: one image without a part for it, two within a text, or none."""
    answer = {"role": "assistant", "content": json.dumps(colour)}  # JSON, as a metric needs it
    if number % 4 == 0:
        return json.dumps({"messages": [{"role": "user", "content": f"Why {number}?"}, answer]})
    if number % 4 == 1:
        parts = [{"type": "image"}, {"type": "text", "text": f"or {number}"}, {"type": "image"}]
        return json.dumps({"messages": [{"role": "user", "content": parts}, answer], "images": [f"{colour}.png"] * 2})
    asked = {"role": "user", "content": f"Which {number}?"}
    return json.dumps({"messages": [asked, answer], "images": [f"more/{colour}.png"]})


def write_lines(split: str, numbers: Sequence[int]) -> None:
    lines = (line(number, list(COLOURS)[number // 4 % 4]) for number in numbers)
    Path(f"talks/{split}.jsonl").write_text("".join(f"{each}\n" for each in lines))


def write_images() -> None:
    """A folder of conversations about images, and without any."""
    for name, colour in COLOURS.items():
        for folder in ("talks", "talks/more"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{name}.png").write_bytes(png(colour, (100, 80)))
    write_lines("train", range(20))
    write_lines("val", range(20, 24))


def write_sentences() -> None:
    Path("data").mkdir()
    Path("data/unknown.txt").write_text("Tôi đọc sách .\nMẹ thấy nhà .\nAi đó ?\n")


@dataclass(frozen=True, kw_only=True)
class Case:
    task: str
    base: str
    dataset: str
    baseline: str
    recipe: str
    scores: Sequence[str]
    """Metrics between 0 and 1."""
    columns: Sequence[str]
    """Columns of the table, in order."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted paths of parameters with their values."""
    before: Callable[[], None] = lambda: None


TINY = "profiles.tiny"
GENERAL = ROOT / "data/tiny/general/sentences.jsonl"
CASES = {
    "amr": Case(
        task="amr",
        base="llm",
        dataset="visempar",
        baseline="base-llm",
        recipe="amr-mtup",
        scores=["smatch_f1", "smatch_f1_unnormalised", "smatch_f1_repaired", "smatch_f1_restored", "invalid_rate"],
        columns=["Smatch F1"],
        changes={"predictions": {"unknown": {"task": "amr", "recipe": "amr-mtup", "inputs": "data/unknown.txt"}}},
        before=write_sentences,
    ),
    "chat with images": Case(
        task="chat",
        base="assistant",
        dataset="conversations",
        baseline="base-assistant",
        recipe="chat-full",
        scores=["field_accuracy", "json_valid", "exact", "token_f1", "rouge_l", "chrf"],
        columns=["Fields", "Valid JSON", "Exact", "Token F1", "ROUGE-L", "chrF", "Perplexity"],
        changes={
            f"{TINY}.bases.assistant": None,  # of vlm
            f"{TINY}.datasets.conversations": {
                "task": "chat",
                "source": "folder:talks",
                "reader": {"metrics": ["json", "exact", "token_f1", "rouge_l", "chrf", "perplexity"]},
            },
            "recipes.chat-full.parts": {"vision": "full", "llm": "full"},
            "guards": {"general": {"source": f"folder:{ROOT}/data/tiny/general"}},
        },
        before=write_images,
    ),
}


def changed(raw: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = place["vlm"] if value is None else value
    return raw


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The workspace of a case: the base was evaluated, and the recipe went all the way, two steps of training."""
    workspaces: dict[str, Path] = {}

    def finish(name: str) -> Path:
        case = CASES[name]
        if name not in workspaces:
            workspaces[name] = tmp_path_factory.mktemp("workspace")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(workspaces[name])
                case.before()
                raw = changed(small_params(), case.changes)
                raw["recipes"][case.recipe]["max_steps"] = 2
                write_params(raw)
                done("base", case.base)
                for data in (case.dataset, *raw["guards"]):
                    done("prepare", data)
                done("evaluate", case.baseline)
                all_the_way(case.recipe)
                done("compare", case.task)
        return workspaces[name]

    return finish


@pytest.fixture
def workspace(
    finished: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Makes a copy of a case's workspace the working folder."""

    def copy(name: str) -> None:
        shutil.copytree(finished(name), tmp_path / "workspace")
        monkeypatch.chdir(tmp_path / "workspace")

    return copy


@pytest.mark.parametrize("name", CASES)
def test_task_end_to_end(name: str, finished: Callable[[str], Path]) -> None:
    workspace, case = finished(name), CASES[name]
    count = pq.read_table(workspace / f"data/prepared/{case.dataset}/val.parquet").num_rows
    for run in (case.baseline, case.recipe):
        run_dir = workspace / "data/runs" / run
        metrics = json.loads((run_dir / "metrics.json").read_text())
        assert metrics["samples"] == count > 0
        assert "perplexity" not in metrics or metrics["perplexity"] > 1
        rows = pq.read_table(run_dir / "predictions.parquet").to_pylist()
        assert len(rows) == count
        assert (run_dir / "examples/best-1.png").is_file() == (name == "chat with images")
        assert {"best-1", "worst-1", "random-1"} <= {mark for row in rows for mark in row["examples"]}
        page = (workspace / "data/report" / case.task / "index.html").read_text()
        assert all(escape(row["text"][:4000].strip()) in page for row in rows if row["examples"])
    assert all(0 <= metrics[score] <= 1 for score in case.scores)
    assert abs(metrics["memory_error"]) < 0.01
    assert read_plan(case.recipe, runs_dir=run_dir.parent).schedule.num_steps == 2
    certificate = MergeCertificate.read(run_dir / "merge.json", fix="")
    assert not certificate.problems()
    assert certificate.logit_deviation < 1e-3
    assert [*read_lineage(run_dir / "merged").bases()][-1] == read_lineage(workspace / "data/bases" / case.base)
    report_dir = workspace / "data/report" / case.task
    heading, _, *rows = (report_dir / "table.txt").read_text().strip().splitlines()
    assert [column for column in case.columns if column in heading] == sorted(case.columns, key=heading.index)
    assert {case.baseline, case.recipe} <= {row.split()[0] for row in rows if row}
    assert (report_dir / "index.html").is_file()


# Guards: what is lost elsewhere.


def test_every_model_is_measured_on_a_guard_and_every_recipe_compared_there_with_its_base(
    finished: Callable[[str], Path],
) -> None:
    workspace = finished("chat with images")
    texts = [json.loads(each)["completion"] for each in GENERAL.read_text().splitlines()]
    lost = {}
    for run, folder in (("base-assistant", "bases/assistant"), ("chat-full", "runs/chat-full/merged")):
        found = pq.read_table(workspace / f"data/report/chat/runs/{run}/guards.parquet").to_pylist()
        assert [each["guard"] for each in found] == ["general"] * len(texts)
        lost[run] = json.loads((workspace / f"data/runs/{run}/metrics.json").read_text())["guard_general"]
        tokens = sum(each["tokens"] for each in found)
        assert lost[run] == pytest.approx(math.exp(sum(each["nats"] for each in found) / tokens))
        assert found[3]["nats"] == pytest.approx(nats(workspace / "data" / folder, "Viết một câu.", texts[3]), abs=1e-3)
    table = (workspace / "data/report/chat/table.txt").read_text()
    assert "On general" in table
    gap = lost["chat-full"] - lost["base-assistant"]
    assert re.search(rf"  chat-full against its base, on general: .*\({gap:+.3f} \[|than .* by {gap:+.3f} \[", table)
    assert "Perplexity on the guard general" in (workspace / "data/report/chat/index.html").read_text()


def nats(folder: Path, question: str, answer: str) -> float:
    """The negative log-likelihood of an answer and the end of its turn, as transformers alone computes it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    before = len(tokenizer(prompt)["input_ids"])
    ids = tokenizer(f"{prompt}{answer}<|im_end|>", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return float(-log_probs[before - 1 :].sum())


def test_a_guard_is_kept_out_of_trainings_and_counts_in_the_memory_of_evaluations(
    workspace: Callable[[str], None],
) -> None:
    workspace("chat with images")
    write_params(changed(read_params(), {"guards": {"held": {"source": "folder:held"}}}))
    row = {"messages": json.loads(Path("talks/train.jsonl").read_text().splitlines()[0])["messages"]}

    def prepare(answer: str) -> None:
        row["messages"][1]["content"] = answer
        Path("held/rows.jsonl").write_text(json.dumps(row) + "\n")
        done("prepare", "held")

    assert "params.yaml: guards.held.source: no dataset folder held" in refused("prepare", "held")
    Path("held").mkdir()
    Path("held/rows.jsonl").write_text("A text.\n")
    assert "folder:held has 1 invalid sample" in refused("prepare", "held")
    prepare(row["messages"][1]["content"].upper())
    message = refused("plan", "chat-full")
    assert "1 row of guards.held would be trained on: rows.jsonl:1 is train.jsonl:1; remove" in message
    short = read_memory("chat-full").evaluation_bytes
    prepare("A longer answer than any. " * 200)
    with made_up_memory():  # of its training
        done("plan", "chat-full")
    planned = read_memory("chat-full").evaluation_bytes
    assert planned > short
    model = AutoModelForImageTextToText.from_pretrained("data/bases/assistant", dtype=torch.float32).eval()
    processor = load_processor(Path("data/bases/assistant"), None)
    with cpu_peak((*model.parameters(), *model.buffers())) as peak:
        generator_of(model, processor, batch_size=1, max_new_tokens=1).likelihoods(read_guard("held"))
    assert short < peak.size_bytes <= planned


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "amr",
        {"recipes.amr-mtup.answer_format": "penman"},
        "amr-mtup",
        "amr-mtup.answer_format: is penman; expected full, ptr, mtup",
    ),
    ("chat with images", {"recipes.chat-full.parts": {"vision": "full"}}, "chat-full", "train llm too"),
    (
        "chat with images",
        {f"{TINY}.memory.placement": "sharded", f"{TINY}.memory.quantization": "none", f"{TINY}.device.count": 2},
        "chat-full",
        "shares them among processes (sharded); take placement single or balanced",
    ),
]


@pytest.mark.parametrize(("name", "changes", "recipe", "message"), REFUSED)
def test_what_cannot_be_trained_is_refused_while_it_is_planned(
    workspace: Callable[[str], None], name: str, changes: dict[str, Any], recipe: str, message: str
) -> None:
    workspace(name)
    write_params(changed(read_params(), changes))
    assert message in refused("plan", recipe)


# AMR: from sentences to a submission.


def test_a_submission_has_a_graph_for_every_sentence(workspace: Callable[[str], None], tmp_path: Path) -> None:
    workspace("amr")
    done("predict", "unknown")
    submission = Path("data/predictions/unknown.txt")
    blocks = list(read_blocks(read_lines(submission)))
    assert [block.sentence for block in blocks] == ["Tôi đọc sách .", "Mẹ thấy nhà .", "Ai đó ?"]
    for block in blocks:
        assert read_graph("\n".join(block.graph)).concept  # EMPTY, or what a model of two steps makes up
    inputs = Path("data/unknown.txt")
    inputs.write_text("")
    assert "data/unknown.txt" in refused("predict", "unknown")
    inputs.unlink()
    (tmp_path / "secret.txt").write_text("secret\n")
    inputs.symlink_to(tmp_path / "secret.txt")
    assert "data/unknown.txt leads out of data by a link" in refused("predict", "unknown")


# Conversations: groups, metrics, images.


def test_a_text_model_is_refused_images_to_train_or_validate_on(workspace: Callable[[str], None]) -> None:
    workspace("chat with images")
    raw = read_params()
    raw["profiles"]["tiny"]["bases"]["assistant"] = raw["profiles"]["tiny"]["bases"]["llm"]
    write_params(raw)
    done("base", "assistant")
    for train in (range(20), range(0, 20, 4)):
        write_lines("train", train)
        done("prepare", "conversations")
        message = refused("plan", "chat-lora")
        assert "has images, and" in message
        assert "data/bases/assistant is a text model" in message


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [(range(0, 40, 4), {"llm": "full"}), ([number for number in range(20) if number % 4], {"vision": "full"})],
    ids=["texts alone", "vision tower alone"],
)
def test_a_vision_model_trains_on_texts_alone_and_its_tower_on_images_alone(
    workspace: Callable[[str], None], numbers: Sequence[int], parts: dict[str, str]
) -> None:
    workspace("chat with images")
    write_lines("train", numbers[3:])
    write_lines("val", numbers[:3])
    write_params(changed(read_params(), {"recipes.chat-full.parts": parts}))
    done("prepare", "conversations")
    assert ("images" in pq.read_schema("data/prepared/conversations/train.parquet").names) == ("vision" in parts)
    with made_up_memory():
        for stage in ("plan", "train", "merge"):
            done(stage, "chat-full")
    assert not MergeCertificate.read(Path("data/runs/chat-full/merge.json"), fix="").problems()
