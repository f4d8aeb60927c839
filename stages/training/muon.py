"""Muon for the matrices of hidden layers, AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """torch's optimizers on the groups and the state of this one, which schedule, scaler and checkpoints see.

    Muon's step has the size of AdamW's (`match_rms_adamw`, arXiv 2502.16982), so both take AdamW's learning rates.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, **adamw: Any) -> None:
        """groups: each with `muon`, whether its weights are Muon's. adamw: settings of AdamW."""
        super().__init__(groups, {"lr": lr})
        muon = Muon([{"params": []}], adjust_lr_fn="match_rms_adamw")
        self.parts: dict[bool, Optimizer] = {True: muon, False: AdamW([{"params": []}], **adamw)}
        for group in self.param_groups:
            self.parts[group["muon"]].add_param_group(group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for muon, part in self.parts.items():  # a checkpoint brings other groups and another state
            part.param_groups = [group for group in self.param_groups if group["muon"] == muon]
            part.state = self.state
            part.step(closure)


def hidden_matrices(model: Any) -> set[str]:
    """Names of the weights with two dimensions, without tables of embeddings and the head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    others = {id(weight) for weight in (*tables, model.get_output_embeddings().weight)}
    return {name for name, weight in model.named_parameters() if weight.dim() == 2 and id(weight) not in others}
