"""A prediction in lines, as a table and as a bar, and recipes by sizes of GPU."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from stages.kit.memory.budget import LETTERS, apportion, budget_lines, verdict
from stages.kit.memory.calibration import load_calibration
from stages.kit.planning.prediction import BUDGET, Budget, Prediction
from stages.kit.reporting.tables import markdown, terminal_table
from tools.plan.drawing import BudgetBar, bar_text, budget_table, matrix_table

GIB = 2**30


def prediction(budget: dict[Budget, int]) -> Prediction:
    total = sum(budget.values())
    return Prediction(
        allocated_bytes=total,
        reserved_bytes=total,
        total_bytes=total,
        low_bytes=int(total * 0.97),
        high_bytes=int(total * 1.08),
        peak_phase="backward",
        phases={"load": GIB, "forward": 2 * GIB, "backward": 3 * GIB, "step": GIB // 2},
        budget=budget,
        calibration="assumed",
    )


GIBS = dict(zip(BUDGET, (5.314, 0.304, 0.304, 0.604, 9.304, 1.134, 0.314, 1.024), strict=True))
USUAL = prediction({entry: int(gib * GIB) for entry, gib in GIBS.items()})
HALF = prediction({"weights": 3 * GIB, "activations": 6 * GIB})
SPREAD = replace(USUAL, gpus=(HALF, USUAL))
BUDGETS = st.dictionaries(st.sampled_from(BUDGET), st.integers(0, 200 * GIB), min_size=1).map(prediction)


def shown(renderable: RenderableType, *, width: int = 80, encoding: str = "utf-8") -> str:
    output = io.BytesIO()
    file = io.TextIOWrapper(output, encoding=encoding)
    Console(file=file, width=width, color_system=None).print(renderable)
    file.flush()
    return output.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("capacity_bytes", "expected"),
    [
        *((109, "fits"), (108, "fits"), (107, "too close")),
        *((100, "too close"), (97, "too close"), (96, "does not fit"), (0, "does not fit")),
    ],
)
def test_the_verdict_follows_from_the_interval(capacity_bytes: int, expected: str) -> None:
    assert verdict(prediction({"weights": 100}), capacity_bytes) == expected


@pytest.mark.parametrize(
    ("sold_gb", "seen_gib"),
    [(16, 14.56), (24, 22.2), (24, 23.5), (32, 31.51), (48, 44.53), (80, 79.11), (80, 79.2), (94, 93.0)],
)
def test_no_more_is_counted_on_than_cards_offer(sold_gb: float, seen_gib: float) -> None:
    calibration = load_calibration()
    assert 0.9 * seen_gib * GIB < calibration.usable_bytes(sold_gb) <= seen_gib * GIB
    large = sold_gb >= calibration.large_card_gb.value
    share = calibration.usable_share_large if large else calibration.usable_share
    assert calibration.usable_bytes(sold_gb) == int(sold_gb * GIB * share.value)


@pytest.mark.parametrize(
    ("amounts", "units", "shares"),
    [
        ([1, 1, 1], 100, [34, 33, 33]),  # the remainders are equal: the first
        ([333, 333, 334], 10, [3, 3, 4]),
        ([1, 999], 10, [0, 10]),
        ([0, 0], 10, [0, 0]),
        ([], 10, []),
    ],
)
def test_units_are_shared_out_by_largest_remainder(amounts: list[int], units: int, shares: list[int]) -> None:
    assert apportion(amounts, units) == shares


@given(st.lists(st.integers(0, 10**12), min_size=1), st.integers(0, 10_000))
def test_shares_add_up_and_are_each_the_proportion_rounded(amounts: list[int], units: int) -> None:
    shares, total = apportion(amounts, units), sum(amounts)
    assert sum(shares) == (units if total else 0)
    assert all(
        abs(share * total - amount * units) < max(total, 1) for amount, share in zip(amounts, shares, strict=True)
    )


@given(BUDGETS)
def test_the_columns_add_up_to_the_total_and_the_lines_say_what_the_table_says(found: Prediction) -> None:
    rows = [line.split() for line in shown(budget_table(found)).partition("\n\n")[0].splitlines()[2:]]
    *spent, total = rows
    assert sum(round(float(cells[2]) * 100) for cells in spent) == round(float(total[1]) * 100)
    assert sum(round(float(cells[3].rstrip("%")) * 10) for cells in spent) == round(float(total[2].rstrip("%")) * 10)
    assert float(total[1]) == pytest.approx(found.total_bytes / GIB, abs=0.00501)
    by_letter = {LETTERS[entry]: amount for entry, amount in found.budget.items()}
    assert all(abs(float(cells[2]) - by_letter[cells[0]] / GIB) < 0.0151 for cells in spent)
    assert [line.replace(" GiB", "").split() for line in budget_lines(found)[: len(rows)]] == rows


def test_lines_hold_everything_a_refusal_needs() -> None:
    assert budget_lines(USUAL, 14 * GIB) == [
        "W weights         5.31 GiB   29.0%",
        "D adapters        0.31 GiB    1.7%",
        "G gradients       0.31 GiB    1.7%",
        "O optimizer       0.60 GiB    3.3%",
        "A activations     9.30 GiB   50.8%",
        "L logits          1.13 GiB    6.2%",
        "T temporaries     0.32 GiB    1.7%",
        "H overhead        1.02 GiB    5.6%",
        "  total          18.30 GiB  100.0%",
        "fullest   in backward; allocated at most, GiB: load 1.00, forward 2.00, backward 3.00, step 0.50",
        "expected  17.75 to 19.77 GiB (calibration: assumed)",
        "usable    14.00 GiB",
        "verdict   does not fit",
    ]
    with pytest.raises(AssertionError, match=str(USUAL.total_bytes + 1)):
        budget_lines(replace(USUAL, total_bytes=USUAL.total_bytes + 1))


def test_nothing_is_said_of_an_unknown_capacity_nor_of_what_nothing_is_spent_on() -> None:
    found = prediction({"weights": GIB, "adapters": 0})
    for text in ("\n".join(budget_lines(found)), shown(budget_table(found))):
        assert not re.search("usable|verdict|adapters", text)


@pytest.mark.parametrize(("capacity_gib", "expected"), [(14, "does not fit"), (19, "too close"), (24, "fits")])
def test_the_table_holds_budget_bar_facts_and_verdict(capacity_gib: int, expected: str) -> None:
    lines = shown(budget_table(USUAL, capacity_gib * GIB), width=110).splitlines()
    assert lines[0].split() == ["Budget", "GiB", "Share"]
    assert lines[6].split() == ["A", "activations", "9.30", "50.8%"]
    assert lines[10].split() == ["total", "18.30", "100.0%"]
    assert lines[12].endswith(f" 18.30 of {capacity_gib}.00 GiB")
    assert lines[14].startswith("fullest   in backward;")
    assert lines[-1] == f"verdict   {expected}"
    assert {line.index(".") for line in lines[2:11]} == {lines[2].index(".")}, "numbers are right-aligned"


def test_the_bar_is_to_scale_and_has_its_limit_where_it_belongs() -> None:
    half_full = prediction({"weights": 30 * GIB, "activations": 20 * GIB})
    assert bar_text(half_full, 100 * GIB, width=41, ascii_only=True) == "W#####A###..........| 50.00 of 100.00 GiB"
    assert bar_text(USUAL, 24 * GIB, width=80).partition(" ")[0].endswith("·┃")
    exceeded = bar_text(USUAL, USUAL.total_bytes // 2, width=101 + 21).partition(" ")[0]
    assert len(exceeded) == 100
    assert 47 <= exceeded.index("┃") <= 50
    assert "·" not in exceeded
    slightly = bar_text(USUAL, USUAL.total_bytes - 1, width=80).partition(" ")[0]
    assert slightly.index("┃") == len(slightly) - 2, "the smallest excess is seen"
    assert len(set(LETTERS.values()) - {"|"}) == len(BUDGET), "a letter stands for one thing only"


@given(BUDGETS, st.one_of(st.none(), st.integers(0, 300 * GIB)), st.integers(1, 250), st.booleans())
def test_the_bar_keeps_to_one_line_of_the_width(
    found: Prediction, capacity_bytes: int | None, width: int, ascii_only: bool
) -> None:
    text = bar_text(found, capacity_bytes, width=width, ascii_only=ascii_only)
    assert len(text) <= width
    assert "\n" not in text
    assert not ascii_only or text.isascii()
    assert capacity_bytes is None or len(re.findall(r"[|┃]", text)) == 1
    assert shown(BudgetBar(found, capacity_bytes), width=width).count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_the_bar_is_as_wide_as_the_terminal_and_without_blocks_in_ascii(encoding: str) -> None:
    text = shown(BudgetBar(USUAL, 24 * GIB), width=95, encoding=encoding)
    assert len(text.rstrip("\n")) == 95
    assert ("┃" if encoding == "utf-8" else "|") in text
    assert text.isascii() is (encoding != "utf-8")


def test_of_several_gpus_the_fullest_has_the_budget_and_each_a_line_with_its_verdict() -> None:
    lines = budget_lines(SPREAD, 18 * GIB)
    assert [line for line in lines if line not in budget_lines(USUAL, 18 * GIB)] == [
        "GPU 0             9.00 GiB         fits",
        "GPU 1            18.30 GiB    too close",
        "fullest   GPU 1, in backward; allocated at most, GiB: load 1.00, forward 2.00, backward 3.00, step 0.50",
    ]
    assert [line for line in budget_lines(SPREAD) if line.startswith("GPU")] == [
        "GPU 0             9.00 GiB",
        "GPU 1            18.30 GiB",
    ]


@pytest.mark.parametrize("width", [50, 110])
@pytest.mark.parametrize("capacity_gib", [None, 5, 18, 40])
def test_the_bars_of_several_gpus_have_one_scale_and_one_limit(capacity_gib: int | None, width: int) -> None:
    text = shown(budget_table(SPREAD, None if capacity_gib is None else capacity_gib * GIB), width=width)
    first, second = (line for line in text.splitlines() if line.startswith("GPU"))
    assert max(len(first), len(second)) <= width
    assert " 9.00 " in first
    assert " 18.30 " in second
    assert first.index("GiB") == second.index("GiB")
    assert first.find("┃") == second.find("┃")
    assert ("┃" in first) is (capacity_gib is not None)
    assert first.count("·") > second.count("·")


def test_the_matrix_has_recipes_by_ascending_sizes() -> None:
    from types import SimpleNamespace as Made

    def answer(recipe: str, memory_gb: float, verdict: str, total_gib: float, cheapest: Any = None) -> Any:
        memory, settings = Made(verdict=verdict, total_gib=total_gib), {"micro_batch": "2", "grad_accumulation": "8"}
        return Made(recipe=recipe, memory_gb=memory_gb, memory=memory, settings=settings, cheapest=cheapest)

    cheaper = {"micro_batch": "1", "grad_accumulation": "16"}
    table = matrix_table(
        [
            answer("r1", 48, "fits", 30),
            answer("r1", 24, "too close", 30, Made(verdict="fits", total_gib=20, settings=cheaper)),
            answer("r2", 24, "does not fit", 90, Made(verdict="does not fit", total_gib=31.254, settings=cheaper)),
        ]
    )
    assert [column.heading for column in table.columns] == ["Recipe", "24 GB", "48 GB"]
    assert [row.cells for row in table.rows] == [
        ("r1", "fits\n20.00 GiB\nmicro_batch 1", "fits\n30.00 GiB"),
        ("r2", "does not fit\n31.25 GiB", None),
    ]
    assert shown(terminal_table(table)).splitlines()[4].strip() == "micro_batch 1"
    assert "| r1 | fits 20.00 GiB micro_batch 1 | fits 30.00 GiB |" in markdown(table)
