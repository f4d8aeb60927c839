import subprocess
import sys
from pathlib import Path

import pytest

from stages.core import environment
from stages.core.environment import AVX2, arithmetic, instruction_set, pinned_instructions
from tests import ROOT

TRAINING = """
import hashlib, sys
import numpy as np
import torch
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(300, 700), torch.nn.GELU(), torch.nn.RMSNorm(700), torch.nn.Linear(700, 50), torch.nn.LogSoftmax(-1)
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(900, 300)).square().mean().backward()
    optimizer.step()
weights = [parameter.detach().numpy() for parameter in model.parameters()]
weights.append(np.exp(np.random.default_rng(0).standard_normal(1000)))
print(hashlib.sha256(b"".join(part.tobytes() for part in weights)).hexdigest(), torch.backends.cpu.get_cpu_capability())
"""


@pytest.fixture
def avx2_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    environment.CPUINFO.write_text("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: fma avx avx2\n" * 2)


def trained(threads: int, environment: dict[str, str]) -> list[str]:
    """The digest of three steps' weights, and the instructions that torch says it used."""
    command = [sys.executable, "-c", TRAINING, str(threads)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_pinned_instructions_are_what_computes_and_threads_change_no_bit() -> None:
    pinned = pinned_instructions({})
    if not pinned:
        pytest.skip("this CPU has no AVX2")
    results = [trained(threads, pinned) for threads in (1, 3)]
    assert results[0][1] == "AVX2"
    assert len({digest for digest, _ in results}) == 1


@pytest.mark.usefixtures("avx2_alone")
def test_machines_are_told_apart_by_what_decides_on_sums() -> None:
    pinned = pinned_instructions({})
    assert pinned == AVX2
    assert (instruction_set(pinned), arithmetic(pinned)) == ("avx2", "AuthenticAMD avx2")
    for name in AVX2:
        assert arithmetic({**pinned, name: "AUTO"}) != arithmetic(pinned), name
    assert arithmetic({}) == "AMD EPYC"


@pytest.mark.usefixtures("avx2_alone")
def test_another_makers_cpu_and_another_choice_of_mkls_are_other_arithmetic() -> None:
    """Also by the kernels that AMD and Intel have in common: MKL's square roots differ."""
    asked = pinned_instructions({"MKL_CBWR": "COMPATIBLE"})
    assert asked == {**AVX2, "MKL_CBWR": "COMPATIBLE"}
    assert arithmetic(asked) == "AuthenticAMD avx2, MKL_CBWR=COMPATIBLE"
    environment.CPUINFO.write_text("vendor_id\t: GenuineIntel\nflags\t\t: fma avx2\n")
    assert arithmetic(asked) == "GenuineIntel avx2, MKL_CBWR=COMPATIBLE"
    assert arithmetic(pinned_instructions({})) == "GenuineIntel avx2"
