from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tools.published
from stages.core.provenance import PROVENANCE_DIR, Provenance, read_provenance, write_provenance
from tests import ROOT
from tests.made_up_runs import write_made_up_record
from tools.published import ARITHMETIC, TABLES_DIR, differing_lines, main, why_it_may_differ

RECORD = Path(PROVENANCE_DIR) / "detection/train@r1-llm-only.json"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace whose table is the published one."""
    monkeypatch.chdir(tmp_path)
    for path in (Path("data/report/detection/table.txt"), TABLES_DIR / "detection.txt"):
        path.parent.mkdir(parents=True)
        path.write_text("Model  Mean IoU\nr1  0.642\nr2  0.706\n")
    write_made_up_record(Path("data"), "train@r1-llm-only", plan={"profile": "tiny"})


def asked(*options: str) -> Result:
    return CliRunner().invoke(main, ["detection", *options])


def test_a_table_is_the_published_one_or_says_how_many_lines_differ_and_why(published: None) -> None:
    assert "to the digit" in asked("--strict").output
    Path("data/report/detection/table.txt").write_text("Model  Mean IoU\nr1  0.643\nr2  0.706\n")
    answer = asked()
    assert (answer.exit_code, "1 of its lines" in answer.output) == (0, True)
    assert asked("--strict").exit_code == 1
    record = read_provenance(RECORD)
    assert record.machine is not None
    write_provenance(replace(record, machine=replace(record.machine, arithmetic="GenuineIntel avx2")), RECORD)
    answer = asked("--strict")
    assert (answer.exit_code, "GenuineIntel avx2" in answer.output) == (0, True)


def test_a_recipe_alone_is_compared_by_its_figures(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(row: str) -> None:
        monkeypatch.setattr(tools.published, "table_text", lambda _: f"Model  Mean IoU\n{row}\nr2  not run\nr10  9.9\n")

    monkeypatch.setattr(tools.published, "compare_runs", lambda _: None)
    table("r1       0.642            highest\nr1 is the only model evaluated: Mean IoU 0.642.")
    assert "has of r1, to the digit" in asked("--strict", "--recipe", "r1").output
    table("r1  0.643")
    answer = asked("--strict", "--recipe", "r1")
    assert (answer.exit_code, "1 of its lines differ" in answer.output) == (1, True)


def test_nothing_is_said_of_a_task_without_a_published_table(published: None) -> None:
    answer = CliRunner().invoke(main, ["translation", "--strict"])
    assert (answer.exit_code, answer.output) == (0, "")


def test_a_longer_table_is_another_one() -> None:
    assert differing_lines("a\nb\n", "a\nb\n") == 0
    assert differing_lines("a\nb\n", "a\nb\nc\n") == 1
    assert differing_lines("a\nb\nc\n", "a\nx\n") == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"plan": {"profile": "qwen2-vl-2b-24gb"}}, "qwen2-vl-2b-24gb"),
        ({"changed": ["params.yaml"]}, "params.yaml"),
        ({"gpus": ["NVIDIA L4"]}, "GPU"),
    ],
)
def test_a_reason_for_another_table_is_read_from_the_records(
    published: None, change: dict[str, object], reason: str
) -> None:
    record: Provenance = read_provenance(RECORD)
    assert record.machine is not None
    assert record.machine.arithmetic == ARITHMETIC
    assert why_it_may_differ([record]) == []
    (found,) = why_it_may_differ([replace(record, **change)])  # type: ignore[arg-type]
    assert reason in found


def test_the_documents_show_the_published_tables() -> None:
    documents = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    tables = list((ROOT / TABLES_DIR).glob("*.txt"))
    assert [path.stem for path in sorted(tables)] == ["amr", "chat", "detection", "moe"]
    shown = "\n".join(line.rstrip() for line in documents.splitlines())
    for path in tables:
        rows = [line.rstrip() for line in path.read_text(encoding="utf-8").strip().splitlines()]
        assert "\n".join(rows[: rows.index("")]) in shown, path
