import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.core.errors import UserError
from stages.core.lineage import write_lineage
from stages.core.params.schema import ImageParams
from stages.core.publish import publish_json
from stages.kit.data.conversation import Conversation
from stages.kit.models.certificate import certified_model, require_certificate
from stages.kit.models.merge import changed_modules, relative_deviation, same_inputs, weight_digests
from stages.kit.models.prompts import load_processor
from tests.made_up_records import CERTIFICATE
from tests.made_up_runs import project_params


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
def test_each_problem_fails_the_certificate(change: dict[str, object], problem: str) -> None:
    assert CERTIFICATE.problems() == []
    (found,) = replace(CERTIFICATE, **change).problems()  # type: ignore[arg-type]
    assert problem in found


def test_no_evaluation_without_the_certificate_of_this_very_content(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/config.json").write_text("{}")
    merged = write_lineage(tmp_path / "merged", kind="merged", name="r1")
    path = tmp_path / "merge.json"
    with pytest.raises(UserError, match=r"is missing.*dvc repro merge@r1"):
        require_certificate(path, merged)
    publish_json(CERTIFICATE, path)
    with pytest.raises(UserError, match="certifies 000000000000, but the folder holds"):
        require_certificate(path, merged)
    publish_json(replace(CERTIFICATE, merged_digest=merged.digest), path)
    require_certificate(path, merged)
    publish_json(replace(CERTIFICATE, merged_digest=merged.digest, logit_deviation=1.0), path)
    with pytest.raises(UserError, match="records a failed merge: logits deviate"):
        require_certificate(path, merged)
    for text in ("", "{}", "[]", json.dumps({**asdict(CERTIFICATE), "more": 1})):
        path.write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            require_certificate(path, merged)


def test_of_a_model_that_is_missing_the_stage_that_makes_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = project_params()
    monkeypatch.chdir(tmp_path)
    for name, what in (("r4-joint", "data/runs/r4-joint/merged"), ("base-vlm", "data/bases/vlm")):
        stage = "merge@r4-joint" if name in params.recipes else "base@vlm"
        with pytest.raises(UserError, match=f"^{what} is not there; make it with: dvc repro {stage}$"):
            certified_model(params, name)


def test_changed_modules_are_those_that_differ_or_are_new() -> None:
    one, two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    two.load_state_dict(one.state_dict())
    assert changed_modules(weight_digests(one), weight_digests(two)) == set()
    with torch.no_grad():
        two.get_parameter("1.bias")[0] += 1e-7
    assert changed_modules(weight_digests(one), weight_digests(two)) == {"1"}
    assert changed_modules({"a.weight": "x"}, {}) == {"a"}


def test_the_deviation_is_a_share_of_what_training_changed() -> None:
    torch.manual_seed(0)
    base = torch.randn(8, 7)
    adapted = base + 0.01 * torch.randn_like(base)
    half = (base + adapted) / 2
    assert relative_deviation(adapted, adapted, base) == 0
    assert relative_deviation(base, adapted, base) == pytest.approx(1)
    assert relative_deviation(half, adapted, base) == pytest.approx(0.5, rel=1e-3)
    assert not relative_deviation(base, base, base) <= 1, "nothing was trained: no certificate"


def test_the_deviation_is_the_same_figure_by_any_number_of_threads(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.manual_seed(0)
    base, adapted, merged = torch.randn(3, 300, 5000)
    found = set()
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.add(relative_deviation(merged, adapted, base))
    assert len(found) == 1


def test_another_picture_size_breaks_processor_parity(tiny_vlm: Path, probes: list[Conversation]) -> None:
    one = load_processor(tiny_vlm, None)
    assert same_inputs(one, load_processor(tiny_vlm, None), probes)
    smaller = load_processor(tiny_vlm, ImageParams(min_pixels=28 * 28, max_pixels=28 * 28))
    assert not same_inputs(one, smaller, probes)
