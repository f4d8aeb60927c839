"""Tiny random models without an entry of families through all stages, chosen to differ; a benchmark runs the others."""

import shutil
from pathlib import Path

import pytest

from tests.architectures import (
    BASE_DIR,
    all_the_way,
    completions,
    head_deviations,
    prepared_workspace,
    refusal_of,
    resumes_alike,
)

pytestmark = pytest.mark.pipeline

TRIED = {
    "qwen3_5": "chat-lora",  # linear attention, and a vision tower that texts leave alone
    "gpt_oss": "chat-lora",  # a mixture of a class without SDPA
    "granite": "chat-lora",  # scaled logits
    "gpt_neox": "chat-full",  # no setting of key-value heads
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_workspace(tmp_path_factory.mktemp("prepared"))


@pytest.mark.parametrize("model_type", TRIED)
def test_an_unlisted_architecture_goes_all_the_way(model_type: str, prepared: Path, tmp_path: Path) -> None:
    workspace = shutil.copytree(prepared, tmp_path / "workspace", symlinks=True)
    way = all_the_way(model_type, workspace, recipe=TRIED[model_type])
    assert f"{model_type} is not among the families" in way.planned
    assert abs(way.memory_error) < 1e-3
    assert way.logit_deviation < 1e-3
    base = workspace / BASE_DIR
    assert max(head_deviations(base).values()) < 1e-5
    together, alone = completions(base)
    assert together == alone
    merged = workspace / "data/runs" / TRIED[model_type] / "merged"
    assert (merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    if model_type == "gpt_neox":  # a checkpoint knows no architecture; the least of these trainings stands for all
        assert resumes_alike(workspace, TRIED[model_type])


def test_a_loss_that_trl_does_not_compute_is_refused_by_the_plan(prepared: Path, tmp_path: Path) -> None:
    workspace = shutil.copytree(prepared, tmp_path / "workspace", symlinks=True)
    assert "TRL's loss of a recurrent_gemma is" in refusal_of("recurrent_gemma", workspace)
