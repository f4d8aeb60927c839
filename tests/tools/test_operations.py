"""The counter of a micro-batch counts what an operator does, and finds what fused kernels save."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stages.kit.memory.recorder import Recorder
from stages.kit.models import kernels
from tools.gpu.measure import planned, training_batch
from tools.gpu.operations import Counts, counted, further_micro_batch

TINY: dict[str, Any] = {"profile": "tiny", "micro_batch": 2, "max_length": 96, "attn": "auto", "precision": "bf16"}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda rows: rows @ rows.T, Counts(1, 0, 4 * (32 + 32 + 16), 4 * (32 + 32 + 16), 2 * 4 * 8 * 4)),
        (lambda rows: rows.view(8, 4)[1:].T, Counts()),
        (lambda rows: torch.empty_like(rows), Counts()),
        (lambda rows: rows.add_(1), Counts(1, 0, 2 * 4 * 32)),
        (lambda rows: rows.sum().item(), Counts(1, 1, 4 * 33)),
        (lambda _: torch.arange(4).tolist(), Counts(1, 1, 8 * 4)),
    ],
)
def test_views_are_free_and_products_reads_and_waits_count(
    operation: Callable[[torch.Tensor], object], expected: Counts
) -> None:
    with Recorder(cuda=True, vocab_size=7) as recorder, counted() as so_far:
        recorder.begin("forward")
        rows = torch.empty(4, 8)
        operation(rows)
    assert so_far() == expected


def of_layers(text: int, vision: int, **changes: Any) -> Counts:
    plan, predictor = planned({**TINY, "recipe": "r4-joint", **changes}, "cuda")
    return further_micro_batch(plan, predictor, training_batch(plan, predictor), (text, vision))


def test_no_layer_waits_for_the_gpu() -> None:
    one = of_layers(1, 1)
    for depth in ((2, 1), (1, 2)):
        more = of_layers(*depth)
        assert more.launches > one.launches
        assert more.syncs == one.syncs


def test_adapters_without_copies_save_operators_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = of_layers(1, 1, quantization="nf4")
    monkeypatch.setattr(kernels, "fuse_adapters", lambda model: None)
    pefts = of_layers(1, 1, quantization="nf4")
    assert ours.launches < pefts.launches
    assert ours.moved_bytes < 0.95 * pefts.moved_bytes
    assert ours.flops == pefts.flops
