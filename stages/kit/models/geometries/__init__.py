"""Known geometries: NAME/config.json as published, without weights; those named -tiny are for tries on a CPU."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from stages.kit.errors import UserError

GEOMETRIES_DIR = Path(__file__).parent


def geometry_names() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in GEOMETRIES_DIR.glob("*/config.json")))


def geometry_config_path(name: str) -> Path:
    """Raises UserError for an unknown name, with the nearest known one."""
    names = geometry_names()
    if name not in names:
        match = get_close_matches(name, names, n=1)
        nearest = f" (did you mean {match[0]!r}?)" if match else ""
        raise UserError(f"no geometry is called {name!r}{nearest}; there are: {', '.join(names)}")
    return GEOMETRIES_DIR / name / "config.json"
