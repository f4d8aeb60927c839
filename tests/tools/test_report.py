"""`python -m tools.report`: the last comparison in a browser, or its table."""

from __future__ import annotations

import shutil
import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests import ROOT
from tools.report import main

REPORT = Path("data/report/detection")


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no report yet."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)


def report(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def made() -> None:
    REPORT.mkdir(parents=True)
    (REPORT / "index.html").write_text("<p>")
    (REPORT / "table.txt").write_text("Model  Mean IoU\n")


def test_an_unknown_task_and_a_report_that_is_missing_are_named() -> None:
    unknown = report("detektion")
    assert unknown.exit_code == 1
    assert (
        "no task is called 'detektion' (did you mean 'detection'?); there are: detection, amr, moe, chat"
        in unknown.output
    )
    missing = report("detection")
    assert missing.exit_code == 1
    assert "there is no report of task detection yet; make it with: dvc repro compare@detection" in missing.output


@pytest.mark.parametrize("opens", [True, False])
def test_the_page_is_opened_and_its_path_shown_in_any_case(opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    seen: list[str] = []

    def open_page(url: str) -> bool:
        seen.append(url)
        return opens

    monkeypatch.setattr(webbrowser, "open", open_page)
    shown = report("detection")
    page = (REPORT / "index.html").absolute()
    assert seen == [page.as_uri()]
    assert str(page) in shown.output
    assert ("no browser here" in shown.output) is not opens


def test_the_table_is_printed_as_it_is_and_nothing_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail("a page was opened"))
    assert report("detection", "--table").output == (REPORT / "table.txt").read_text()
