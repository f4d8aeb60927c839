from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stages.kit.reporting.runs import Run, read_run
from stages.kit.reporting.sections import (
    cost_table,
    flatten,
    memory_table,
    plan_settings,
    split_settings,
    trainable_table,
)
from tests.made_up_runs import MIB, made_up_memory, project_params, write_made_up_run


def made_up(tmp_path: Path, name: str) -> Run:
    params = project_params()
    trained = name in params.recipes
    run_dir = write_made_up_run(tmp_path, name, [0.5, 0.6], params=params if trained else None)
    run = read_run(run_dir, identity=("image_id",), columns=("iou",), trained=trained)
    assert run is not None
    return run


def test_settings_are_flattened_as_text() -> None:
    settings = {"a": {"b": 1e-4, "c": ("x", "y")}, "d": None, "e": True, "f": {}}
    assert flatten(settings) == {"a.b": "0.0001", "a.c": "x, y", "d": "–", "e": "yes", "f": "–"}


def test_only_what_differs_is_set_apart_and_only_the_uncommon_stands_out() -> None:
    by_run = {
        "one": {"rank": "64", "seed": "42", "rate": "0.1"},
        "two": {"rank": "8", "seed": "42", "rate": "0.1"},
        "three": {"rank": "64", "seed": "42"},
    }
    differing, outstanding, shared = split_settings(by_run)
    assert [row.cells for row in differing.rows] == [("rank", "64", "8", "64"), ("rate", "0.1", "0.1", "–")]
    assert outstanding == {(0, 2), (1, 3)}
    assert [row.cells for row in shared.rows] == [("seed", "42")]


def test_no_run_gives_empty_tables() -> None:
    differing, outstanding, shared = split_settings({})
    assert (differing.rows, outstanding, shared.rows) == ((), frozenset(), ())


def test_recipes_of_the_project_differ_where_they_say(tmp_path: Path) -> None:
    runs = [made_up(tmp_path, name) for name in ("r1-llm-only", "r4-joint")]
    differing, _, shared = split_settings({run.name: plan_settings(run.plan) for run in runs if run.plan})
    assert "parts.vision" in [row.cells[0] for row in differing.rows]
    assert "seed" in [row.cells[0] for row in shared.rows]
    assert "recipe" not in [row.cells[0] for row in (*differing.rows, *shared.rows)]


def test_trained_parameters_come_with_their_share_and_parts_that_nobody_trains_are_left_out(tmp_path: Path) -> None:
    table = trainable_table([made_up(tmp_path, "r1-llm-only")])
    assert [column.key for column in table.columns] == ["model", "llm", "total", "all", "share"]
    assert table.rows[0].cells == ("r1-llm-only", 688_000, 688_000, 3_100_000, 688 / 3100)


def test_costs_name_what_memory_was_measured_and_leave_a_base_empty(tmp_path: Path) -> None:
    base, trained = cost_table([made_up(tmp_path, "base-vlm"), made_up(tmp_path, "r1-llm-only")]).rows
    assert base.cells == ("base-vlm", *[None] * 7, 12.5)
    assert trained.cells == ("r1-llm-only", 30, 74.2, 16.1, 1_300_000_000, None, "tensors on the CPU", 0.61, 12.5)


def test_memory_is_told_by_stage_with_what_a_model_was_built_by(tmp_path: Path) -> None:
    stages = made_up_memory("build", "moe", gpus=1), made_up_memory("train", "r1-llm-only", gpus=2)
    trained = replace(made_up(tmp_path, "r1-llm-only"), memory=(*stages, made_up_memory("evaluate", "r1-llm-only")))
    table = memory_table([made_up(tmp_path, "base-vlm"), trained])
    on_gpus = (8192 * MIB, 0, 100 * MIB, 400 * MIB, 8092 * MIB)
    on_cpu = (7592 * MIB, 600 * MIB, 700 * MIB, 1000 * MIB, 7492 * MIB)
    assert [row.cells for row in table.rows] == [
        ("r1-llm-only", "build moe", *on_gpus, "tensors on the GPU"),
        ("r1-llm-only", "train", *on_gpus, "tensors on 2 GPUs"),
        ("r1-llm-only", "evaluate", *on_cpu, "the whole process, on the CPU"),
    ]
