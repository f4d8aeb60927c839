import warnings

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import LoraParams, PartsParams
from stages.kit.mixture.build import mixture_config
from stages.kit.models.adapters import apply_recipe, count_trainable
from stages.kit.models.folders import GEOMETRIES_DIR, geometry_config_path, geometry_names
from stages.kit.models.load import load_config, meta_model


@pytest.mark.parametrize(
    ("name", "weights", "llm", "vision"),
    [
        ("qwen2-vl-2b", 2_208_985_600, 9_232_384, 5_242_880),
        ("qwen2-vl-7b", 8_291_375_616, 20_185_088, 5_242_880),
        ("qwen2.5-7b", 7_615_616_512, 20_185_088, 0),
        ("qwen1.5-moe-a2.7b", 14_315_784_192, 3_145_728, 0),
        ("qwen2.5-vl-7b", 8_292_166_656, 20_185_088, 5_575_680),
        ("qwen3-8b", 8_190_735_360, 21_823_488, 0),
        ("qwen3-vl-4b", 4_437_815_808, 16_515_072, 3_145_728),
        ("qwen3-vl-8b", 8_767_123_696, 21_823_488, 3_849_984),
        ("llama-3.1-8b", 8_030_261_248, 20_971_520, 0),
        ("gemma-3-1b", 999_885_952, 6_522_880, 0),
        ("phi-3-mini", 3_821_079_552, 12_582_912, 0),
    ],
)
def test_the_real_geometries_are_complete(name: str, weights: int, llm: int, vision: int) -> None:
    """Sizes as published, and what LoRA of rank 8 trains of their linear layers: 8 (inputs + outputs) each."""
    warnings.simplefilter("ignore", FutureWarning)
    model = meta_model(load_config(geometry_config_path(name).parent))
    assert count_trainable(model).all == weights
    parts = PartsParams(llm="lora", vision="lora" if vision else "frozen")
    lora = LoraParams(rank=8, alpha=8, targets=dict.fromkeys(parts.trained("lora"), ("all-linear",)))
    counts = count_trainable(apply_recipe(model, parts, lora))
    assert (counts.llm, counts.vision, counts.projector) == (llm, vision, 0)


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
