"""Samples of text behind one another in a row: the loss, the balance of experts and what each weight is to learn are
those of a padded batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.kit.planning.plan import Plan
from tests.kit.mixture.test_trainer import collator_of, labels_plan, logged, tokens_plan, train

WHOLE: Any = {"full_targets": {}}


@pytest.mark.parametrize(
    ("of", "micro_batch", "attn"),
    [
        *(("a mixture", 8, "sdpa"), ("a mixture", 4, "eager")),
        *(("a mixture's gates", 4, "sdpa"), ("routers by labels", 4, "sdpa")),
    ],
)
def test_loss_and_gradients_are_those_of_a_padded_batch(
    mixture_dir: Path, tmp_path: Path, of: str, micro_batch: int, attn: Any
) -> None:
    plan = labels_plan if of == "routers by labels" else tokens_plan
    settings = {} if of in ("routers by labels", "a mixture's gates") else WHOLE
    padded: Plan = replace(plan(micro_batch=micro_batch, **settings), attn=attn)
    one, expected = train(padded, mixture_dir, tmp_path)
    other, found = train(replace(padded, padding_free=True), mixture_dir, tmp_path)
    names = ["loss", "grad_norm", *(["aux_loss"] if of.startswith("a mixture") else [])]
    assert [logged(other, name) for name in names] == pytest.approx([logged(one, name) for name in names], rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()) + 1e-9)


def test_checkpointed_layers_are_computed_again_sample_by_sample(mixture_dir: Path, tmp_path: Path) -> None:
    plan = replace(tokens_plan(micro_batch=4, **WHOLE), padding_free=True)
    _, expected = train(plan, mixture_dir, tmp_path)
    _, found = train(replace(plan, gradient_checkpointing=True), mixture_dir, tmp_path)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


def test_every_tokens_router_has_its_label_and_a_samples_first_token_is_no_next_one(mixture_dir: Path) -> None:
    numbers = [{"sample": number} for number in (3, 0, 7)]
    routers, tokens = (collator_of(mixture_dir, loss, packed=True)(numbers) for loss in ("router-labels", "all-tokens"))
    starts = routers["position_ids"][0] == 0
    assert starts.sum() == 3
    assert (routers["labels"][0] != -100).all()
    assert torch.equal(tokens["labels"][0] == -100, starts)
    assert torch.equal(tokens["input_ids"], routers["input_ids"])
    lengths = collator_of(mixture_dir).lengths
    assert routers["labels"][0].tolist() == [0] * lengths[3] + [0] * lengths[0] + [1] * lengths[7]
