"""A dense model, three experts made of it, and their mixture. Not to be written to."""

from pathlib import Path

import pytest
import torch

from stages.kit.mixture.build import merge_experts
from tests.kit.mixture.dense import save_base, save_expert, set_routers


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
    folder = base_dir.with_name("mixture")
    folder.mkdir()
    torch.manual_seed(4)
    merge_experts(base_dir, experts, folder, top_k=2)
    set_routers(folder, torch.randn(2, 3, 32))
    return folder
