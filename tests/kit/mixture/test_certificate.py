import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.mixture.certificate import (
    TOLERANCE,
    BuildCertificate,
    Change,
    Domain,
    RoutingByLayer,
    read_build_certificate,
    write_build_certificate,
)
from stages.kit.mixture.domains import measure_domains
from stages.kit.mixture.merge import merge_experts
from stages.kit.mixture.routing import mean_hidden_states, measure_routing
from stages.kit.models.load import load_model
from stages.kit.models.processors import Processor, encode, load_processor
from tests.kit.mixture.dense import conversation, save_base, save_expert

PROBES = {
    "a": [conversation("What is a lake?"), conversation("Is it deep?", "Đúng vậy.")],
    "b": [conversation("meeting : so then we said 1 2 3 4 5 6 7 8 9")],
}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def processor(base_dir: Path) -> Processor:
    return load_processor(base_dir, None)


@pytest.fixture(scope="module")
def experts(base_dir: Path) -> dict[str, Path]:
    return {name: save_expert(base_dir.with_name(name), base_dir, seed=seed) for seed, name in enumerate("ab", 1)}


def load(folder: Path, precision: str = "fp32") -> PreTrainedModel:
    return load_model(folder, device=DeviceParams(kind="cpu"), precision=precision).eval()


def mixture_of(base_dir: Path, experts: dict[str, Path], folder: Path, router: torch.Tensor | None = None) -> Path:
    folder.mkdir()
    merge_experts(base_dir, experts, folder, top_k=2, router=router)
    return folder


def test_routers_of_zeros_give_every_expert_the_same_weight(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path
) -> None:
    found = measure_routing(load(mixture_of(base_dir, experts, tmp_path / "m")), processor, PROBES["a"])
    assert found.tokens == sum(
        encode(processor, [probe], padding_side="right")["input_ids"].numel() for probe in PROBES["a"]
    )
    assert found.weight_by_layer == [pytest.approx([0.5, 0.5])] * 2
    assert found.entropy == pytest.approx(1)


def test_routing_is_what_the_model_itself_does(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path
) -> None:
    """Against the weights that each layer's experts are called with."""
    torch.manual_seed(3)
    three = {**experts, "c": save_expert(tmp_path / "c", base_dir, seed=3)}
    model = load(mixture_of(base_dir, three, tmp_path / "m", torch.randn(2, 3, 32)))
    used = [torch.zeros(3) for _ in range(2)]

    def count(_: torch.nn.Module, args: tuple[torch.Tensor, ...], *, total: torch.Tensor) -> None:
        total.index_add_(0, args[1].flatten(), args[2].float().flatten())

    for layer, total in zip(model.model.layers, used, strict=True):
        layer.mlp.experts.register_forward_pre_hook(partial(count, total=total))
    found = measure_routing(model, processor, PROBES["b"])
    for total, weights, first in zip(used, found.weight_by_layer, found.first_by_layer, strict=True):
        assert weights == pytest.approx((total / found.tokens).tolist(), abs=1e-5)
        assert sum(first) == pytest.approx(1)
    assert found.weight == pytest.approx(torch.tensor(found.weight_by_layer).mean(0).tolist())
    assert 0 < found.entropy < 1


def test_the_mean_hidden_states_of_a_domain_are_what_its_router_is_given(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path
) -> None:
    router = mean_hidden_states(load(base_dir), processor, PROBES)
    assert router.shape == (2, 2, 32)
    torch.testing.assert_close(router.norm(dim=-1), torch.ones(2, 2))
    # In the first layer experts have changed nothing yet: there the mixture's router sees what the base's MLP does.
    model = load(mixture_of(base_dir, experts, tmp_path / "m", router))
    seen: list[torch.Tensor] = []
    model.model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].view(-1, 32)))
    measure_routing(model, processor, PROBES["a"])
    mean = torch.cat(seen).mean(0)
    torch.testing.assert_close(router[0, 0], mean / mean.norm(), atol=1e-5, rtol=0)


def test_a_router_that_would_choose_nothing_is_refused(base_dir: Path, processor: Processor) -> None:
    domains = {"a": PROBES["a"], "b": PROBES["b"], "c": PROBES["a"][::-1]}
    with pytest.raises(UserError, match="experts a and c would get the same router in layer 0"):
        mean_hidden_states(load(base_dir), processor, domains)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_expert_is_within_the_mixture_as_it_was(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path, precision: str
) -> None:
    found = domains_of(base_dir, experts, processor, tmp_path, precision)
    for name, domain in found.items():
        assert domain.forced_deviation < TOLERANCE[precision] / 2
        assert domain.probes == len(PROBES[name])
        assert domain.deviation.keys() == {"base", "expert a", "expert b"}
        assert min(domain.deviation.values()) > 0.1
    assert certificate(found, precision).problems() == []


def test_an_expert_that_lost_a_matrix_is_found_out(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path
) -> None:
    folder = mixture_of(base_dir, experts, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.1.down_proj.weight"] *= 0.99
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = measure_domains(folder, base_dir, experts, PROBES, load=load, processor=processor)
    (problem,) = certificate(found).problems()
    assert problem.startswith("expert b alone deviates by")


def test_what_an_expert_lost_outside_of_its_mlps_is_measured_and_no_fault_of_the_merge(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path
) -> None:
    moved = {**experts, "b": save_expert(tmp_path / "b", base_dir, seed=2, outside=0.05)}
    found = domains_of(base_dir, moved, processor, tmp_path)
    assert found["a"].forced_deviation < 1e-5
    assert found["b"].forced_deviation > 0.05
    changed = replace(certificate(found), changes={"a": Change(mlp=1, outside=0), "b": Change(mlp=1, outside=0.1)})
    assert changed.problems() == []
    assert len(certificate(found).problems()) == 1


def test_a_deviation_that_is_no_number_is_a_problem() -> None:
    routing = RoutingByLayer(
        tokens=1, first_by_layer=[], weight_by_layer=[], entropy_by_layer=[], first=[], weight=[], entropy=0
    )
    domain = Domain(probes=1, deviation={}, forced_deviation=math.nan, routing=routing)
    assert len(certificate({"a": domain, "b": replace(domain, forced_deviation=0.0)}).problems()) == 1


def test_the_certificate_is_plain_json(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path
) -> None:
    written = certificate(domains_of(base_dir, experts, processor, tmp_path))
    write_build_certificate(written, tmp_path / "moe.json")
    found = json.loads((tmp_path / "moe.json").read_text())
    assert found["domains"]["a"]["routing"]["weight"] == pytest.approx([0.5, 0.5])
    assert found["changes"]["b"] == {"mlp": 1.0, "outside": 0.0}
    assert read_build_certificate(tmp_path / "moe.json") == written


def domains_of(
    base_dir: Path, experts: dict[str, Path], processor: Processor, tmp_path: Path, precision: str = "fp32"
) -> dict[str, Domain]:
    folder = mixture_of(base_dir, experts, tmp_path / "m")
    loader = partial(load, precision=precision)
    return measure_domains(folder, base_dir, experts, PROBES, load=loader, processor=processor)


def certificate(domains: dict[str, Domain], precision: str = "fp32") -> BuildCertificate:
    return BuildCertificate(
        build="moe",
        built_digest="0" * 64,
        precision=precision,
        top_k=2,
        router_init="uniform",
        non_mlp="base",
        changes=dict.fromkeys(domains, Change(mlp=1.0, outside=0.0)),
        tolerance=TOLERANCE[precision],
        domains=domains,
    )
