"""A task's report from made-up runs: terminal, markdown, CSV, JSON and page."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from stages.compare import compare_task
from stages.core.errors import UserError
from stages.reporting.compare import Comparison, compare, read_contenders, task_report
from stages.reporting.page import render_page
from stages.reporting.runs import report_runs_dir
from stages.tasks.detection.report import REPORT
from tests.made_up_runs import (
    made_up_ious,
    made_up_memory,
    names_of,
    project_params,
    write_made_up_memory,
    write_made_up_record,
    write_made_up_run,
)

OF_STORY = {"base-vlm": 0.2, "r1-llm-only": 0.68, "r2-vision-only": 0.35, "r3-two-stage": 0.68, "r4-joint": 0.735}
MEANS = {name: OF_STORY.get(name, 0.5) for name in names_of("detection")}


def write_runs(data_dir: Path, *, leave_out: tuple[str, ...] = ()) -> None:
    params = project_params()
    for seed, (name, mean) in enumerate(MEANS.items()):
        if name in leave_out:
            continue
        trained = name in params.recipes
        ious = made_up_ious(mean, 50, seed=seed)
        write_made_up_run(report_runs_dir(data_dir, "detection"), name, ious, params=params if trained else None)
        for stage in ("train", "merge", "evaluate") if trained else ("evaluate",):
            write_made_up_memory(data_dir, "detection", made_up_memory(stage, name))


def run_compare(data_dir: Path) -> str:
    """The output on the terminal."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    compare_task(project_params(), "detection", data_dir=data_dir, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def compared(data_dir: Path) -> Comparison:
    params = project_params()
    report = task_report(params, "detection")
    return compare(report, read_contenders(params, report, [data_dir]))


def report(data_dir: Path, name: str) -> str:
    return (data_dir / "report" / "detection" / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    data_dir = tmp_path_factory.mktemp("complete")
    write_runs(data_dir)
    return data_dir, run_compare(data_dir)


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    data_dir = tmp_path_factory.mktemp("incomplete")
    write_runs(data_dir, leave_out=("base-vlm", "r3-two-stage"))
    return data_dir, run_compare(data_dir)


class Links(HTMLParser):
    """Collects the targets of a page's links, its ids, its texts and what is not closed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        self.texts += [""] * (tag == "pre")
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("src", "href", "srcset", "data", "poster", "action", "xlink:href"):
                self.targets.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["pre"]:
            self.texts[-1] += data


def links(page: str) -> Links:
    parser = Links()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_terminal_shows_table_headline_and_insights(complete: tuple[Path, str]) -> None:
    data_dir, shown = complete
    assert shown.startswith(report(data_dir, "table.txt"))
    heading = next(line for line in shown.splitlines() if "Model" in line)
    headings = [metric.heading for metric in REPORT.metrics]
    assert re.split(r"\s{2,}", heading.strip()) == ["Model", *headings, "95% interval"]
    assert re.search(r"^r4-joint +0\.7\d\d .* best", shown, re.MULTILINE)
    assert "r4-joint is best: mean IoU 0.7" in shown
    assert "Joint against LLM-only: the model of r4-joint is better than that of r1-llm-only by +0.0" in shown
    assert "Two-stage against LLM-only: no difference shown between the model of r3-two-stage and that of r1-" in shown
    assert "r2-vision-only against its base: the model of r2-vision-only is better than that of base-vlm by" in shown
    assert "r2-vision-only: a stage of r3-two-stage" in shown
    (differing,) = (line for line in shown.splitlines() if line.startswith("The recipes differ in "))
    assert "parts.vision" in differing
    assert "seed" not in differing


def test_markdown_and_csv_say_the_same_as_the_terminal(complete: tuple[Path, str]) -> None:
    data_dir, shown = complete
    written = report(data_dir, "comparison.md").replace("\\", "")
    insights = [line.strip() for line in shown.splitlines() if " against " in line]
    assert len(insights) == len(REPORT.questions) + len(MEANS) - 1, "and each recipe against its base"
    assert all(f"- {line}" in written for line in insights)
    assert next(line for line in shown.splitlines() if line.startswith("The recipes differ in ")) in written
    rows = list(csv.DictReader(io.StringIO(report(data_dir, "comparison.csv"))))
    assert [row["model"] for row in rows] == list(MEANS)
    best = next(row for row in rows if row["role"] == "best")
    assert float(best["mean_iou_low"]) < float(best["mean_iou"]) < float(best["mean_iou_high"])


def test_json_is_flat_for_dvc(complete: tuple[Path, str]) -> None:
    flat = json.loads(report(complete[0], "comparison.json"))
    assert flat["best"] == "r4-joint"
    assert flat["evidence_enough"] is True
    low, high = json.loads(flat["r4-joint.mean_iou_interval"])
    assert low < flat["r4-joint.mean_iou"] < high
    costs = json.loads(report(complete[0], "costs.json"))
    assert all(isinstance(value, str | int | float) for value in (*flat.values(), *costs.values()))
    assert {name.partition(".")[2] for name in costs} == {"predicted_gib", "measured_gib", "train_minutes"}


def test_the_page_stands_alone(complete: tuple[Path, str]) -> None:
    page = report(complete[0], "index.html")
    found = links(page)
    assert found.targets
    assert all(target.startswith(("data:image/", "#")) for target in found.targets)
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert "://" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page
    assert len(found.ids) == len(set(found.ids))
    linked = {target[1:] for target in found.targets if target.startswith("#")}
    assert linked | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(found.ids)


def test_missing_models_are_named_everywhere(incomplete: tuple[Path, str]) -> None:
    data_dir, shown = incomplete
    rows = {row["model"]: row for row in csv.DictReader(io.StringIO(report(data_dir, "comparison.csv")))}
    for name, stage in (("base-vlm", "baseline@base-vlm"), ("r3-two-stage", "evaluate@r3-two-stage")):
        assert f"{name}: not run: dvc repro {stage}" in shown
        assert f"- {name}: not run: dvc repro {stage}" in report(data_dir, "comparison.md")
        filled = {key: value for key, value in rows[name].items() if value}
        assert filled == {"model": name, "role": "not run", "note": f"not run: dvc repro {stage}"}
        assert f"<b>{name}</b>: not run: <code>dvc repro {stage}</code>" in report(data_dir, "index.html")
    assert "Two-stage against LLM-only: not decided, not run: dvc repro evaluate@r3-two-stage" in shown
    assert "r4-joint is best" in shown
    assert "better than every other that was compared" in shown
    assert "The evidence is enough, among the models that were compared<" in report(data_dir, "index.html")


def test_the_same_runs_give_the_same_report(complete: tuple[Path, str]) -> None:
    def written() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (data_dir / "report/detection").iterdir() if path.is_file()}

    data_dir = complete[0]
    before = written()
    run_compare(data_dir)
    assert written() == before


def test_names_and_texts_are_escaped(tmp_path: Path) -> None:
    write_runs(tmp_path)
    comparison, nasty = compared(tmp_path), "<img src=x onerror=alert(1)>&'\""
    best = comparison.best
    assert best.run is not None
    best = replace(best, name=nasty, runs=(replace(best.run, name=nasty),))
    contenders = (*(other for other in comparison.contenders if other is not comparison.best), best)
    insights = tuple(replace(insight, topic=nasty, ours=nasty) for insight in comparison.insights)
    poisoned = replace(comparison, contenders=contenders, best=best, insights=insights)
    page = render_page(poisoned, profile=nasty)
    assert "<img src=x" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 20
    assert not [name for name in links(page).attributes if name.startswith("on")]


def test_texts_of_all_models_stand_side_by_side_and_stay_texts(complete: tuple[Path, str]) -> None:
    hostile = "<script>alert(1)</script></pre></details><b onclick=x>"
    questions = ("Which lamp?", f"\u05e9\u05dc\u05d5\u05dd {hostile}", "Hu\u1ebf?", "Never shown")
    comparison, runs = compared(complete[0]), {}
    for number, run in enumerate(comparison.runs):
        texts = tuple((each, f"the answer to {each}", f"\n  {run.name}: {each}" * (number > 0)) for each in questions)
        examples: dict[str, dict[int, Path | None]] = {"best": {number % 2: None}, "worst": {}, "random": {2: None}}
        if number == 0:  # as evaluated before the task scored otherwise
            columns = {**run.columns, "own": run.columns["iou"]}
            run = replace(run, metrics={**run.metrics, "ordered_by": "own"}, columns=columns)
        runs[run.name] = replace(run, texts=texts, examples=examples)
    contenders = tuple(replace(each, runs=tuple(runs[run.name] for run in each.runs)) for each in comparison.contenders)
    report = replace(comparison.report, shown=("text",))
    page = render_page(replace(comparison, report=report, contenders=contenders), profile="tiny")
    shown = links(page)
    expected = []
    for number in (2, 0, 1):  # the random one, then those of the models in their order
        expected += [questions[number], f"the answer to {questions[number]}"]
        expected += [run.texts[number][2] or "(empty)" for run in runs.values()]
    assert [text.removeprefix("\n") for text in shown.texts] == expected
    assert "by the own or iou beside its name" in page
    assert not shown.tags & {"script", "b onclick"}
    assert "onclick" not in shown.attributes
    assert page.count('<details class="sample card"') == 3
    assert page.count('<details class="sample card" open>') == 1
    assert page.count('<pre class="text" dir="auto"') == len(expected)
    first, second = comparison.runs[:2]
    assert f'<span class="pill">{first.name}, best</span>' in page
    assert f"{second.name} · {second.columns['iou'][2]:.2f}</h4>" in page


def test_origins_and_their_warnings_are_shown(complete: tuple[Path, str], tmp_path: Path) -> None:
    assert "Where it comes from" not in report(complete[0], "index.html")
    write_runs(tmp_path)
    for name in MEANS:
        write_made_up_record(tmp_path, f"{'baseline' if name == 'base-vlm' else 'train'}@{name}")
    shown = run_compare(tmp_path)
    assert "commits" not in shown
    assert "c0ffeec0ffee" in report(tmp_path, "index.html")
    write_made_up_record(tmp_path, "train@r4-joint", commit="b" * 40, changed=["stages/train.py"])
    shown = run_compare(tmp_path)
    for warning in (
        "The commits of the runs differ, though the code that made them is the same: c0ffeec0ffee",
        "r4-joint was made with changes that no commit has: stages/train.py",
    ):
        assert warning in shown
        assert warning in report(tmp_path, "comparison.md").replace("\\", "")
        assert warning in report(tmp_path, "index.html")


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([], "no model of task detection has been evaluated; run: dvc repro"),
        ([("r1-llm-only", 50, "tiny"), ("r4-joint", 40, "tiny")], "(?s)different samples.*r4-joint: 40 samples"),
        ([("r1-llm-only", 50, "qwen2-vl-2b")], r"sets profile tiny, .*r1-llm-only \(qwen2-vl-2b\)"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, runs: list[tuple[str, int, str]], problem: str
) -> None:
    for name, num_samples, profile in runs:
        params = replace(project_params(), profile=profile)
        ious = made_up_ious(0.5, num_samples, seed=1)
        write_made_up_run(report_runs_dir(tmp_path, "detection"), name, ious, params=params)
    with pytest.raises(UserError, match=problem):
        run_compare(tmp_path)
    assert not (tmp_path / "report/detection/index.html").exists()
