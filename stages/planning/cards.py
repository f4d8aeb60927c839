"""NVIDIA's cards by name, for plans on any machine: memory, multiprocessors, arithmetic and power.

Memory of L40, A10, A30, A100 and RTX PRO 6000 is the least that torch's public out-of-memory messages name as a card's
total, e.g. "a total capacity of 44.40 GiB" of an L40: ECC takes a sixteenth of GDDR6, the driver some hundred MiB. That
of the others follows the same rule, and no such message was found. Multiprocessors, arithmetic and power are those of
NVIDIA's data sheets and architecture whitepapers, written down without looking each up again. Nothing is measured here:
`make gpu` shows what a card reports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, has_bf16
from stages.core.records import nearest
from stages.planning.prediction import GIB


@dataclass(frozen=True)
class Card:
    name: str
    sold_gb: float
    usable_gib: float
    multiprocessors: int
    tflops: float
    """Dense bf16 or fp16 products of the tensor cores with fp32 sums: half of figures with sparsity."""
    watts: int
    """Largest power of the board."""
    pattern: str = ""
    """Regular expression for the device's name, as NVML and CUDA report it; by default the name itself."""

    @property
    def usable_bytes(self) -> int:
        return int(self.usable_gib * GIB)


CARDS = (
    Card("GB200", 186, 184.0, 152, 2500, 1200),
    Card("B200", 180, 178.3, 148, 2250, 1000),
    Card("RTX PRO 6000", 96, 94.97, 188, 503.8, 600),
    Card("RTX 5090", 32, 31.36, 170, 209.5, 575),
    Card("GH200", 96, 94.5, 132, 989.4, 700),
    Card("H200 NVL", 141, 139.7, 132, 835.5, 600),
    Card("H200", 141, 139.7, 132, 989.4, 700),
    Card("H100 NVL", 94, 93.0, 132, 835.5, 400),
    Card("H100 PCIe", 80, 79.1, 114, 756.5, 350),
    Card("H100", 80, 79.1, 132, 989.4, 700),
    Card("H20", 96, 95.0, 78, 148, 400),
    Card("L40S", 48, 44.39, 142, 362.05, 350),
    Card("L40", 48, 44.39, 142, 181.05, 300),
    Card("L4", 24, 21.95, 58, 121, 72),
    Card("RTX 6000 Ada", 48, 44.4, 142, 364.25, 300),
    Card("RTX 4090", 24, 23.5, 128, 165.2, 450),
    Card("A100-80GB", 80, 79.14, 108, 312, 400, r"A[18]00\b.*80GB"),
    Card("A100-40GB", 40, 39.38, 108, 312, 400, r"A100\b.*40GB"),
    Card("A30", 24, 23.5, 56, 165, 165),
    Card("A40", 48, 44.35, 84, 149.7, 300),
    Card("RTX A6000", 48, 47.4, 84, 154.8, 300),
    Card("A10G", 24, 21.98, 80, 70, 300),
    Card("A10", 24, 21.98, 72, 125, 150),
    Card("RTX 3090", 24, 23.48, 82, 71, 350),
    Card("Quadro RTX 6000", 24, 22.0, 72, 130.5, 260),
    Card("T4", 16, 14.56, 40, 65, 70),
)
"""The first card with its pattern in a device's name counts."""

_PART = re.compile(r"Laptop|Mobile|Max-Q|\bMIG\b|-\d+[A-Q]\b|^\d+ ?x\b", re.IGNORECASE)
"""In the name of a smaller card, as in a laptop, of a part of one, and of several."""
MULTIPROCESSORS = 144
"""Multiprocessors of a large GPU, for a card that is not named. Fewer need less memory."""


def card_of(device_name: str) -> Card | None:
    """The card that a device's name means, e.g. "NVIDIA A100-SXM4-80GB"; None for another, or a part of one."""
    if _PART.search(device_name):
        return None
    matching = (
        card for card in CARDS if re.search(rf"\b(?:{card.pattern or card.name})\b", device_name, re.IGNORECASE)
    )
    return next(matching, None)


def named_card(name: str) -> Card:
    """Raises UserError for a name that is no card's here."""
    if (card := card_of(name)) is None:
        names = [each.name for each in CARDS]
        longer = " or ".join(repr(each) for each in names if name.lower() in each.lower())
        hint = f" (did you mean {longer}?)" if longer else nearest(name, names)
        raise UserError(
            f"gpu: no card is called {name!r}{hint}; give its size in GB (gpu: 24), or one of: {', '.join(names)}"
        )
    return card


def cards_for(device: DeviceParams, precision: str) -> list[Card]:
    """The card that a GPU is named as, or all of its size that compute in `precision`."""
    if device.card:
        return [named_card(device.card)]
    return [card for card in CARDS if card.sold_gb == device.memory_gb and (has_bf16(card.name) or precision != "bf16")]


def multiprocessors(device: DeviceParams) -> int:
    """Multiprocessors of the named card, or of a large one; 1 on a CPU."""
    if device.kind == "cpu":
        return 1
    return named_card(device.card).multiprocessors if device.card else MULTIPROCESSORS


def usable_bytes(memory_gb: float) -> int:
    """Usable memory of a card sold with so many GB: the least of such cards, else by the least share of any card."""
    same = [card.usable_bytes for card in CARDS if card.sold_gb == memory_gb]
    return min(same, default=int(memory_gb * min(card.usable_bytes / card.sold_gb for card in CARDS)))
