"""A card is found by the name that its driver reports, and offers what the least of its kind offered."""

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.planning.cards import (
    CARDS,
    MULTIPROCESSORS,
    card_of,
    cards_for,
    multiprocessors,
    named_card,
    usable_bytes,
)


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("RTX 3090 Mobile", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40S-48Q", None),
        ("2x RTX 4090", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_device_is_the_card_that_its_driver_names(device_name: str, name: str | None) -> None:
    card = card_of(device_name)
    assert (card and card.name) == name


def test_every_card_is_found_by_its_own_name_and_offers_less_than_it_is_sold_as() -> None:
    assert [named_card(card.name.lower()) for card in CARDS] == list(CARDS)
    assert all(0.9 < card.usable_gib / card.sold_gb < 1 for card in CARDS)
    with pytest.raises(UserError, match=r"gpu: .*'RTX 309'.*did you mean 'RTX 3090'.*its size in GB"):
        named_card("RTX 309")
    with pytest.raises(UserError, match=r"'A100' \(did you mean 'A100-80GB' or 'A100-40GB'\?\); give"):
        named_card("A100")


def test_a_size_offers_the_least_of_its_cards_and_a_named_card_its_own() -> None:
    by_size, named = DeviceParams(kind="cuda", memory_gb=24), DeviceParams(kind="cuda", card="RTX 3090")
    assert usable_bytes(24) == min(card.usable_bytes for card in cards_for(by_size, "fp16"))
    assert usable_bytes(24) < named_card("RTX 3090").usable_bytes
    assert usable_bytes(13) == pytest.approx(13 * 0.91 * 2**30), "no such card: the least share of all"
    assert {"L4", "RTX 4090"} <= {card.name for card in cards_for(by_size, "bf16")}
    assert "Quadro RTX 6000" not in {card.name for card in cards_for(by_size, "bf16")}, "it has no bf16"
    assert [card.name for card in cards_for(named, "bf16")] == ["RTX 3090"]
    assert (multiprocessors(by_size), multiprocessors(named)) == (MULTIPROCESSORS, 82)
    assert multiprocessors(DeviceParams(kind="cpu")) == 1
