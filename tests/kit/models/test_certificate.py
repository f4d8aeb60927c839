import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.kit.data.conversation import Conversation
from stages.kit.errors import UserError
from stages.kit.lineage import write_lineage
from stages.kit.models.certificate import (
    Certificate,
    changed_modules,
    compare_logits,
    require_certificate,
    same_inputs,
    weight_digests,
    write_certificate,
)
from stages.kit.models.processors import load_processor
from stages.kit.params import ImageParams

GOOD = Certificate(
    recipe="r1",
    merged_digest="0" * 64,
    max_logit_deviation=1e-6,
    tolerance=1e-3,
    top1_agreement=1.0,
    probes=2,
    changed_modules=3,
    unexpected_modules=[],
    unchanged_modules=[],
    processor_parity=True,
    precision="fp32",
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_logit_deviation": 2e-3}, "logits deviate"),
        ({"max_logit_deviation": float("nan")}, "logits deviate"),
        ({"unexpected_modules": ["lm_head"]}, "changed that were not trained: lm_head"),
        ({"unchanged_modules": ["a.b"]}, "did not change: a.b"),
        ({"processor_parity": False}, "processor"),
    ],
)
def test_each_problem_fails_the_certificate(change: dict[str, object], problem: str) -> None:
    assert GOOD.problems() == []
    (found,) = replace(GOOD, **change).problems()  # type: ignore[arg-type]
    assert problem in found


def test_no_evaluation_without_the_certificate_of_this_very_content(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/config.json").write_text("{}")
    merged = write_lineage(tmp_path / "merged", kind="merged", name="r1")
    path = tmp_path / "merge.json"
    with pytest.raises(UserError, match=r"is missing.*dvc repro merge@r1"):
        require_certificate(path, merged)
    write_certificate(GOOD, path)
    with pytest.raises(UserError, match="certifies 000000000000, but the folder holds"):
        require_certificate(path, merged)
    write_certificate(replace(GOOD, merged_digest=merged.digest), path)
    require_certificate(path, merged)
    write_certificate(replace(GOOD, merged_digest=merged.digest, max_logit_deviation=1.0), path)
    with pytest.raises(UserError, match="records a failed merge: logits deviate"):
        require_certificate(path, merged)
    for text in ("", "{}", "[]", json.dumps({**asdict(GOOD), "more": 1})):
        path.write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            require_certificate(path, merged)


def test_changed_modules_are_those_that_differ_or_are_new() -> None:
    one, two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    two.load_state_dict(one.state_dict())
    assert changed_modules(weight_digests(one), weight_digests(two)) == set()
    with torch.no_grad():
        two.get_parameter("1.bias")[0] += 1e-7
    assert changed_modules(weight_digests(one), weight_digests(two)) == {"1"}
    assert changed_modules({"a.weight": "x"}, {}) == {"a"}


def test_logits_are_compared_in_their_own_spread() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(5, 7) * 10]
    assert compare_logits(logits, logits) == (0.0, 1.0)
    deviation, agreement = compare_logits([logits[0] + 1], logits)
    assert deviation == pytest.approx(1 / logits[0].std().item(), rel=1e-5)
    assert agreement == 1.0


def test_another_picture_size_breaks_processor_parity(tiny_vlm: Path, probes: list[Conversation]) -> None:
    one = load_processor(tiny_vlm, None)
    assert same_inputs(one, load_processor(tiny_vlm, None), probes)
    smaller = load_processor(tiny_vlm, ImageParams(min_pixels=28 * 28, max_pixels=28 * 28))
    assert not same_inputs(one, smaller, probes)
