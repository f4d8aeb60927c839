"""The measure that predictions are held against, on a CPU."""

import torch

from stages.kit.internals.torch_internals import cpu_peak

MIB = 2**20


def tensor_of(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_the_peak_is_of_what_was_alive_at_once() -> None:
    with cpu_peak([]) as peak:
        first = tensor_of(3 * MIB)
        del first
        tensor_of(2 * MIB)
        second = tensor_of(2 * MIB)
        third = second.clone()
    assert peak.size_bytes == 4 * MIB
    assert third.numel() == 2 * MIB


def test_what_is_held_before_counts_once_however_many_tensors_share_it() -> None:
    held = tensor_of(5 * MIB)
    with cpu_peak([held, held[MIB:], held.view(5, MIB)]) as peak:
        tensor_of(MIB)
    assert peak.size_bytes == 6 * MIB


def test_a_measurement_does_not_count_the_frees_of_what_an_earlier_one_saw_allocated() -> None:
    with cpu_peak([]):
        left = tensor_of(7 * MIB)
    with cpu_peak([]) as peak:
        del left
        tensor_of(4 * MIB)
    assert peak.size_bytes == 4 * MIB
