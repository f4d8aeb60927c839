import dataclasses
import hashlib
import itertools
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.kit.models.folders import check_model_folder
from stages.kit.models.processors import load_processor
from stages.kit.models.tiny import SMALLEST_TEXT, build_tiny_qwen2
from stages.tasks.amr.pretrain import Settings, measure, train
from stages.tasks.amr.pretraining.exercises import FULL_LENGTH_FROM, corpus, exercise
from stages.tasks.amr.sources.grammar import generate

BASE = Path(__file__).parents[3] / "data" / "tiny" / "qwen2"
RECORD = json.loads((BASE / "pretraining.json").read_text())
TOKENIZER = AutoTokenizer.from_pretrained(BASE, local_files_only=True)


@pytest.fixture(autouse=True)
def _other_tests_keep_their_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, local_files_only=True).eval()


def asked(*sentences: str) -> list[Conversation]:
    """As a task asks: an instruction, and the sentence in the next line."""
    instruction = "Phân tích câu sau thành đồ thị AMR, viết theo ký pháp PENMAN trên một dòng."
    turns = [[{"role": "user", "content": f"{instruction}\n{sentence}"}] for sentence in sentences]
    return [Conversation(sample_id=str(index), messages=messages) for index, messages in enumerate(turns)]


def test_the_first_steps_of_the_committed_base_still_reproduce():
    settings = dataclasses.replace(Settings(**RECORD["settings"]), threads=torch.get_num_threads())
    model, tokenizer = build_tiny_qwen2(corpus(), seed=settings.seed)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    steps = 3
    losses = list(itertools.islice(train(model, tokenizer, settings), steps))
    assert losses == pytest.approx(RECORD["first_losses"][:steps], abs=2e-3)


def test_the_card_is_about_the_committed_weights():
    digest = hashlib.sha256((BASE / "model.safetensors").read_bytes()).hexdigest()
    assert RECORD["model_sha256"] == digest
    assert digest in (BASE / "README.md").read_text()


def test_the_committed_folder_is_a_plain_and_small_one():
    check_model_folder(BASE)
    model, info = AutoModelForCausalLM.from_pretrained(BASE, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert 900_000 < sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    assert sum(path.stat().st_size for path in BASE.iterdir()) <= 4_000_000
    assert load_processor(BASE, None).chat_template


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str):
    # NFC is what the tokenizer of Qwen2 makes of a text first.
    normalized = TOKENIZER.backend_tokenizer.normalizer.normalize_str(text)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == normalized


def test_the_words_of_the_grammar_are_short():
    for sentence, graph in generate(50, seed=3):
        assert len(TOKENIZER.encode(sentence)) < 1.5 * len(sentence.split()) + 2
        assert len(TOKENIZER.encode(" ".join(graph.split()))) < 130


def test_the_committed_base_is_good_at_its_exercises(base):
    assert min(measure(base, TOKENIZER, 48).values()) > 0.4


def test_the_committed_base_writes_no_graph_when_asked_for_one(base):
    questions = asked(*(sentence for sentence, _ in generate(16, seed=7)))
    answers = generate_answers(base, TOKENIZER, questions.__getitem__, 16, batch_size=16, max_new_tokens=64)
    assert not any(re.search(r":[a-z]", answer) for answer in answers)


def test_no_exercise_shows_a_role_or_a_sentence_with_brackets():
    seen = set()
    for index in range(0, 2 * FULL_LENGTH_FROM, 5):
        conversation = exercise(0, index)
        question, answer = (message["content"] for message in conversation.messages)
        kind = conversation.sample_id.partition("/")[0]
        seen.add(kind)
        assert not re.search(r":[a-z]", question + answer)
        assert "(" not in question
        assert "AMR" not in question
        assert kind == "nest" or "(" not in answer
        assert answer.count("(") == answer.count(")")
    assert seen == {"write", "repeat", "join", "initials", "nest"}


def test_a_tree_is_that_of_its_depths():
    trees = [c for c in (exercise(0, 20_000 + i) for i in range(200)) if c.sample_id.startswith("nest")]
    for conversation in trees:
        question, answer = (message["content"] for message in conversation.messages)
        depths = [int(word) for word in question.partition(": ")[2].split() if word in string.digits]
        depth, found = -1, []
        for bracket in re.findall(r"[()]", answer):
            depth += 1 if bracket == "(" else -1
            found += [depth] if bracket == "(" else []
        assert found == depths
    assert len(trees) > 20


def test_training_steps_leave_the_same_model_behind():
    def trained() -> torch.Tensor:
        model, tokenizer = build_tiny_qwen2(["tôi đi", "(t / tôi)"], SMALLEST_TEXT, seed=1)
        list(train(model, tokenizer, Settings(steps=2, batch_size=2, seed=1, warmup_steps=1, threads=1)))
        return model.lm_head.weight.detach()

    torch.testing.assert_close(trained(), trained(), rtol=0, atol=0)
