"""Known geometries: NAME/config.json as published, without weights; those named -tiny are for tries on a CPU, and
-x2 is a mixture as the build stage makes it of two."""

from __future__ import annotations

from pathlib import Path

from stages.core.documents import nearest
from stages.core.errors import UserError

GEOMETRIES_DIR = Path(__file__).parent

STAND_IN_DIR = Path("data/tiny/qwen2-vl")
"""A model folder whose tokenizer and image processor go with every geometry: no memory depends on what they say."""

PUBLISHED = {
    "Qwen/Qwen1.5-MoE-A2.7B": "qwen1.5-moe-a2.7b",
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2-vl-2b",
    "Qwen/Qwen2-VL-7B-Instruct": "qwen2-vl-7b",
    "Qwen/Qwen2-1.5B-Instruct": "qwen2-1.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3-vl-4b",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3-vl-8b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3-mini",
}
"""The geometry of each of these repositories of the hub."""


def geometry_names() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in GEOMETRIES_DIR.glob("*/config.json")))


def geometry_config_path(name: str) -> Path:
    """Raises UserError for an unknown name, with the nearest known one."""
    names = geometry_names()
    if name not in names:
        raise UserError(f"no geometry is called {name!r}{nearest(name, names)}; there are: {', '.join(names)}")
    return GEOMETRIES_DIR / name / "config.json"
