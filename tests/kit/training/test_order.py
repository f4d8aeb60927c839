"""A step takes the samples that are drawn for it, the longest first: the same in any process, resumed or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from stages.kit.training.trainer import RecipeTrainer, SortedInSteps
from tests.kit.training.small import plan_for

SAMPLES, MICRO_BATCH, STEP = 22, 2, 8
LENGTHS = [number * number * 7 % 23 for number in range(SAMPLES)]


def drawn(seed: int, epoch: int) -> list[int]:
    """As accelerate draws them, without any order."""
    sampler = SeedableRandomSampler(range(SAMPLES), data_seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def loader(*, seed: int = 3, processes: int = 1, process: int = 0) -> Any:
    """As the trainer prepares it."""
    dataset: Any = list(range(SAMPLES))
    plain: Any = DataLoader(dataset, batch_size=MICRO_BATCH, sampler=RandomSampler(dataset), collate_fn=list)
    prepared: Any = prepare_data_loader(
        plain, num_processes=processes, process_index=process, use_seedable_sampler=True, data_seed=seed
    )
    prepared.set_sampler(SortedInSteps(prepared.get_sampler(), LENGTHS, STEP))
    return prepared


def steps_of(order: list[int]) -> list[list[int]]:
    return [order[start : start + STEP] for start in range(0, len(order), STEP)]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_a_step_has_the_samples_that_were_drawn_for_it_in_the_order_of_their_lengths(epoch: int) -> None:
    batches = loader()
    batches.set_epoch(epoch)
    order = list(chain(*batches))
    assert [set(step) for step in steps_of(order)] == [set(step) for step in steps_of(drawn(3, epoch))]
    assert order != drawn(3, epoch)
    for step in steps_of(order):
        lengths = [LENGTHS[sample] for sample in step]
        assert lengths == sorted(lengths, reverse=True)


def test_epochs_follow_one_another_unasked_too() -> None:
    batches = loader()
    for epoch in range(3):
        assert set([*chain(*batches)][:STEP]) == set(drawn(3, epoch)[:STEP])


def test_two_processes_share_out_each_step() -> None:
    """Next to each other are samples of like lengths, so that neither waits long for the other."""
    alone = loader()
    alone.set_epoch(1)
    whole = list(alone)
    found = []
    for process in range(2):
        batches = loader(processes=2, process=process)
        batches.set_epoch(1)
        found.append(list(batches))
    together = [batch for pair in zip(*found, strict=True) for batch in pair]
    assert together[: len(whole)] == whole


def test_begun_in_the_midst_of_an_epoch_the_rest_is_the_same() -> None:
    whole, rest = loader(), skip_first_batches(loader(), 4)
    whole.set_epoch(2)
    rest.set_epoch(2)
    assert list(rest) == list(whole)[4:]


@pytest.mark.parametrize(("micro_batch", "sampler"), [(4, SeedableRandomSampler), (2, SortedInSteps)])
def test_where_a_step_is_one_micro_batch_its_samples_stay_as_they_were_drawn(
    build: Callable[..., RecipeTrainer], micro_batch: int, sampler: type
) -> None:
    batches: Any = build(plan_for("r1-llm-only", micro_batch=micro_batch)).get_train_dataloader()
    assert type(batches.get_sampler()) is sampler
