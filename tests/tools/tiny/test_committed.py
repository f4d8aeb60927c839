"""The committed bases are those that the code makes, and answer as their cards say."""

import hashlib
import itertools
import json
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import generate_answers
from stages.kit.models.folders import check_model_folder
from stages.kit.models.prompts import load_processor
from tests import ROOT
from tools.tiny import amr, detection, moe
from tools.tiny.pretraining import model_card
from tools.tiny.sentences import generate

TINY = ROOT / "data/tiny"
BASES = [("qwen2", amr, "amr.md"), ("qwen2-folklore", moe, "moe.md"), ("qwen2-vl", detection, "detection.md")]


def read_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((TINY / name / "pretraining.json").read_text())
    return record


@pytest.mark.parametrize(("name", "task", "card"), BASES)
def test_the_first_steps_of_the_committed_bases_still_reproduce(name: str, task: ModuleType, card: str) -> None:
    record = read_record(name)
    # The threads that the tests have: more would only wait for each other, and matter less than the tolerance.
    settings = replace(task.SETTINGS, **record["settings"] | {"threads": torch.get_num_threads()})
    _, processor, losses = task.prepare(settings)
    tokenizer = getattr(processor, "tokenizer", processor)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(TINY / name).get_vocab()
    # Another processor adds numbers in another order; another sample or weight changes far more than that.
    assert list(itertools.islice(losses, 3)) == pytest.approx(record["first_losses"][:3], abs=2e-3)


@pytest.mark.parametrize(("name", "task", "card"), BASES)
def test_the_card_is_about_the_committed_weights(name: str, task: ModuleType, card: str) -> None:
    record = read_record(name)
    assert (TINY / name / "README.md").read_text() == model_card(card, record)
    digest = hashlib.sha256((TINY / name / "model.safetensors").read_bytes()).hexdigest()
    assert record.get("model_sha256", digest) == digest


@pytest.mark.parametrize(("name", "millions"), [("qwen2", 1), ("qwen2-folklore", 0.4), ("qwen2-vl", 3)])
def test_the_committed_folder_is_a_plain_and_small_one(name: str, millions: float) -> None:
    check_model_folder(TINY / name)
    loader = AutoModelForImageTextToText if name.endswith("vl") else AutoModelForCausalLM
    model, info = loader.from_pretrained(TINY / name, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"], "nothing of its training"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(millions * 1e6, rel=0.15)
    assert load_processor(TINY / name, None).chat_template


def test_the_base_for_graphs_is_good_at_its_exercises_and_writes_no_graph_when_asked_for_one() -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY / "qwen2", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "qwen2")
    assert min(amr.measure(base, tokenizer, 48).values()) > 0.4
    instruction = "Phân tích câu sau thành đồ thị AMR, viết theo ký pháp PENMAN trên một dòng."

    questions = [
        Conversation(sample_id="", messages=[{"role": "user", "content": f"{instruction}\n{sentence}"}])
        for sentence, _ in generate(16, seed=7)
    ]
    answers = generate_answers(base, tokenizer, questions, batch_size=16, max_new_tokens=64)
    assert not any(re.search(r":[a-z]", answer) for answer in answers)


def test_the_base_for_boxes_is_good_at_its_own_scenes_and_poor_at_tables() -> None:
    model = AutoModelForImageTextToText.from_pretrained(TINY / "qwen2-vl", dtype=torch.float32)
    processor = load_processor(TINY / "qwen2-vl", None)
    own = detection.measure(model, processor, ("objects",), 32)
    tables = detection.measure(model, processor, ("front", "back"), 48)
    assert own["mean_iou"] > 0.8
    assert tables["mean_iou"] < 0.3
    assert min(own["detection_rate"], tables["detection_rate"]) > 0.95  # it answers in the right form
