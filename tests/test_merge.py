"""A merged model in several files is the model that it is in one."""

from pathlib import Path

import pytest

from stages import merge
from stages.core.lineage import verified_lineage
from stages.kit.models.certificate import read_certificate
from stages.kit.models.folders import weight_files
from tests.test_stages import done, small_params, write_params

pytestmark = pytest.mark.pipeline

RECIPE = "r2-vision-only"
MERGED = Path("data/runs") / RECIPE / "merged"


def test_a_large_merged_model_is_the_same_in_several_files(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = small_params(tiny_vlm)
    raw["recipes"][RECIPE]["max_steps"] = 2
    write_params(raw)
    done("base", "vlm")
    done("prepare", "nutrition-tables")
    for stage in ("plan", "train", "merge"):
        done(stage, RECIPE)
    assert weight_files(MERGED) == {"model.safetensors"}
    certified = read_certificate(MERGED.with_name("merge.json"), RECIPE)
    monkeypatch.setattr(merge, "MAX_SHARD_SIZE", "300KB")
    done("merge", RECIPE)
    assert len(weight_files(MERGED)) > 1
    again = read_certificate(MERGED.with_name("merge.json"), RECIPE)
    assert again.weights_digest == certified.weights_digest
    assert again.merged_digest == verified_lineage(MERGED, fix="").digest != certified.merged_digest
    done("evaluate", RECIPE)
