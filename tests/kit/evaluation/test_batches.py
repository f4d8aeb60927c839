"""Batches by length, and the thread that prepares them."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import longest_first, prepared_ahead


def question(text: str, *sizes: tuple[int, int]) -> Conversation:
    content = [*({"type": "image"} for _ in sizes), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return Conversation(sample_id="", messages=messages, images=[Image.new("RGB", size) for size in sizes])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1), st.integers(1, 5))
def test_every_conversation_is_in_one_batch_the_longest_first(sizes: list[tuple[int, int]], batch_size: int) -> None:
    questions = [question("x" * length, *([(side, side)] if side else [])) for side, length in sizes]
    batches = longest_first(questions, batch_size)
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(len(sizes)))
    assert [sizes[index] for index in order] == sorted(sizes, reverse=True)
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    assert 1 <= len(batches[-1]) <= batch_size


def test_a_message_may_be_plain_text() -> None:
    plain = [Conversation(sample_id="", messages=[{"role": "user", "content": text}]) for text in ("a", "abc", "ab")]
    assert longest_first(plain, 2) == [[1, 2], [0]]


def test_the_next_batch_is_prepared_while_this_one_is_computed() -> None:
    prepared = {batch: threading.Event() for batch in range(3)}

    def prepare(batch: list[int]) -> threading.Thread:
        prepared[batch[0]].set()
        return threading.current_thread()

    for [batch], thread in prepared_ahead([[0], [1], [2]], prepare):
        assert thread is not threading.current_thread()
        if batch < 2:
            assert prepared[batch + 1].wait(timeout=60)
        if batch == 0:
            assert not prepared[2].is_set(), "no more than one ahead: pictures take memory"


def test_nothing_is_prepared_of_no_batches() -> None:
    assert list(prepared_ahead(longest_first([], 4), lambda _: pytest.fail("nothing to prepare"))) == []


def test_an_error_in_the_thread_comes_where_its_batch_would() -> None:
    def prepare(batch: list[int]) -> int:
        if batch == [2]:
            raise ValueError("no such picture")
        return 10 * batch[0]

    seen = []
    with pytest.raises(ValueError, match="no such picture"):
        for _, prepared in prepared_ahead([[1], [2], [3]], prepare):
            seen.append(prepared)
    assert seen == [10]


def test_ctrl_c_leaves_no_thread_behind() -> None:
    started = []

    def prepare(batch: list[int]) -> None:
        started.append(batch)

    with pytest.raises(KeyboardInterrupt):
        for _ in prepared_ahead([[0], [1], [2], [3]], prepare):
            raise KeyboardInterrupt
    assert started in ([[0]], [[0], [1]])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]
