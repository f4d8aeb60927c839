"""Features of frozen towers: trainings from them give the weights of trainings from pixels."""

import fcntl
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.data.conversation import Conversation
from stages.memory.predict import MemoryPredictor
from stages.models.load import load_config
from stages.planning.ladder import rungs
from stages.planning.plan import Plan
from stages.training import features
from stages.training.batches import FEATURES
from stages.training.features import frozen_features
from stages.training.trainer import RecipeTrainer
from tests.plans import changed
from tests.training.small import plan_for, weights

IDENTITY = {"base": "a", "data": "b", "plan": "its seed too", "attempt": "0"}
Build = Callable[..., RecipeTrainer]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PART_SAMPLES", 3)


@pytest.fixture
def train(build: Build, tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    def make(plan: Plan) -> dict[str, torch.Tensor]:
        trainer = build(plan)
        with frozen_features(trainer, tmp_path / "features", IDENTITY, limit_gb=1):
            trainer.train()
        return weights(trainer)

    return make


def with_features(plan: Plan) -> Plan:
    return replace(plan, features_bytes=1)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("padding_free", [False, True])
def test_weights_are_those_of_a_training_from_pixels(
    train: Callable[..., dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, padding_free: bool
) -> None:
    """Within rounding: a matrix product may round by its size, and images go through in other batches."""
    plan = plan_for("r1-llm-only", quantization="none", micro_batch=2, epochs=1)
    plan = replace(plan, padding_free=padding_free)
    computed = train(with_features(plan))
    for name, wanted in train(plan).items():
        torch.testing.assert_close(computed[name], wanted, rtol=0, atol=2e-5, msg=name)
    monkeypatch.setattr(features, "_computed", None)
    assert equal(train(with_features(plan)), computed), "features that were there give other bits"


@pytest.mark.parametrize("padding_free", [False, True])
def test_batches_differ_in_their_pixels_alone(build: Build, tmp_path: Path, padding_free: bool) -> None:
    trainer = build(with_features(replace(plan_for("r1-llm-only"), padding_free=padding_free)))
    collator, examples = trainer.data_collator, [{"sample": sample} for sample in (5, 0, 7)]
    with frozen_features(trainer, tmp_path, IDENTITY, limit_gb=1):
        with_pixels, batch = collator(examples), trainer.data_collator(examples)
    assert with_pixels.keys() - batch.keys() == {"pixel_values"}
    assert batch.keys() - with_pixels.keys() == {FEATURES}
    assert all(
        torch.equal(torch.as_tensor(with_pixels[name]), torch.as_tensor(batch[name]))
        for name in with_pixels
        if name != "pixel_values"
    )


def test_a_damaged_or_missing_part_is_computed_again(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(with_features(plan_for("r1-llm-only")))
    collator = trainer.data_collator
    with frozen_features(trainer, tmp_path, IDENTITY, limit_gb=1):
        damaged, missing, kept = sorted(tmp_path.glob("*/*.safetensors"))
    before = [path.read_bytes() for path in (damaged, missing, kept)]
    damaged.write_bytes(before[0][:-1] + bytes([before[0][-1] ^ 1]))
    missing.unlink()
    made = kept.stat().st_mtime_ns
    trainer.data_collator = collator
    with frozen_features(trainer, tmp_path, IDENTITY, limit_gb=1):
        assert [path.read_bytes() for path in (damaged, missing, kept)] == before
    assert kept.stat().st_mtime_ns == made
    assert [record.message.split()[0] for record in caplog.records if "corrupt" in record.message] == [str(damaged)]


def test_features_are_shared_if_all_that_they_depend_on_is_equal() -> None:
    plan = plan_for("r1-llm-only")

    def digest(identity: dict[str, str] = IDENTITY, **changes: Any) -> str:
        return features._digest(changed(plan, **changes), identity)

    assert digest({**IDENTITY, "plan": "of another seed", "attempt": "1"}, name="other", seed=7) == digest()
    others = [digest({**IDENTITY, name: "c"}) for name in ("base", "data")]
    others += [digest(precision="bf16"), digest(quantization="none"), digest(max_length=7), digest(skip_too_long=True)]
    assert len({digest(), *others}) == 1 + len(others)


def test_the_least_recently_used_features_go_but_none_that_a_training_reads(build: Build, tmp_path: Path) -> None:
    trainer = build(with_features(plan_for("r1-llm-only")))
    plain = trainer.data_collator

    def use(base: str, limit_gb: float = 1) -> Any:
        trainer.data_collator = plain
        return frozen_features(trainer, tmp_path, {"base": base}, limit_gb=limit_gb)

    (tmp_path / "a file").touch()
    folders = {base: tmp_path / features._digest(trainer.plan, {"base": base}) for base in "abcd"}
    for base in "abca":
        with use(base):
            pass
    size_gb = sum(path.stat().st_size for path in folders["a"].iterdir()) / 1e9
    with (folders["c"] / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        for limit_gb, left in ((3.5 * size_gb, "acd"), (size_gb, "cd")):
            with use("d", limit_gb):
                assert [base for base, folder in folders.items() if folder.exists()] == [*left]


def test_only_frozen_towers_within_the_limit_are_planned(
    build: Build, tiny_vlm: Path, answered: Sequence[Conversation]
) -> None:
    trainer = build(plan_for("r1-llm-only"))
    predictor = MemoryPredictor(
        config=load_config(tiny_vlm),
        processor=trainer.processing_class,
        batch_of=trainer.data_collator.largest_batch,
    )

    def planned(recipe: str, limit_gb: float = 1.0, **changes: Any) -> int:
        return predictor.with_features(changed(plan_for(recipe), **changes), limit_gb).features_bytes

    size = planned("r1-llm-only")
    tokens = max(int((trainer.data_collator([{"sample": n}])["mm_token_type_ids"] == 1).sum()) for n in range(8))
    assert size == 8 * tokens * load_config(tiny_vlm).get_text_config().hidden_size * 4
    assert planned("r1-llm-only", precision="bf16") == size // 2
    assert planned("r1-llm-only", limit_gb=size / 1e9) == size
    assert planned("r1-llm-only", limit_gb=(size - 1) / 1e9) == 0
    assert planned("r2-vision-only") == planned("r4-joint") == planned("r1-llm-only", placement="sharded") == 0
    spread = changed(plan_for("r1-llm-only"), placement="ddp", may_quantize=False, quantization="none")
    for rung in rungs(predictor.with_features(spread, 1.0)):
        assert (rung.memory.placement == "sharded") == (rung.features_bytes == 0)
