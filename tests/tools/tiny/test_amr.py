"""Exercises that the tiny base for graphs is pre-trained on."""

import re
from collections import Counter
from collections.abc import Iterator

import penman
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from stages.tasks.amr.samples import SEPARATOR
from tests import ROOT
from tools.tiny.exercises import FULL_LENGTH_FROM, KINDS, TREE_STYLES, exercise

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "data/tiny/qwen2", local_files_only=True)


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str):
    # NFC is what the tokenizer of Qwen2 makes of a text first.
    normalized = TOKENIZER.backend_tokenizer.normalizer.normalize_str(text)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == normalized


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


def test_answers_are_right():
    for kind, question, answer in shown(1, FULL_LENGTH_FROM, 500):
        task, _, given = question.partition("\n")
        if kind == "repeat":
            assert answer == given
        elif kind == "join":
            assert answer.replace("_", " ") == given
        elif kind in ("nest", "formula") and TREE_STYLES[task.removesuffix(".")] != "ptr":
            graph = penman.decode(answer.split(SEPARATOR)[-1])
            written = [str(word) for *_, word in (*graph.instances(), *graph.attributes())]
            if kind == "nest":
                asked = re.sub(r"(^| ; )\d+ \S+ ", r"\1", given).replace(" ; ", " ")
            else:
                asked = re.sub("[!*] ", "", given).replace("+", "and")
            assert Counter(" ".join(written).replace("_", " ").split()) == Counter(asked.split())
