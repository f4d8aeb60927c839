import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.lineage import read_lineage
from stages.kit.mixture.build import check_lineages, check_models
from tests.kit.mixture.dense import save_base, save_expert


@pytest.fixture
def expert(base_dir: Path, tmp_path: Path) -> Path:
    return save_expert(tmp_path / "one", base_dir)


def check(base_dir: Path, *expert_dirs: Path) -> None:
    lineages = {folder.name: read_lineage(folder) for folder in expert_dirs}
    check_lineages(read_lineage(base_dir), lineages)


def test_experts_of_another_base_are_refused(base_dir: Path, expert: Path, tmp_path: Path) -> None:
    other = save_base(tmp_path / "other", seed=5)
    stranger = save_expert(tmp_path / "stranger", other)
    digests = [read_lineage(folder).digest[:12] for folder in (other, base_dir)]
    with pytest.raises(UserError, match=rf"stranger comes from other \(content {digests[0]}\), not .*{digests[1]}"):
        check(base_dir, expert, stranger)


def test_an_expert_may_continue_another_recipe(base_dir: Path, expert: Path, tmp_path: Path) -> None:
    further = save_expert(tmp_path / "further", expert, seed=2)
    check(base_dir, expert, further)
    with pytest.raises(UserError, match=r"expert one comes from base"):
        check(further, expert, further)


def test_the_same_expert_under_two_names_is_refused(base_dir: Path, expert: Path, tmp_path: Path) -> None:
    shutil.copytree(expert, tmp_path / "two")
    with pytest.raises(UserError, match=r"experts one and two are the same model"):
        check(base_dir, expert, tmp_path / "two")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def other_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|quad_start|>", "<|quad_begin|>"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: edit_config(folder, num_attention_heads=8), r"one has num_attention_heads 8, .* has 4"),
        (lambda folder: edit_config(folder, rms_norm_eps=1e-5), r"one has rms_norm_eps 1e-05"),
        (lambda folder: edit_config(folder, tie_word_embeddings=True), r"one has tie_word_embeddings True"),
        (lambda folder: edit_config(folder, model_type="qwen3"), r"is a qwen3; a mixture is made from dense Qwen2"),
        (lambda folder: edit_config(folder, quantization_config={"load_in_4bit": True}), r"quantized already"),
        (lambda folder: edit_config(folder, use_sliding_window=True), r"sliding window"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
            r"one has another chat template",
        ),
        (other_words, r"one has another vocabulary"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"lacks model.safetensors"),
    ],
)
def test_models_that_do_not_go_together_are_refused(
    base_dir: Path, expert: Path, tmp_path: Path, change: Callable[[Path], object], reason: str
) -> None:
    folder = shutil.copytree(expert, tmp_path / "changed")
    check_models(base_dir, {"one": folder})
    change(folder)
    with pytest.raises(UserError, match=reason):
        check_models(base_dir, {"one": folder})
