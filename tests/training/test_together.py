"""Two real processes that train together: weights and gradients of one, one start contract, one end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.two_processes import TRAINED, main, run_two, two_steps

# Both wait for each other, on a busy machine for their turns too.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two real processes found."""
    folder = tmp_path_factory.mktemp("two-processes")
    run_two(main, folder)
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_of_two_processes_gives_the_weights_and_gradients_of_one(name: str, two_processes: Path) -> None:
    alone = two_steps(name, None)
    together = load_file(two_processes / f"{name}.safetensors")
    assert together.keys() == alone.keys()
    for tensor_name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[tensor_name], rtol=0, atol=2e-6)


def test_the_start_contract_is_every_processs_whoever_holds_the_breach(two_processes: Path) -> None:
    assert "the gradient of model.norm.weight (llm) is not finite" in (two_processes / "breach.txt").read_text()


def test_processes_that_train_together_end_and_resume_together(two_processes: Path) -> None:
    """Placements ddp and sharded. Only the second process gets the signal, and the worker that loads its data."""
    for rank in range(2):
        for placement, found in json.loads((two_processes / f"found-{rank}.json").read_text()).items():
            assert found["codes"] == [128 + signal.SIGTERM, 0]
            assert found["steps"] == [3, 3]
            assert found["resumed"] == found["undisturbed"]
            assert len(found["validations"]) == 5
            assert all(loss == pytest.approx(-score, rel=1e-5) for loss, score in found["validations"])
            own = {"weights", "optimizer"} if rank == 0 or placement == "sharded" else set()
            assert {"weights", "optimizer", "random"} & set(found["saved"]) == {"random", *own}
