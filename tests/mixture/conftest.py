"""A dense model, three experts made of it, and their mixture. Not to be written to."""

from pathlib import Path

import pytest
import torch

from tests.mixture.dense import merged, save_base, save_expert, set_routers


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def experts(base_dir: Path) -> dict[str, Path]:
    """Three experts that changed only their MLPs."""
    return {name: save_expert(base_dir.with_name(name), base_dir, seed=seed) for seed, name in enumerate("abc", 1)}


@pytest.fixture(scope="session")
def mixture_dir(base_dir: Path, experts: dict[str, Path]) -> Path:
    """A mixture of the three with top_k 2; its routers are far from balanced."""
    folder = merged(base_dir, experts, base_dir.with_name("mixture"))
    torch.manual_seed(4)
    set_routers(folder, torch.randn(2, 3, 32))
    return folder
