import fcntl
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.kit.data.conversation import Conversation
from stages.kit.memory.predict import MemoryPredictor
from stages.kit.models.load import load_config
from stages.kit.planning.ladder import rungs
from stages.kit.planning.plan import Plan
from stages.kit.training import features
from stages.kit.training.collators import FEATURES
from stages.kit.training.features import kept_features, use_features
from stages.kit.training.rehearsal import largest_batch
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.training.small import plan_for, weights

IDENTITY = {"base": "a", "data": "b", "plan": "its seed too", "attempt": "0"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PART_SAMPLES", 3)


@pytest.fixture
def train(build: Callable[..., RecipeTrainer], tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    def make(plan: Plan) -> dict[str, torch.Tensor]:
        trainer = build(plan)
        with kept_features(tmp_path / "features", plan, IDENTITY) as folder:
            if folder is not None:
                use_features(trainer, trainer.data_collator, folder, limit_gb=1)
            trainer.train()
        return weights(trainer)

    return make


def with_features(plan: Plan) -> Plan:
    return replace(plan, features_bytes=1)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 1},
        {"quantization": "none", "micro_batch": 2},
        {"quantization": "none", "micro_batch": 2, "padding_free": True},
    ],
)
def test_a_training_from_features_gives_the_weights_of_one_from_pixels(
    train: Callable[..., dict[str, torch.Tensor]], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within rounding: a matrix product may round by its size, and pictures go through in other batches."""
    padding_free = changes.pop("padding_free", False)
    plan = replace(plan_for("r1-llm-only", **changes), padding_free=padding_free)
    computed = train(with_features(plan))
    for name, wanted in train(plan).items():
        torch.testing.assert_close(computed[name], wanted, rtol=0, atol=2e-5, msg=name)
    monkeypatch.setattr(features, "_computed", None)
    assert equal(train(with_features(plan)), computed), "features that were there give other bits"


def test_features_decide_what_is_learned(train: Callable[..., dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Or the equality of weights says nothing."""
    plan = with_features(plan_for("r1-llm-only"))
    wanted = train(plan)
    for path in (tmp_path / "features").glob("*/*.safetensors"):
        changed = {name: tensor + 1 if FEATURES in name else tensor for name, tensor in load_file(path).items()}
        save_file(changed, path)
        path.with_suffix(".sha256").write_text(file_digest(path))
    features._opened.cache_clear()
    assert not equal(train(plan), wanted)


@pytest.mark.parametrize("padding_free", [False, True])
def test_batches_differ_in_their_pixels_alone(
    build: Callable[..., RecipeTrainer], tmp_path: Path, padding_free: bool
) -> None:
    trainer = build(replace(plan_for("r1-llm-only"), padding_free=padding_free))
    folder = tmp_path / "features/a"
    folder.mkdir(parents=True)
    collator = trainer.data_collator
    use_features(trainer, collator, folder, limit_gb=1)
    examples = [{"sample": sample} for sample in (5, 0, 7)]
    with_pixels, batch = collator(examples), trainer.data_collator(examples)
    assert with_pixels.keys() - batch.keys() == {"pixel_values"}
    assert batch.keys() - with_pixels.keys() == {FEATURES}
    assert all(torch.equal(with_pixels[name], batch[name]) for name in with_pixels if name != "pixel_values")


def test_a_damaged_or_missing_part_is_computed_anew(
    build: Callable[..., RecipeTrainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, folder = build(plan_for("r1-llm-only")), tmp_path / "features/a"
    folder.mkdir(parents=True)
    collator = trainer.data_collator
    use_features(trainer, collator, folder, limit_gb=1)
    damaged, missing, kept = sorted(folder.glob("*.safetensors"))
    before = [path.read_bytes() for path in (damaged, missing, kept)]
    damaged.write_bytes(before[0][:-1] + bytes([before[0][-1] ^ 1]))
    missing.unlink()
    made = kept.stat().st_mtime_ns
    use_features(trainer, collator, folder, limit_gb=1)
    assert [path.read_bytes() for path in (damaged, missing, kept)] == before
    assert kept.stat().st_mtime_ns == made
    assert [record.message for record in caplog.records if "damaged" in record.message] == [
        f"{damaged} is damaged; its features are computed anew"
    ]


def test_what_features_depend_on_has_features_of_its_own(tmp_path: Path) -> None:
    plan = with_features(plan_for("r1-llm-only"))

    def folder(identity: dict[str, str] = IDENTITY, **changes: Any) -> Path | None:
        with kept_features(tmp_path, replace(plan, **changes), identity) as found:
            return found

    assert folder({**IDENTITY, "plan": "of another seed", "attempt": "1"}, recipe="other", seed=7) == folder()
    others = [folder({**IDENTITY, name: "c"}) for name in ("base", "data")]
    others += [folder(precision="bf16"), folder(quantization="none"), folder(max_length=7)]
    assert len({folder(), *others}) == 1 + len(others)
    assert folder(features_bytes=0) is None


def test_the_longest_unused_features_go_and_never_those_that_a_training_reads(
    build: Callable[..., RecipeTrainer], tmp_path: Path
) -> None:
    trainer = build(plan_for("r1-llm-only"))
    plan, collator, kept = with_features(trainer.plan), trainer.data_collator, {}
    for base in "abc":
        with kept_features(tmp_path, plan, {"base": base}) as folder:
            assert folder is not None
            kept[base] = folder
            use_features(trainer, collator, folder, limit_gb=1)
    with kept_features(tmp_path, plan, {"base": "a"}):  # used again
        pass
    with (kept["c"] / "lock").open() as lock, kept_features(tmp_path, plan, {"base": "d"}) as folder:
        assert folder is not None
        kept["d"] = folder
        fcntl.flock(lock, fcntl.LOCK_SH)
        size_gb = sum(path.stat().st_size for path in kept["a"].iterdir()) / 1e9
        use_features(trainer, collator, folder, limit_gb=3.5 * size_gb)
        assert [base for base in kept if kept[base].exists()] == ["a", "c", "d"]
        use_features(trainer, collator, folder, limit_gb=size_gb)
        assert [base for base in kept if kept[base].exists()] == ["c", "d"]


def test_a_full_disk_is_named_with_the_way_out(
    build: Callable[..., RecipeTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = build(plan_for("r1-llm-only"))
    monkeypatch.setattr(features, "save_file", full)
    with pytest.raises(UserError, match=r"No space left.*profiles.tiny.memory.features_gb: 0"):
        use_features(trainer, trainer.data_collator, tmp_path, limit_gb=1)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".sha256"]


def test_only_frozen_towers_within_the_limit_are_planned(
    build: Callable[..., RecipeTrainer], tiny_vlm: Path, answered: Sequence[Conversation]
) -> None:
    trainer = build(plan_for("r1-llm-only"))
    predictor = MemoryPredictor(
        config=load_config(tiny_vlm),
        processor=trainer.processing_class,
        batch_of=lambda micro_batch: largest_batch(trainer.data_collator, micro_batch),
    )

    def planned(recipe: str, limit_gb: float = 1.0, **changes: Any) -> int:
        return predictor.with_features(replace(plan_for(recipe), **changes), limit_gb).features_bytes

    size = planned("r1-llm-only")
    tokens = max(int((trainer.data_collator([{"sample": n}])["mm_token_type_ids"] == 1).sum()) for n in range(8))
    assert size == 8 * tokens * load_config(tiny_vlm).get_text_config().hidden_size * 4
    assert planned("r1-llm-only", precision="bf16") == size // 2
    assert planned("r1-llm-only", limit_gb=size / 1e9) == size
    assert planned("r1-llm-only", limit_gb=(size - 1) / 1e9) == 0
    assert planned("r2-vision-only") == planned("r4-joint") == planned("r1-llm-only", placement="sharded") == 0
    spread = replace(plan_for("r1-llm-only"), placement="ddp", may_quantize=False, quantization="none")
    for rung in rungs(predictor.with_features(spread, 1.0)):
        assert (rung.placement == "sharded") == (rung.features_bytes == 0)


def test_two_trainings_may_write_the_same_part_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, tensors, replace_file = tmp_path / "part-000000.safetensors", {"0.x": torch.ones(2)}, Path.replace
    writing: list[Path] = []

    def while_another_writes(aside: Path, target: Path) -> Path:
        if not writing:
            writing.append(aside)
            with monkeypatch.context() as other:
                other.setattr("os.getpid", lambda: 1)
                features._write_part(tensors, part)
        return replace_file(aside, target)

    monkeypatch.setattr(Path, "replace", while_another_writes)
    features._write_part(tensors, part)
    assert writing
    assert features._is_whole(part)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-000000.safetensors", "part-000000.sha256"]
