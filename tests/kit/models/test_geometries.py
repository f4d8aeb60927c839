import warnings

import pytest

from stages.core.errors import UserError
from stages.kit.mixture.merge import mixture_config
from stages.kit.models.geometries import GEOMETRIES_DIR, geometry_config_path, geometry_names
from stages.kit.models.load import load_config, meta_model
from stages.kit.models.parts import count_trainable


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen2-vl-2b", 2_208_985_600),
        ("qwen2-vl-7b", 8_291_375_616),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-vl-4b", 4_437_815_808),
        ("qwen3-vl-8b", 8_767_123_696),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_the_real_geometries_are_complete(name: str, weights: int) -> None:
    """Sizes as published."""
    warnings.simplefilter("ignore", FutureWarning)
    assert count_trainable(meta_model(load_config(geometry_config_path(name).parent))).all == weights


def test_the_mixtures_geometry_is_that_of_a_build() -> None:
    dense, mixture = (load_config(geometry_config_path(name).parent) for name in ("qwen2-1.5b", "qwen2-1.5b-x2"))
    built = mixture_config(dense, experts=2, top_k=2).to_dict()
    assert {**mixture.to_dict(), "_name_or_path": None} == {**built, "_name_or_path": None}


def test_an_unknown_geometry_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"no geometry is called 'qwen2-vl-7' \(did you mean 'qwen2-vl-7b'\?\); there"):
        geometry_config_path("qwen2-vl-7")
    with pytest.raises(UserError, match=r"no geometry is called '\.\./geometries/qwen2-vl-7b'"):
        geometry_config_path("../geometries/qwen2-vl-7b")


def test_every_geometry_is_known_by_name() -> None:
    assert set(GEOMETRIES_DIR.rglob("*.json")) == {geometry_config_path(name) for name in geometry_names()}
