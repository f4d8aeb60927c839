import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.params.schema import DeviceParams
from stages.kit.data.conversation import Conversation
from stages.kit.models.adapters import apply_recipe, count_trainable
from stages.kit.models.load import load_config, load_model
from stages.kit.models.prompts import load_processor
from stages.kit.planning.plan import Plan
from stages.kit.training.batches import ConversationCollator
from stages.kit.training.resume import seed_everything
from stages.kit.training.trainer import RecipeTrainer


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy disk it takes a minute; no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def build(tiny_vlm: Path, answered: Sequence[Conversation]) -> Callable[..., RecipeTrainer]:
    def make(plan: Plan, **more: Any) -> RecipeTrainer:
        seed_everything(plan.seed)
        base = load_model(
            tiny_vlm,
            device=DeviceParams(kind="cpu"),
            precision=plan.precision,
            quantization=plan.quantization,
            attn=plan.attn,
            padding_free=plan.padding_free,
        )
        model = apply_recipe(base, plan.parts, plan.lora)
        plan = replace(plan, trainable=count_trainable(model) | more)
        processor = load_processor(tiny_vlm, None)
        collator = ConversationCollator(
            *(processor, answered, lambda sample: sample),
            loss=plan.loss,
            max_length=plan.max_length,
            packed_for=load_config(tiny_vlm) if plan.padding_free else None,
        )
        return RecipeTrainer(
            plan,
            model=model,
            processor=processor,
            collator=collator,
            report_to="none",
        )

    return make
