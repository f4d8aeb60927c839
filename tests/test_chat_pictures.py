"""All stages in a row for conversations about pictures, and for conversations without, on a vision base."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image
from ruamel.yaml import YAML

from stages.kit.models.certificate import read_certificate
from tests import ROOT
from tests.kit.data.pictures import picture
from tests.test_chat_stages import run_all_stages
from tests.test_stages import done, refused, write_params
from tools.plan.__main__ import main as preview

pytestmark = pytest.mark.pipeline

COLOURS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220), "grey": (120, 120, 120)}


def line(number: int, colour: str) -> str:
    """One picture without a part for it, two within a text, or none."""
    answer = {"role": "assistant", "content": colour}
    if number % 4 == 0:
        return json.dumps({"messages": [{"role": "user", "content": f"Why {number}?"}, answer]})
    if number % 4 == 1:
        parts = [{"type": "image"}, {"type": "text", "text": f"or {number}"}, {"type": "image"}]
        return json.dumps({"messages": [{"role": "user", "content": parts}, answer], "images": [f"{colour}.png"] * 2})
    asked = {"role": "user", "content": f"Which {number}?"}
    return json.dumps({"messages": [asked, answer], "images": [f"pictures/{colour}.png"]})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which the base was evaluated, and two recipes went all the way, two steps of training each: LoRA
    of the language model, and all weights of it and of the vision tower."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "data").mkdir()
    (workspace / "data/tiny").symlink_to(ROOT / "data/tiny")
    (workspace / "talks/pictures").mkdir(parents=True)
    for name, colour in COLOURS.items():
        for folder in ("talks", "talks/pictures"):
            (workspace / folder / f"{name}.png").write_bytes(picture(colour, (100, 80)))
    lines = [line(number, list(COLOURS)[number // 4 % 4]) for number in range(24)]
    (workspace / "talks/train.jsonl").write_text("".join(f"{each}\n" for each in lines[:20]))
    (workspace / "talks/val.jsonl").write_text("".join(f"{each}\n" for each in lines[20:]))
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"]["assistant"] = "folder:data/tiny/qwen2-vl"
    tiny["datasets"]["conversations"] = {"task": "chat", "source": "folder:talks", "metrics": ["chrf", "perplexity"]}
    tiny["images"] = {"min_pixels": 3136, "max_pixels": 12544}
    tiny["memory"]["micro_batch"] = 4
    tiny["evaluation"] = {"batch_size": 4, "max_new_tokens": 6}
    for name in ("chat-lora", "chat-full"):
        raw["recipes"][name].update(effective_batch=8, max_steps=2)
    raw["recipes"]["chat-full"]["parts"] = {"vision": "full", "llm": "full"}
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


@pytest.mark.parametrize("name", ["chat-lora", "chat-full"])
def test_conversations_with_and_without_pictures_go_all_the_way(finished: Path, name: str) -> None:
    run_dir = finished / "data/runs" / name
    certificate = read_certificate(run_dir / "merge.json", name)
    assert not certificate.problems()
    assert certificate.logit_deviation < 1e-3
    metrics = json.loads((run_dir / "metrics.json").read_text())
    assert metrics["samples"] == 4
    assert metrics["perplexity"] > 1
    assert abs(metrics["memory_error"]) < 0.01
    assert name in (finished / "data/report/chat/table.txt").read_text()


def test_an_example_shows_the_pictures_above_the_texts(finished: Path) -> None:
    run_dir = finished / "data/runs/chat-lora"
    row = pq.read_table(run_dir / "predictions.parquet").to_pylist()
    assert {each["question"] for each in row} == {"Why 20?", "or 21", "Which 22?", "Which 23?"}
    corners = {Image.open(path).getpixel((2, 2)) for path in (run_dir / "examples").glob("*.png")}
    assert COLOURS["green"] in corners


def test_a_text_model_is_refused_pictures_while_it_is_planned(workspace: Path) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["profiles"]["tiny"]["bases"]["assistant"] = "folder:data/tiny/qwen2"
    write_params(raw)
    done("base", "assistant")
    message = refused("plan", "chat-lora")
    assert "sample train.jsonl:2 has images, and data/bases/assistant is a text model" in " ".join(message.split())


def test_a_text_model_is_refused_pictures_that_are_to_be_validated_on_alone(workspace: Path) -> None:
    Path("talks/train.jsonl").write_text("".join(f"{line(number, 'red')}\n" for number in range(0, 20, 4)))
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["profiles"]["tiny"]["bases"]["assistant"] = "folder:data/tiny/qwen2"
    write_params(raw)
    done("base", "assistant")
    done("prepare", "conversations")
    for message in (refused("plan", "chat-lora"), CliRunner().invoke(preview, ["chat-lora"]).output):
        words = " ".join(message.split())
        assert "data/prepared/conversations has samples with pictures" in words
        assert "data/bases/assistant is a text model; take a base of" in words


@pytest.mark.parametrize(
    ("parts", "placement", "problem"),
    [
        ({"vision": "full"}, {}, "trains only parts that see pictures; train llm too"),
        ({"llm": "full"}, {"placement": "sharded"}, "shares them among processes (sharded); take placement single"),
        ({"llm": "full", "projector": "full"}, {"placement": "ddp"}, "shares them among processes (ddp)"),
    ],
)
def test_a_conversation_without_pictures_is_refused_where_training_needs_some(
    workspace: Path, parts: dict[str, str], placement: dict[str, str], problem: str
) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["recipes"]["chat-full"]["parts"] = parts
    raw["profiles"]["tiny"]["memory"].update(placement, quantization="none")
    raw["profiles"]["tiny"]["device"]["count"] = 2 if placement else 1
    write_params(raw)
    message = " ".join(refused("plan", "chat-full").split())
    assert "has no picture, and recipe chat-full" in message
    assert problem in message


def test_texts_alone_train_a_vision_model_too(workspace: Path) -> None:
    lines = [line(number, "red") for number in range(0, 40, 4)]
    Path("talks/train.jsonl").write_text("".join(f"{each}\n" for each in lines))
    Path("talks/val.jsonl").unlink()
    done("prepare", "conversations")
    assert "images" not in pq.read_schema("data/prepared/conversations/train.parquet").names
    for stage in ("plan", "train", "merge", "evaluate"):
        done(stage, "chat-lora")


def test_a_tower_that_is_trained_alone_is_certified_on_a_picture(workspace: Path) -> None:
    lines = [line(number, "red") for number in range(20) if number % 4]
    Path("talks/train.jsonl").write_text("".join(f"{each}\n" for each in lines))
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["recipes"]["chat-full"]["parts"] = {"vision": "full"}
    write_params(raw)
    for stage, name in (("prepare", "conversations"), *((stage, "chat-full") for stage in ("plan", "train", "merge"))):
        done(stage, name)
    assert not read_certificate(Path("data/runs/chat-full/merge.json"), "chat-full").problems()
