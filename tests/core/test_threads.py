"""Work in threads: all of it, in the caller's order, with the errors of each."""

import threading

import pytest

from stages.core import environment
from stages.core.environment import map_largest_first


def test_every_item_gets_its_own_result_in_the_order_that_was_asked() -> None:
    sizes = {f"file {number}": number % 5 for number in range(40)}
    assert list(map_largest_first(str.upper, sizes).items()) == [(name, name.upper()) for name in sizes]
    assert map_largest_first(str.upper, {}) == {}


def test_large_items_come_first_and_others_do_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    begun, small_done = [], threading.Event()

    def work(name: str) -> bool:
        begun.append(name)
        if name == "small":
            small_done.set()
        return small_done.wait(timeout=60)

    assert map_largest_first(work, {"small": 1, "large": 9}) == {"small": True, "large": True}
    assert begun == ["large", "small"]


def test_the_error_of_one_item_is_raised() -> None:
    with pytest.raises(FileNotFoundError, match="of three"):
        map_largest_first(lambda number: [1, 2][number] if number < 2 else missing(), {0: 1, 1: 2, 2: 3})


def missing() -> int:
    raise FileNotFoundError("of three")
