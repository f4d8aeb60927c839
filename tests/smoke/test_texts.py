"""Stages that only tasks of text have, in containers: predictions, mixes of data, a mixture."""

import json
from pathlib import Path

import pytest

from tests.smoke.conftest import copy_of_checkout, dvc, git

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = copy_of_checkout(tmp_path_factory.mktemp("smoke") / "texts")
    dvc(workspace, "repro", "predict@example-sentences", "baseline@base-moe")
    return workspace


def test_there_is_a_graph_for_every_sentence(finished: Path) -> None:
    sentences = (finished / "data/tiny/sentences.txt").read_text().splitlines()
    assert (finished / "data/predictions/example-sentences.txt").read_text().count("#::snt") == len(sentences)


def test_a_mixture_is_made_of_its_experts_and_answers(finished: Path) -> None:
    certificate = json.loads((finished / "data/builds/moe.json").read_text())
    assert set(certificate["domains"]) == {"moe-expert-truthfulqa", "moe-expert-qmsum"}
    metrics = json.loads((finished / "data/runs/base-moe/metrics.json").read_text())
    assert metrics["samples_truthfulqa"] == metrics["samples_qmsum"] == 8
    assert 0 <= metrics["routing_entropy"] <= 1


def test_no_input_was_changed(finished: Path) -> None:
    assert git(finished, "status", "--porcelain").split() == ["??", "dvc.lock"]
