"""Predictions of a recipe's plan, and of the plans down its ladder, each made once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from transformers import PreTrainedConfig

from stages.core.params.schema import DeviceParams, EvaluationParams
from stages.kit.memory.budget import usable_bytes
from stages.kit.memory.calibration import Calibration, load_calibration
from stages.kit.memory.predict import predict, predict_answers
from stages.kit.memory_use.resident import free_and_total_bytes
from stages.kit.models.load import meta_model
from stages.kit.models.parts import apply_recipe, count_trainable
from stages.kit.models.processors import Processor
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class MemoryPredictor:
    config: PreTrainedConfig
    processor: Processor
    batch_of: Callable[..., Mapping[str, torch.Tensor]]
    """batch_of(micro_batch=2) is the largest of that many samples."""
    exact: bool = False
    """Record every layer of the model, not a few."""
    calibration: Calibration = field(default_factory=load_calibration)
    made: dict[str, Prediction] = field(default_factory=dict)
    """By plan. Recipes that differ in name only may share it."""

    def __call__(self, plan: Plan) -> Prediction:
        key = repr(replace(plan, recipe=""))
        if key not in self.made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of bitsandbytes, that this CPU could not run what is only recorded
                batch = self.batch_of(micro_batch=plan.schedule.micro_batch)
                self.made[key] = predict(plan, self.config, self.processor, batch, self.calibration, exact=self.exact)
        return self.made[key]

    def answers(self, plan: Plan, evaluation: EvaluationParams) -> Prediction:
        """Of evaluating what the plan trains; its questions are at most as long as training's, answers included."""
        batch = self.batch_of(micro_batch=evaluation.batch_size)
        prompts = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return predict_answers(plan, self.config, prompts, self.calibration, max_new_tokens=evaluation.max_new_tokens)

    def counted(self, plan: Plan) -> Plan:
        """The plan with its trainable parameters, from the model's real geometry."""
        model = apply_recipe(meta_model(self.config), plan.parts, plan.lora, plan.full_targets)
        return replace(plan, trainable=asdict(count_trainable(model)))

    def capacity_bytes(self, device: DeviceParams) -> int | None:
        """Usable memory of one process on its device; None for a GPU whose size the profile does not give.

        For a CPU without memory_gb: all memory of this machine, or of the control group around this process. The
        processes of a CPU share its memory.
        """
        if device.memory_gb is not None:
            capacity = usable_bytes(device.memory_gb, self.calibration)
        elif device.kind == "cpu":
            capacity = free_and_total_bytes()[1]
        else:
            return None
        return capacity // device.count if device.kind == "cpu" else capacity
