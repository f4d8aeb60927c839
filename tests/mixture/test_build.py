"""A mixture contains its experts unchanged, and is made of models of its base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import read_lineage
from stages.mixture import build
from stages.mixture.build import check_lineages, merge_experts
from stages.models.folders import check_model_folder
from tests.mixture.dense import merged, save_base, save_expert, set_routers

TOKENS = torch.arange(3, 60)[None]


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(folder_or_model: Path | PreTrainedModel) -> torch.Tensor:
    model = load(folder_or_model) if isinstance(folder_or_model, Path) else folder_or_model
    return model(TOKENS).logits[0]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(("count", "top_k", "tied"), [(2, 2, True), (5, 3, False)])
def test_identical_experts_are_the_dense_model(tmp_path: Path, count: int, top_k: int, tied: bool) -> None:
    base_dir = save_base(tmp_path / "base", tie_word_embeddings=tied)
    expert = save_expert(tmp_path / "expert", base_dir)
    torch.manual_seed(0)
    router = torch.randn(2, count, 32)
    folder = merged(base_dir, {str(n): expert for n in range(count)}, tmp_path / "m", top_k=top_k)
    set_routers(folder, router)
    assert (logits(expert) - logits(base_dir)).abs().max() > 0.1
    assert (logits(folder) - logits(expert)).abs().max() < 1e-5


def test_a_mixture_loads_whole_with_a_zero_shared_expert(
    base_dir: Path, experts: dict[str, Path], tmp_path: Path
) -> None:
    folder = merged(base_dir, experts, tmp_path / "m")
    check_model_folder(folder)
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()), loaded
    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    shared = [parameter for name, parameter in model.named_parameters() if "shared_expert" in name]
    assert len(shared) == 2 * 4
    assert not any(parameter.any() for parameter in shared)
    model.save_pretrained(tmp_path / "saved")
    ours, theirs = weights_of(folder), weights_of(tmp_path / "saved")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved")]
    assert configs[0] == configs[1]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (base_dir / name).read_bytes()


def test_shards_change_nothing(
    base_dir: Path, experts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights_of(merged(base_dir, experts, tmp_path / "whole"))
    sharded = {
        name: save_expert(tmp_path / name, base_dir, seed=seed, shard="40KB") for seed, name in enumerate("abc", 1)
    }
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    monkeypatch.setattr(build, "MAX_SHARD_SIZE", "60KB")
    folder = merged(base_dir, sharded, tmp_path / "m")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights_of(folder).items())
    assert weights_of(folder).keys() == whole.keys()


def test_outside_the_mlps_is_the_base_and_changes_are_measured(
    base_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {
        name: save_expert(tmp_path / name, base_dir, seed=seed, outside=0.05) for seed, name in enumerate("ab", 1)
    }
    (tmp_path / "m").mkdir()
    changes = merge_experts(base_dir, experts, tmp_path / "m", top_k=2)
    base, found = weights_of(base_dir), weights_of(tmp_path / "m")
    theirs = {name: weights_of(folder) for name, folder in experts.items()}
    outside = [name for name in base if ".mlp." not in name]
    for name in outside:
        assert found[name].equal(base[name])
    for name, weights in theirs.items():
        for where, names in (("outside", outside), ("mlp", base.keys() - set(outside))):
            change = torch.stack([(weights[key] - base[key]).square().sum() for key in names]).sum()
            norm = torch.stack([base[key].square().sum() for key in names]).sum()
            assert getattr(changes[name], where) == pytest.approx((change / norm).sqrt().item(), rel=1e-4)
        assert (
            f"expert {name} changed all else by {changes[name].outside:.2g} of its norm, which is lost" in caplog.text
        )


def test_a_mixture_has_the_dtype_of_its_experts(tmp_path: Path) -> None:
    base_dir = save_base(tmp_path / "base")
    experts = {name: save_expert(tmp_path / name, base_dir, dtype=torch.bfloat16) for name in "ab"}
    assert {tensor.dtype for tensor in weights_of(merged(base_dir, experts, tmp_path / "m")).values()} == {
        torch.bfloat16
    }
    assert json.loads((tmp_path / "m/config.json").read_text())["dtype"] == "bfloat16"


@pytest.fixture
def expert(base_dir: Path, tmp_path: Path) -> Path:
    return save_expert(tmp_path / "one", base_dir)


def test_experts_come_from_the_base(base_dir: Path, expert: Path, tmp_path: Path) -> None:
    def check(base: Path, *folders: Path) -> None:
        check_lineages(read_lineage(base), {folder.name: read_lineage(folder) for folder in folders})

    other = save_base(tmp_path / "other", seed=5)
    stranger = save_expert(tmp_path / "stranger", other)
    further = save_expert(tmp_path / "further", expert, seed=2)  # continues another recipe
    check(base_dir, expert, further)
    digests = [read_lineage(folder).digest[:12] for folder in (other, base_dir)]
    for base, folders, reason in (
        (base_dir, [expert, stranger], rf"stranger comes from other \(content {digests[0]}\), not .*{digests[1]}"),
        (further, [expert, further], r"expert one comes from base"),
    ):
        with pytest.raises(UserError, match=reason):
            check(base, *folders)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen3"}, "is a qwen3; a mixture is made from dense Qwen2"),
        ({"use_sliding_window": True}, "sliding"),
    ],
)
def test_models_of_another_kind_are_refused(
    base_dir: Path, expert: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    edit_config(expert, **change)
    with pytest.raises(UserError, match=reason):
        merged(base_dir, {"one": expert, "two": base_dir}, tmp_path / "m")
