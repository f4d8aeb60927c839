"""The certificate of a build, against the models that it is made of."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stages.mixture.certificate import TOLERANCE, BuildCertificate, Change
from stages.mixture.routing import measure_domains
from stages.models.prompts import load_processor
from tests.made_up_records import BUILD_CERTIFICATE
from tests.mixture.dense import conversation, load, merged, save_expert

PROBES = {
    "a": [conversation("What is a lake?"), conversation("Is it deep?", "Đúng vậy.")],
    "b": [conversation("meeting : so then we said 1 2 3 4 5 6 7 8 9")],
}


def certificate(built_dir: Path, experts: dict[str, Path], precision: str = "fp32") -> BuildCertificate:
    domains = measure_domains(
        *(built_dir, experts, PROBES),
        load=partial(load, precision=precision),
        processor=load_processor(built_dir, None),
    )
    changes = dict.fromkeys(domains, Change(mlp=1.0, outside=0.0))
    tolerance = TOLERANCE[precision]
    return replace(BUILD_CERTIFICATE, precision=precision, changes=changes, tolerance=tolerance, domains=domains)


@pytest.fixture
def two(experts: dict[str, Path]) -> dict[str, Path]:
    return {name: experts[name] for name in PROBES}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_expert_is_in_the_mixture_unchanged(
    base_dir: Path, two: dict[str, Path], tmp_path: Path, precision: str
) -> None:
    found = certificate(merged(base_dir, two, tmp_path / "m"), two, precision)
    for name, domain in found.domains.items():
        assert domain.forced_deviation < TOLERANCE[precision] / 2
        assert domain.probes == len(PROBES[name])
        assert domain.routing.load == pytest.approx([0.5, 0.5])  # routers of zeros
        assert domain.routing.entropy == pytest.approx(1)
    assert found.problems() == []
    found.write(tmp_path / "moe.json")
    assert BuildCertificate.read(tmp_path / "moe.json", fix="") == found


def test_a_changed_expert_fails_the_certificate(base_dir: Path, two: dict[str, Path], tmp_path: Path) -> None:
    folder = merged(base_dir, two, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.1.down_proj.weight"] *= 0.99
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = certificate(folder, two)
    (problem,) = found.problems()
    assert problem.startswith("expert b alone deviates by")
    nan = {**found.domains, "b": replace(found.domains["b"], forced_deviation=math.nan)}
    assert len(replace(found, domains=nan).problems()) == 1


def test_a_change_outside_the_mlps_does_not_fail_the_certificate(
    base_dir: Path, two: dict[str, Path], tmp_path: Path
) -> None:
    moved = {**two, "b": save_expert(tmp_path / "b", base_dir, seed=2, outside=0.05)}
    found = certificate(merged(base_dir, moved, tmp_path / "m"), moved)
    assert found.domains["a"].forced_deviation < 1e-5 < 0.05 < found.domains["b"].forced_deviation
    assert len(found.problems()) == 1
    assert replace(found, changes={**found.changes, "b": Change(mlp=1, outside=0.1)}).problems() == []
