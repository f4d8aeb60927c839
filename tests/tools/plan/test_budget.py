import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from stages.kit.memory.budget import LETTERS, apportion, budget_lines, usable_bytes, verdict
from stages.kit.memory.calibration import load_calibration
from stages.kit.planning.prediction import BUDGET, Budget, Prediction
from stages.kit.reporting.tables import Table, cell_text, markdown, terminal_table
from tools.plan.drawing import MatrixCell, bar_text, budget_bar, budget_table, entries_table, matrix_table

GIB = 2**30


def prediction(budget: dict[Budget, int], *, low: float = 0.97, high: float = 1.08) -> Prediction:
    total = sum(budget.values())
    return Prediction(
        allocated_bytes=total,
        reserved_bytes=total,
        total_bytes=total,
        low_bytes=int(total * low),
        high_bytes=int(total * high),
        peak_phase="backward",
        phases={"load": GIB, "forward": 2 * GIB, "backward": 3 * GIB, "step": GIB // 2},
        budget=budget,
        calibration="assumed",
    )


USUAL = prediction(
    {
        "weights": int(5.314 * GIB),
        "adapters": int(0.304 * GIB),
        "gradients": int(0.304 * GIB),
        "optimizer": int(0.604 * GIB),
        "activations": int(9.304 * GIB),
        "logits": int(1.134 * GIB),
        "temporaries": int(0.314 * GIB),
        "overhead": int(1.024 * GIB),
    }
)
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
    usable = usable_bytes(sold_gb, load_calibration())
    assert 0.9 * seen_gib * GIB < usable <= seen_gib * GIB


def test_large_cards_offer_a_larger_share() -> None:
    calibration = load_calibration()
    assert usable_bytes(24, calibration) == int(24 * GIB * calibration.usable_share.value)
    assert usable_bytes(80, calibration) == int(80 * GIB * calibration.usable_share_large.value)
    edge = calibration.large_card_gb.value
    assert usable_bytes(edge, calibration) == int(edge * GIB * calibration.usable_share_large.value)


@pytest.mark.parametrize(
    ("amounts", "units", "shares"),
    [
        ([1, 1, 1], 100, [34, 33, 33]),  # the remainders are equal: the first
        ([5, 3, 2], 10, [5, 3, 2]),
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
    shares = apportion(amounts, units)
    total = sum(amounts)
    assert sum(shares) == (units if total else 0)
    assert all(
        abs(share * total - amount * units) < max(total, 1) for amount, share in zip(amounts, shares, strict=True)
    )


@given(BUDGETS)
def test_the_columns_add_up_to_the_total_shown(found: Prediction) -> None:
    *spent, total = [[str(cell) for cell in row.cells] for row in entries_table(found).rows]
    in_hundredths = [round(float(cells[2]) * 100) for cells in spent]
    in_permille = [round(float(cells[3].rstrip("%")) * 10) for cells in spent]
    assert sum(in_hundredths) == round(float(total[2]) * 100)
    assert sum(in_permille) == round(float(total[3].rstrip("%")) * 10)
    assert float(total[2]) == pytest.approx(found.total_bytes / GIB, abs=0.00501)
    assert all(abs(float(cells[2]) - found.budget[name_of(cells)] / GIB) < 0.0151 for cells in spent)


def name_of(cells: list[str]) -> Budget:
    return next(entry for entry in BUDGET if entry == cells[1])


@given(BUDGETS)
def test_the_lines_say_what_the_table_says(found: Prediction) -> None:
    table = entries_table(found)
    lines = budget_lines(found)
    for row, line in zip(table.rows, lines, strict=False):
        assert line.split() == [
            word for cell in row.cells for word in (str(cell), "GiB" * (cell is row.cells[2])) if word
        ]


def test_a_budget_that_misses_its_total_is_a_programmers_fault() -> None:
    with pytest.raises(AssertionError):
        budget_lines(replace(USUAL, total_bytes=USUAL.total_bytes + 1))


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


def test_lines_are_plain_ascii_as_a_log_may_be() -> None:
    assert all(line.isascii() for line in budget_lines(USUAL, 14 * GIB))


def test_nothing_is_said_of_an_unknown_capacity() -> None:
    text = "\n".join(budget_lines(USUAL)) + shown(budget_table(USUAL))
    assert "usable" not in text
    assert "verdict" not in text


@pytest.mark.parametrize(("capacity_gib", "expected"), [(14, "does not fit"), (19, "too close"), (24, "fits")])
def test_the_table_holds_budget_bar_facts_and_verdict(capacity_gib: int, expected: str) -> None:
    lines = shown(budget_table(USUAL, capacity_gib * GIB), width=110).splitlines()
    assert lines[0].split() == ["Budget", "GiB", "Share"]
    assert lines[6].split() == ["A", "activations", "9.30", "50.8%"]
    assert lines[10].split() == ["total", "18.30", "100.0%"]
    assert lines[12].endswith(f" 18.30 of {capacity_gib}.00 GiB")
    assert lines[14].startswith("fullest   in backward;")
    assert lines[-1] == f"verdict   {expected}"


def test_numbers_are_right_aligned() -> None:
    lines = shown(budget_table(USUAL)).splitlines()
    assert {line.index(".") for line in lines[2:11]} == {lines[2].index(".")}
    assert len({len(line.rstrip()) for line in lines[2:11]}) == 1


def test_what_nothing_is_spent_on_is_left_out() -> None:
    assert [line.split()[1] for line in budget_lines(prediction({"weights": GIB, "adapters": 0}))[:1]] == ["weights"]
    assert "adapters" not in shown(budget_table(prediction({"weights": GIB, "adapters": 0})))


def test_a_letter_stands_for_one_thing_only() -> None:
    assert set(LETTERS) == set(BUDGET)
    assert len(set(LETTERS.values())) == len(BUDGET)
    assert "|" not in LETTERS.values()


def test_the_bar_is_to_scale() -> None:
    half_full = prediction({"weights": 30 * GIB, "activations": 20 * GIB})
    assert bar_text(half_full, 100 * GIB, width=41, ascii_only=True) == "W#####A###..........| 50.00 of 100.00 GiB"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("capacity_gib", [14, 18, 24, 80])
def test_the_bar_shows_every_large_entry_and_the_figures(width: int, capacity_gib: int) -> None:
    text = bar_text(USUAL, capacity_gib * GIB, width=width)
    assert len(text) <= min(width, 130)
    assert text.endswith(f" 18.30 of {capacity_gib}.00 GiB")
    assert {"W", "A"} <= set(text)


def test_the_limit_ends_the_bar_where_all_fits() -> None:
    bar, _, _ = bar_text(USUAL, 24 * GIB, width=80).partition(" ")
    assert bar.endswith("·┃")
    assert bar.count("┃") == 1


def test_the_limit_lies_within_the_bar_where_it_is_exceeded() -> None:
    bar, _, _ = bar_text(USUAL, USUAL.total_bytes // 2, width=101 + 21).partition(" ")
    assert len(bar) == 100
    assert 47 <= bar.index("┃") <= 50
    assert "·" not in bar


def test_the_smallest_excess_is_seen_behind_the_limit() -> None:
    bar, _, _ = bar_text(USUAL, USUAL.total_bytes - 1, width=80).partition(" ")
    assert bar.index("┃") == len(bar) - 2


@given(BUDGETS, st.one_of(st.none(), st.integers(0, 300 * GIB)), st.integers(1, 250), st.booleans())
def test_the_bar_keeps_to_one_line_of_the_width(
    found: Prediction, capacity_bytes: int | None, width: int, ascii_only: bool
) -> None:
    text = bar_text(found, capacity_bytes, width=width, ascii_only=ascii_only)
    assert len(text) <= width
    assert "\n" not in text
    assert not ascii_only or text.isascii()
    assert capacity_bytes is None or len(re.findall(r"[|┃]", text)) == 1
    assert shown(budget_bar(found, capacity_bytes), width=width).count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_an_output_without_blocks_gets_ascii(encoding: str) -> None:
    text = shown(budget_bar(USUAL, 24 * GIB), width=60, encoding=encoding)
    assert text.isascii()
    assert "|" in text
    assert "┃" in shown(budget_bar(USUAL, 24 * GIB), width=60)


def test_the_bar_is_as_wide_as_the_terminal() -> None:
    assert len(shown(budget_bar(USUAL, 24 * GIB), width=60).rstrip("\n")) == 60
    assert len(shown(budget_bar(USUAL, 24 * GIB), width=95).rstrip("\n")) == 95


HALF = prediction({"weights": 3 * GIB, "activations": 6 * GIB})
SPREAD = replace(USUAL, gpus=(HALF, USUAL))


def test_of_several_gpus_the_fullest_has_the_budget_and_each_a_line_with_its_verdict() -> None:
    lines = budget_lines(SPREAD, 18 * GIB)
    assert [line for line in lines if line not in budget_lines(USUAL, 18 * GIB)] == [
        "GPU 0             9.00 GiB         fits",
        "GPU 1            18.30 GiB    too close",
        "fullest   GPU 1, in backward; allocated at most, GiB: load 1.00, forward 2.00, backward 3.00, step 0.50",
    ]
    assert lines[-1] == "verdict   too close"
    assert [line for line in budget_lines(SPREAD) if line.startswith("GPU")] == [
        "GPU 0             9.00 GiB",
        "GPU 1            18.30 GiB",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [50, 80, 110])
@pytest.mark.parametrize("capacity_gib", [None, 5, 18, 40])
def test_the_bars_of_several_gpus_have_one_scale_and_one_limit(
    capacity_gib: int | None, width: int, encoding: str
) -> None:
    capacity_bytes = None if capacity_gib is None else capacity_gib * GIB
    text = shown(budget_table(SPREAD, capacity_bytes), width=width, encoding=encoding)
    first, second = (line for line in text.splitlines() if line.startswith("GPU"))
    assert max(len(first), len(second)) <= width
    assert " 9.00 " in first
    assert " 18.30 " in second
    assert first.index("GiB") == second.index("GiB")
    limits = [max(map(line.rfind, "|┃")) for line in (first, second)]
    assert limits[0] == limits[1]
    assert (limits[0] == -1) == (capacity_gib is None)
    unused = "." if encoding == "ascii" else "·"
    assert first.count(unused) > second.count(unused)


def test_the_smallest_gpu_takes_as_much_of_its_bar_as_of_the_fullest() -> None:
    bars = [bar_text(each, 10 * GIB, width=100, scale_bytes=USUAL.total_bytes) for each in (HALF, USUAL)]
    used = [sum(letter not in "·┃" for letter in bar.partition(" ")[0]) for bar in bars]
    assert used[0] / used[1] == pytest.approx(HALF.total_bytes / USUAL.total_bytes, abs=0.02)


MATRIX = matrix_table(
    {
        "r1": {
            48.0: MatrixCell(verdict="fits", predicted_bytes=30 * GIB),
            24.0: MatrixCell(verdict="fits", predicted_bytes=20 * GIB, setting="gradient checkpointing"),
        },
        "r2": {24.0: MatrixCell(verdict="does not fit", predicted_bytes=int(31.254 * GIB))},
    }
)


def texts(table: Table) -> list[list[str]]:
    return [
        [cell_text(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)] for row in table.rows
    ]


def test_the_matrix_has_recipes_by_ascending_sizes() -> None:
    assert [column.heading for column in MATRIX.columns] == ["Recipe", "24 GB", "48 GB"]
    assert texts(MATRIX) == [
        ["r1", "fits\n20.00 GiB\ngradient checkpointing", "fits\n30.00 GiB"],
        ["r2", "does not fit\n31.25 GiB", "–"],
    ]


def test_the_matrix_shows_in_a_terminal_and_in_markdown() -> None:
    lines = shown(terminal_table(MATRIX)).splitlines()
    assert lines[2].split("  ")[0] == "r1"
    assert lines[4].strip() == "gradient checkpointing"
    assert "| r1 | fits 20.00 GiB gradient checkpointing | fits 30.00 GiB |" in markdown(MATRIX)


def test_an_empty_matrix_has_its_heading_only() -> None:
    assert markdown(matrix_table({})).splitlines() == ["| Recipe |", "| --- |"]
