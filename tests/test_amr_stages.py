"""All stages in a row for a text task: AMR parsing on the tiny base, from sentences to a submission."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from stages.core.lineage import read_lineage
from stages.kit.planning.plan import read_plan
from stages.tasks.amr.samples.graphs import read_graph
from stages.tasks.amr.sources import read_blocks, read_lines
from tests import ROOT
from tests.test_stages import done, refused, write_params

pytestmark = pytest.mark.pipeline

BLOCK = """#::snt {who} {verb} {what} .
({verb[0]} / {verb}
    :agent({who[0]}1 / {who})
    :theme({what[0]}2 / {what}))

"""
CORPUS = "".join(
    BLOCK.format(who=who, verb=verb, what=what).replace("\n", "\r\n")
    for who in ("tôi", "em", "mẹ", "bạn", "cô")
    for verb in ("đọc", "mua", "thấy")
    for what in ("sách", "hoa", "nhà")
)
"""Sentences as ViSemPar is published: CRLF, roles without a space."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which the base was evaluated and amr-mtup went all the way, two steps of training."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "data").mkdir()
    (workspace / "data/tiny").symlink_to(ROOT / "data/tiny")
    (workspace / "corpus").mkdir()
    (workspace / "corpus/train.txt").write_text(CORPUS, newline="")
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["profiles"]["tiny"]["datasets"]["visempar"] = {"task": "amr", "source": "folder:corpus"}
    raw["profiles"]["tiny"]["memory"]["micro_batch"] = 4
    raw["profiles"]["tiny"]["evaluation"] = {"batch_size": 8, "max_new_tokens": 24}
    for name in ("amr-baseline", "amr-mtup"):
        raw["recipes"][name].update(effective_batch=8, max_steps=2)
    raw["predictions"] = {"unknown": {"task": "amr", "recipe": "amr-mtup", "inputs": "data/unknown.txt"}}
    (workspace / "data/unknown.txt").write_text("Tôi đọc sách .\nMẹ thấy nhà .\nAi đó ?\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(raw)
        done("base", "llm")
        done("prepare", "visempar")
        done("evaluate", "base-llm")
        for stage in ("plan", "train", "merge", "evaluate"):
            done(stage, "amr-mtup")
        done("predict", "unknown")
        done("compare", "amr")
        yield workspace


@pytest.fixture
def workspace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "workspace"
    shutil.copytree(finished, copy, symlinks=True)
    monkeypatch.chdir(copy)
    return copy


def test_a_parser_is_scored_by_every_figure_and_its_memory_was_predicted(finished: Path) -> None:
    run_dir = finished / "data/runs/amr-mtup"
    metrics = json.loads((run_dir / "metrics.json").read_text())
    count = pq.read_table(finished / "data/prepared/visempar/val.parquet").num_rows
    assert metrics["samples"] == count > 0
    for figure in ("smatch_f1", "smatch_f1_unnormalised", "smatch_f1_repaired", "smatch_f1_restored", "invalid_rate"):
        assert 0 <= metrics[figure] <= 1, figure
    assert abs(metrics["memory_error"]) < 0.01
    assert pq.read_table(run_dir / "predictions.parquet").num_rows == count
    assert read_plan("amr-mtup", runs_dir=run_dir.parent).answer_format == "mtup"
    assert read_lineage(run_dir / "merged").root() == read_lineage(finished / "data/bases/llm")


def test_the_report_shows_base_and_recipe_and_in_what_they_would_differ(finished: Path) -> None:
    table = (finished / "data/report/amr/table.txt").read_text()
    assert "Smatch F1" in table
    assert "base-llm" in table
    assert "amr-ptr: not run: dvc repro evaluate@amr-ptr" in table
    assert (finished / "data/report/amr/index.html").is_file()


def test_a_submission_has_a_graph_for_every_sentence(finished: Path) -> None:
    blocks = list(read_blocks(read_lines(finished / "data/predictions/unknown.txt")))
    assert [block.sentence for block in blocks] == ["Tôi đọc sách .", "Mẹ thấy nhà .", "Ai đó ?"]
    assert b"\r\n" in (finished / "data/predictions/unknown.txt").read_bytes()
    for block in blocks:
        assert read_graph("\n".join(block.graph)).concept  # EMPTY, or what a model of two steps makes up


def test_a_recipe_without_a_known_target_is_refused_while_it_is_planned(workspace: Path) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["recipes"]["amr-mtup"]["answer_format"] = "penman"
    write_params(raw)
    assert "answer_format: AMR parsing has full, ptr, mtup; found 'penman'" in refused("plan", "amr-mtup")


def test_a_target_that_the_limit_would_cut_names_its_sentence(workspace: Path) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["recipes"]["amr-mtup"]["max_length"] = 40
    write_params(raw)
    message = refused("plan", "amr-mtup")
    assert "sample train.txt:" in message
    assert "more than max_length 40; raise the recipe's max_length" in message


def test_a_link_out_of_the_data_is_no_file_of_sentences(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret\n")
    Path("data/unknown.txt").unlink()
    Path("data/unknown.txt").symlink_to(tmp_path / "secret.txt")
    assert "data/unknown.txt leads out of data by a link" in refused("predict", "unknown")


def test_a_file_without_sentences_is_refused(workspace: Path) -> None:
    Path("data/unknown.txt").write_text("")
    assert "data/unknown.txt" in refused("predict", "unknown")
