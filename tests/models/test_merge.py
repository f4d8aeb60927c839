"""Trained weights, saved, loaded and merged; and the certificate of a merge."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.core.errors import UserError
from stages.core.lineage import write_lineage
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, ImageParams, LoraParams
from stages.data.conversation import Conversation
from stages.models.adapters import (
    WEIGHTS_FILE,
    apply_recipe,
    initial_tensors,
    load_trained,
    on_whole_base,
    save_trained,
    trained_modules,
    trained_tensors,
)
from stages.models.certificate import TOLERANCE, certified_model
from stages.models.load import DTYPES, load_model
from stages.models.merge import (
    changed_modules,
    merge_trained,
    probe_logits,
    relative_deviation,
    same_inputs,
    weight_digests,
)
from stages.models.prompts import load_processor
from tests import ROOT
from tests.made_up_records import CERTIFICATE
from tests.plans import recipe_of

LLM = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraParams(rank=4, alpha=8, targets={"llm": LLM})
JOINT = LoraParams(rank=4, alpha=8, targets={"llm": LLM, "vision": ("attn.qkv", "attn.proj", "mlp.fc1")})
WAYS = {
    "lora": recipe_of(llm="lora", lora=LORA),
    "full": recipe_of(vision="full", projector="full"),
    "joint": recipe_of(vision="lora", llm="lora", lora=JOINT),
    "mixed": recipe_of(vision="full", llm="lora", lora=LORA),
    "DoRA": recipe_of(llm="lora", lora=replace(LORA, dora=True)),
    "PiSSA": recipe_of(vision="lora", llm="lora", lora=replace(JOINT, init="pissa")),
    "OLoRA, rsLoRA, DoRA": recipe_of(llm="lora", lora=replace(LORA, init="olora", rslora=True, dora=True)),
}


def load(folder: Path, precision: str = "fp32") -> Any:
    return load_model(folder, device=DeviceParams(kind="cpu"), precision=precision).eval()


def save(base_dir: Path, folder: Path, way: str, *, scale: float = 0.05, precision: str = "fp32") -> Any:
    """A model with trained weights moved at random (LoRA's B starts at zero), saved into the folder."""
    torch.manual_seed(0)
    model = apply_recipe(load(base_dir, precision), WAYS[way]).eval()
    initial = initial_tensors(model, WAYS[way])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter) * scale)
    found = {"base_name": "OWNER/NAME", "revision": "c0ffee"}
    save_trained(model, folder, **found, tensors=trained_tensors(model), initial=initial)
    return model


@pytest.fixture
def logits(tiny_vlm: Path, probes: list[Conversation]) -> Callable[[Any], torch.Tensor]:
    return partial(probe_logits, processor=load_processor(tiny_vlm, None), probes=probes)


@pytest.mark.parametrize("way", WAYS)
def test_merged_model_equals_adapter_model(
    way: str, tiny_vlm: Path, tmp_path: Path, logits: Callable[[Any], torch.Tensor]
) -> None:
    model = save(tiny_vlm, tmp_path, way)
    expected, wanted = trained_modules(model), logits(model)
    base = load(tiny_vlm)
    before, digests = logits(base), weight_digests(base)
    adapted = load_trained(base, tmp_path).eval()
    loss = 1e-4 if initial_tensors(model, WAYS[way]) else 0
    assert relative_deviation(logits(adapted), wanted, before) <= loss, "what was saved is what was trained"
    merge_trained(adapted).save_pretrained(tmp_path / "merged")
    merged = load(tmp_path / "merged")
    assert relative_deviation(logits(merged), wanted, before) < 1e-4
    assert changed_modules(digests, weight_digests(merged)) == expected


@pytest.mark.parametrize("scale", [0.002, 0.02])
def test_a_good_merge_in_bf16_differs_from_a_lost_one(
    scale: float, tiny_vlm: Path, tmp_path: Path, logits: Callable[[Any], torch.Tensor]
) -> None:
    save(tiny_vlm, tmp_path, "lora", scale=scale)
    base = load(tiny_vlm, "bf16")
    before = logits(base)
    adapted = load_trained(base, tmp_path).eval()
    wanted = logits(adapted)
    merged = logits(merge_trained(adapted))
    assert relative_deviation(merged, wanted, before) < TOLERANCE["bf16"]
    assert relative_deviation(before, wanted, before) > TOLERANCE["bf16"]


@pytest.mark.parametrize("scale", [0.002, 0.02])
def test_an_adapter_of_what_a_16_bit_base_lost_does_the_same_on_the_whole_base(
    scale: float, tiny_vlm: Path, tmp_path: Path, logits: Callable[[Any], torch.Tensor]
) -> None:
    """The rest in the base is rounded to 16 bits, about as a merge rounds."""
    trained = save(tiny_vlm, tmp_path, "PiSSA", scale=scale, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):  # as it was trained
        wanted = logits(trained)
    base = load(tiny_vlm, "bf16")
    before = logits(base)
    adapted = logits(load_trained(base, tmp_path).eval())
    assert relative_deviation(adapted, wanted, before) < TOLERANCE["bf16"]


def test_an_adapter_on_the_whole_base_is_plain_and_keeps_16_bits_of_its_change() -> None:
    """PEFT's own form of it loses them, as the terms are larger than their difference."""
    torch.manual_seed(0)
    initial = {"q.lora_A.default.weight": torch.randn(4, 40), "q.lora_B.default.weight": torch.randn(50, 4)}
    adapter = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in initial.items()}
    (a0, b0), (a, b) = initial.values(), adapter.values()
    change = b @ a - b0 @ a0
    plain = on_whole_base({**adapter, "q.lora_magnitude_vector.default.weight": torch.ones(50)}, initial)
    wide_a, wide_b, magnitude = plain.values()
    assert (wide_a.shape, wide_b.shape, magnitude.shape) == ((8, 40), (50, 8), (50,))

    def lost(left: torch.Tensor, right: torch.Tensor) -> float:
        return ((left.bfloat16().float() @ right.bfloat16().float() - change).norm() / change.norm()).item()

    assert lost(wide_b, wide_a) < 0.01 < 0.1 < lost(torch.cat((b, -b0), dim=1), torch.cat((a, a0)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("way", ["lora", "full"])
def test_a_16_bit_base_is_merged_into_16_bits(precision: str, way: str, tiny_vlm: Path, tmp_path: Path) -> None:
    """Trained weights have 32 bits, and must not make the whole model twice as large."""
    load(tiny_vlm, "bf16").save_pretrained(tmp_path / "base")
    save(tiny_vlm, tmp_path, way)
    merge_trained(load_trained(load(tmp_path / "base", precision), tmp_path)).save_pretrained(tmp_path / "merged")
    tensors = load_file(tmp_path / "merged/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {DTYPES[precision]}
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == str(DTYPES[precision])[6:]


def test_only_trained_weights_are_saved_with_the_bases_name_and_ordered_targets(tiny_vlm: Path, tmp_path: Path) -> None:
    """PEFT's targets are a set; its order differs between processes."""
    save(tiny_vlm, tmp_path, "full")
    assert not (tmp_path / "adapter").exists()
    assert all(name.startswith("model.visual.") for name in load_file(tmp_path / WEIGHTS_FILE))
    save(tiny_vlm, tmp_path, "joint")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("OWNER/NAME", "c0ffee")
    assert config["target_modules"] == sorted(config["target_modules"])
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (4, 8, True)
    for way, alpha in (("PiSSA", 16), ("OLoRA, rsLoRA, DoRA", 8 * 2**0.5)):
        save(tiny_vlm, tmp_path, way)
        config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, alpha, True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"logit_deviation": 2e-2}, "logits deviate"),
        ({"logit_deviation": float("nan")}, "logits deviate"),
        ({"unexpected_modules": ["lm_head"]}, "changed that were not trained: lm_head"),
        ({"unchanged_modules": ["a.b"]}, "did not change: a.b"),
        ({"processor_parity": False}, "processor"),
    ],
)
def test_each_problem_fails_the_certificate(change: dict[str, Any], problem: str) -> None:
    assert CERTIFICATE.problems() == []
    (found,) = replace(CERTIFICATE, **change).problems()
    assert problem in found


def test_only_the_certificate_of_this_content_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, path = Path("data/runs/r1/merged"), Path("data/runs/r1/merge.json")
    params = load_params(ROOT / "params.yaml")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    merged = write_lineage(folder, kind="merged", name="r1")
    good = replace(CERTIFICATE, merged_digest=merged.digest)
    with pytest.raises(UserError, match=r"is missing.*dvc repro -f -s merge@r1"):
        certified_model(params, "r1")
    good.write(path)
    assert certified_model(params, "r1") == (folder, merged)
    for certificate, reason in (
        (CERTIFICATE, "certifies 000000000000, but the folder holds"),
        (replace(good, logit_deviation=1.0), "records a failed merge: logits deviate"),
    ):
        certificate.write(path)
        with pytest.raises(UserError, match=reason):
            certified_model(params, "r1")


def test_the_deviation_is_a_share_of_the_training_and_does_not_depend_on_threads(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.manual_seed(0)
    base, change, other = torch.randn(3, 300, 5000)
    adapted = base + 0.01 * change
    assert relative_deviation(adapted, adapted, base) == 0
    assert relative_deviation(base, adapted, base) == pytest.approx(1)
    assert relative_deviation((base + adapted) / 2, adapted, base) == pytest.approx(0.5, rel=1e-3)
    assert not relative_deviation(base, base, base) <= 1, "nothing was trained: no certificate"
    found = set()
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.add(relative_deviation(other, adapted, base))
    assert len(found) == 1


def test_another_image_size_breaks_processor_parity(tiny_vlm: Path, probes: list[Conversation]) -> None:
    one = load_processor(tiny_vlm, None)
    assert same_inputs(one, load_processor(tiny_vlm, None), probes)
    smaller = load_processor(tiny_vlm, ImageParams(min_pixels=28 * 28, max_pixels=28 * 28))
    assert not same_inputs(one, smaller, probes)
