import signal

import pytest

from stages.core.signals import ENDING, handling


@pytest.mark.parametrize("number", ENDING)
def test_signals_that_ask_to_end_are_handled_meanwhile_and_as_before_afterwards(number: signal.Signals) -> None:
    received: list[int] = []
    before = signal.getsignal(number)
    with pytest.raises(ZeroDivisionError), handling(lambda number, _frame: received.append(number)):
        signal.raise_signal(number)
        raise ZeroDivisionError
    assert received == [number]
    assert signal.getsignal(number) == before


def test_nohup_stays_in_force() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received: list[int] = []
    try:
        with handling(lambda number, _frame: received.append(number)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == []
