"""Records of runs that never were: what the launcher and a merge write. Light to import: made-up stages do."""

from stages.core.provenance import Machine, Provenance
from stages.kit.models.certificate import Certificate

PROVENANCE = Provenance(
    stage="train@r1",
    command="docker/run train r1",
    started="2026-11-21T09:00:00+00:00",
    ended="2026-11-21T09:01:14+00:00",
    seconds=74.2,
    commit="c0ffee" * 6 + "c0ff",
    changed=[],
    code="5" * 64,
    experiment=None,
    params={},
    plan=None,
    seed=None,
    attempt=0,
    inputs={},
    outputs={},
    engine="docker",
    image="bakeoff:cpu-0123456789ab",
    image_digest="sha256:" + "1" * 64,
    lock="10c4" * 16,
    machine=Machine(
        python="3.12.14",
        packages={},
        cuda=None,
        system="Linux-6.1",
        cpu="A CPU",
        arithmetic="AuthenticAMD avx2",
        cores=2,
        memory_gib=16.0,
    ),
    gpus=[],
    driver=None,
)

CERTIFICATE = Certificate(
    recipe="r1",
    merged_digest="0" * 64,
    weights_digest="0" * 64,
    logit_deviation=1e-6,
    tolerance=1e-2,
    probes=2,
    changed_modules=3,
    unexpected_modules=[],
    unchanged_modules=[],
    processor_parity=True,
    precision="fp32",
    trained_quantization="none",
)
