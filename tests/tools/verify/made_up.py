"""A pipeline of stages that take no time: a base, a model that was trained on it, and the merge of both.

python -m tests.tools.verify.made_up STAGE NAME      how its dvc.yaml calls it
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from stages.core.atomic import atomic_folder
from stages.core.lineage import content_digest, verified_lineage, write_lineage
from tests import ROOT
from tests.made_up_records import CERTIFICATE, PROVENANCE

PIPELINE = """
stages:
  base:
    foreach: [vlm]
    do:
      cmd: python -m tests.tools.verify.made_up base ${item}
      deps: [data/source]
      outs: ["data/provenance/base@${item}.json", data/bases/vlm]
  train:
    foreach: ${recipes}
    do:
      cmd: python -m tests.tools.verify.made_up train ${key}
      params: ["recipes.${key}"]
      deps: [data/bases/vlm]
      outs: ["data/provenance/detection/train@${key}.json", "data/runs/${key}/trained"]
      metrics: ["data/runs/${key}/training/training.json"]
      plots: [{"data/runs/${key}/training/plots": {x: step}}]
  merge:
    foreach: ${recipes}
    do:
      cmd: python -m tests.tools.verify.made_up merge ${key}
      deps: [data/bases/vlm, "data/runs/${key}/trained"]
      outs: ["data/runs/${key}/merged", "data/runs/${key}/merge.json"]
"""

BASE = Path("data/bases/vlm")


def make_workspace(workspace: Path) -> Path:
    """The whole pipeline, run by DVC."""
    (workspace / "data/source").mkdir(parents=True)
    (workspace / "data/source/config.json").write_text("{}")
    (workspace / "dvc.yaml").write_text(PIPELINE)
    (workspace / "params.yaml").write_text("recipes: {r1: {seed: 1}}\n")
    run(workspace, "dvc init --quiet --no-scm && dvc repro --quiet")
    return workspace


def run(workspace: Path, command: str) -> None:
    """Run a shell command."""
    from tests.launcher.small_checkout import run as run_in  # each stage would import it too

    run_in(workspace, "bash", "-c", command, PYTHONPATH=str(ROOT))


def weights(seed: int) -> dict[str, np.ndarray]:
    return {"a": np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32), "b": np.zeros(3, np.float16)}


def base(name: str) -> None:
    with atomic_folder(BASE) as folder:
        shutil.copy("data/source/config.json", folder)
        save_file(weights(0), folder / "model.safetensors")
        write_lineage(folder, kind="base", name=name, source={"folder": "data/source"})
    record(f"data/provenance/base@{name}.json", ["data/source"])


def train(name: str) -> None:
    run_dir, seed = Path("data/runs") / name, YAML(typ="safe").load(Path("params.yaml"))["recipes"][name]["seed"]
    with atomic_folder(run_dir / "trained") as folder:
        (folder / "adapter").mkdir()
        save_file(weights(seed), folder / "adapter/adapter_model.safetensors")
        (folder / "thử nghiệm.txt").write_bytes("một\r\nhai\r\n".encode())
        write_lineage(folder, kind="trained", name=name, parents={"base": (BASE, verified_lineage(BASE, fix=""))})
    (run_dir / "training/plots").mkdir(parents=True, exist_ok=True)
    (run_dir / "training/plots/loss.csv").write_text("step,loss\n1,0.5\n")
    (run_dir / "training/training.json").write_text(json.dumps({"train_seconds": 1.5, "final_loss": 1 / seed}))
    record(f"data/provenance/detection/train@{name}.json", [str(BASE)])


def merge(name: str) -> None:
    run_dir = Path("data/runs") / name
    parents = {"base": BASE, "trained": run_dir / "trained"}
    read = {role: (path, verified_lineage(path, fix="")) for role, path in parents.items()}
    with atomic_folder(run_dir / "merged") as folder:
        save_file(weights(2), folder / "model.safetensors")
        lineage = write_lineage(folder, kind="merged", name=name, parents=read)
    replace(CERTIFICATE, recipe=name, merged_digest=lineage.digest).write(run_dir / "merge.json")


def record(path: str, inputs: list[str]) -> None:
    read = {path: content_digest(Path(path)) for path in inputs}
    now = datetime.now(UTC).isoformat()
    replace(PROVENANCE, stage=Path(path).stem, started=now, inputs=read).write(Path(path))


if __name__ == "__main__":
    {"base": base, "train": train, "merge": merge}[sys.argv[1]](sys.argv[2])
