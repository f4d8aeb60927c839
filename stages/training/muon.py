"""Muon for the matrices of hidden layers, AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

MUON = "muon"
"""The entry of a parameter group that says whether its weights are Muon's."""


class MuonWithAdamW(Optimizer):
    """Both optimizers of torch on the groups and the state of this one, which a schedule, a gradient scaler and a
    checkpoint see.

    Muon's step has the size of AdamW's (`match_rms_adamw`, arXiv 2502.16982), so both take AdamW's learning rates.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, **adamw: Any) -> None:
        """groups: each with MUON. adamw: settings of AdamW."""
        super().__init__(groups, {"lr": lr})
        self.parts: dict[bool, Optimizer] = {}
        if by_muon := self._groups(True):
            self.parts[True] = Muon(by_muon, adjust_lr_fn="match_rms_adamw")
        if others := self._groups(False):
            self.parts[False] = AdamW(others, **adamw)
        self._share()

    def _groups(self, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[MUON] == muon]

    def _share(self) -> None:
        for muon, part in self.parts.items():
            part.param_groups, part.state = self._groups(muon), self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            part.step(closure)


def hidden_matrices(model: Any) -> set[str]:
    """Names of the weights with two dimensions, without tables of embeddings and the head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    others = {id(weight) for weight in (*tables, model.get_output_embeddings().weight)}
    return {name for name, weight in model.named_parameters() if weight.dim() == 2 and id(weight) not in others}
