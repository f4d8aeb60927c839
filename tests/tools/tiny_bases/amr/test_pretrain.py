import dataclasses
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator

import penman
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.kit.models.folders import check_model_folder
from stages.kit.models.processors import load_processor
from stages.tasks.amr.samples.targets import SEPARATOR
from stages.tasks.amr.sources.grammar import generate
from tests import ROOT
from tools.tiny_bases.amr.__main__ import Settings, measure, model_card, train
from tools.tiny_bases.amr.exercises import FULL_LENGTH_FROM, KINDS, LONGEST, SHORTEST, TREE_STYLES, corpus, exercise
from tools.tiny_bases.architecture import SMALLEST_TEXT, build_tiny_qwen2

BASE = ROOT / "data" / "tiny" / "qwen2"
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
    assert (BASE / "README.md").read_text() == model_card(RECORD)


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


def shown(seed: int, first: int, count: int) -> Iterator[tuple[str, str, str]]:
    """Kind, question and answer of each exercise."""
    for index in range(first, first + count):
        conversation = exercise(seed, index)
        question, answer = (message["content"] for message in conversation.messages)
        yield conversation.sample_id.partition("/")[0], question, answer


def test_no_exercise_shows_a_sentence_with_brackets_or_an_instruction_of_the_task():
    kinds = set()
    for kind, question, answer in shown(0, 0, 3000):
        kinds.add(kind)
        assert "(" not in question
        assert "AMR" not in question
        assert kind in ("nest", "formula") or "(" not in answer
        assert kind not in ("nest", "formula") or not question.endswith((" .", " ?", " !"))
    assert kinds == set(KINDS)


def test_exercises_grow_longer():
    def longest(first: int) -> int:
        return max(len(answer.split()) for kind, _, answer in shown(0, first, 400) if kind == "join")

    assert longest(0) == SHORTEST
    assert longest(FULL_LENGTH_FROM) == LONGEST


def test_answers_are_right():
    for kind, question, answer in shown(1, FULL_LENGTH_FROM, 500):
        task, _, given = question.partition("\n")
        if kind == "repeat":
            assert answer == given
        elif kind == "join":
            assert answer.replace("_", " ") == given
        elif kind == "nest":
            lettered = {"ptr": [False], "full": [True], "mtup": [False, True]}[TREE_STYLES[task.removesuffix(".")]]
            for tree, with_letters in zip(answer.split(SEPARATOR), lettered, strict=True):
                assert outline_of(tree, lettered=with_letters) == given
        elif kind == "formula" and TREE_STYLES[task.removesuffix(".")] != "ptr":
            graph = penman.decode(answer.split(SEPARATOR)[-1])
            concepts = [str(concept).replace("_", " ") for _, _, concept in graph.instances()]
            values = [str(value) for _, role, value in graph.attributes() if role == ":ARG2"]
            said = [word for text in [*concepts, *values] for word in text.split()]
            assert Counter(said)["and"] >= given.count(" + ")
            assert Counter(said) - Counter({"and": given.count(" + ")}) == Counter(re.findall(r"[^\s!*+]+", given))


def outline_of(tree: str, *, lettered: bool) -> str:
    """The outline that a tree is written from, read off its text."""
    items, depth, label = [], -1, ""
    letters: Counter[str] = Counter()
    tokens = iter(re.findall(r"[()]|[^\s()]+", tree))
    for token in tokens:
        if token == ")":
            depth -= 1
        elif token.startswith(":"):
            label = token[1:]
        elif token != "(":
            items.append((depth + 1, label, token))
        else:
            depth += 1
            word = next(tokens)
            if lettered:
                variable, slash, word = word, next(tokens), next(tokens)
                letters[word[0]] += 1
                assert slash == "/"
                assert variable == word[0] + (str(letters[word[0]]) if letters[word[0]] > 1 else "")
            items.append((depth, label, word))
    assert depth == -1
    words = [(f"{depth} {label} " if depth else "", word.replace("_", " ")) for depth, label, word in items]
    return " ; ".join(place + word for place, word in words)


def test_training_steps_leave_the_same_model_behind():
    def trained() -> torch.Tensor:
        model, tokenizer = build_tiny_qwen2(["tôi đi", "(t / tôi)"], SMALLEST_TEXT, seed=1)
        list(train(model, tokenizer, Settings(steps=2, batch_size=2, seed=1, warmup_steps=1, threads=1)))
        return model.lm_head.weight.detach()

    torch.testing.assert_close(trained(), trained(), rtol=0, atol=0)
