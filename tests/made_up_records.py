"""Records of runs that never were: what the launcher and the stages write. Light to import: made-up stages do."""

from stages.core.provenance import Machine, Provenance
from stages.mixture.certificate import BuildCertificate, Change, Domain, Routing
from stages.models.certificate import MergeCertificate
from stages.training.records import TrainingSummary

PROVENANCE = Provenance(
    stage="train@r1",
    started="2026-11-21T09:00:00+00:00",
    ended="2026-11-21T09:01:14+00:00",
    seconds=74.2,
    commit="c0ffee" * 6 + "c0ff",
    changed=[],
    code="5" * 64,
    experiment=None,
    params={},
    plan=None,
    attempt=0,
    inputs={},
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

CERTIFICATE = MergeCertificate(
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

ROUTING = Routing(load=(1.0,), entropy=0.0)
BUILD_CERTIFICATE = BuildCertificate(
    build="moe",
    built_digest="0" * 64,
    precision="fp32",
    top_k=2,
    changes={"a": Change(mlp=1.0, outside=0.0)},
    tolerance=1e-5,
    domains={"a": Domain(probes=1, forced_deviation=0.0, routing=ROUTING)},
)

TRAINING = TrainingSummary(
    recipe="r1",
    profile="tiny",
    attempt=0,
    micro_batch=16,
    grad_accumulation=1,
    gradient_checkpointing=False,
    optimizer="adamw_torch",
    quantization="none",
    num_steps=60,
    epochs=3.0,
    train_loss=0.9,
    final_loss=0.61,
    train_seconds=74.2,
    samples_per_second=16.1,
    peak_memory_bytes=1_300_000_000,
    reserved_memory_bytes=1_400_000_000,
    memory_kind="cpu_allocated",
    trainable={"vision": 0, "projector": 0, "llm": 7, "total": 7, "all": 100},
)
