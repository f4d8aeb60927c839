"""Measures what memory a build takes beside what the libraries do, and how fast it is.

Run     .venv/bin/python -m tests.benchmarks.build_memory [GB] [EXPERTS]      (3 times GB on the disk; about a minute)

Random dense models of GB in all (2), one of them the base and two of them experts, are merged in a process of its own,
once with the base's weights and once with the average of the experts' outside of the MLPs. Of that process's memory the
kernel's own count is read every 10 ms: all that it holds, the pages of files that are mapped included, and what is its
own. The growth is against what it held right before, after a small build had loaded all libraries. Exits with 1 where
it is more than MAX_HELD_MB.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests import ROOT

MAX_HELD_MB = 256
"""Whatever the size of the models."""

TOKENIZER_DIR = ROOT / "data/tiny/qwen2-vl"
TOKENIZER_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def main() -> None:
    total_gb = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    experts = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        for folder, wanted_bytes in (("small", 10e6), ("large", total_gb * 1e9)):
            make_models(Path(scratch) / folder, wanted_bytes, experts)
        command = [sys.executable, "-m", "tests.benchmarks.build_memory", "--measure", scratch]
        measured = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    print(json.dumps(measured))
    if measured["held_mb"] > MAX_HELD_MB:
        sys.exit(f"a build holds more than {MAX_HELD_MB} MB beside what the libraries do")


def make_models(folder: Path, wanted_bytes: float, experts: int) -> None:
    """A base and its experts, all of random bfloat16 weights, of `wanted_bytes` in all."""
    import torch

    from stages.kit.models.folders import geometry_config_path
    from stages.kit.models.load import load_config, meta_model, new_model

    config = load_config(geometry_config_path("qwen2.5-tiny").parent)
    config.hidden_size, config.intermediate_size = (256, 704) if wanted_bytes < 1e8 else (1024, 2816)
    # The embedding of a real model is its largest tensor.
    config.vocab_size = 4096 if wanted_bytes < 1e8 else 65536
    config.num_hidden_layers, config.layer_types = 1, None
    sizes = []
    for layers in (1, 2):
        config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        sizes.append(2 * sum(parameter.numel() for parameter in meta_model(config).parameters()))
    layers = max(1, round((wanted_bytes / (experts + 1) - 2 * sizes[0] + sizes[1]) / (sizes[1] - sizes[0])))
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    for number in range(experts + 1):
        model_dir = folder / ("base" if number == 0 else f"expert-{number}")
        torch.manual_seed(number)
        new_model(config, precision="bf16").save_pretrained(model_dir)
        for name in TOKENIZER_FILES:
            shutil.copyfile(TOKENIZER_DIR / name, model_dir / name)


def measure(scratch: Path) -> dict[str, object]:
    from stages.kit.mixture.build import merge_experts

    def build(models: Path) -> float:
        experts = {path.name: path for path in sorted(models.glob("expert-*"))}
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            merge_experts(models / "base", experts, Path(folder), top_k=2)
        return time.monotonic() - started

    build(scratch / "small")
    watch = Watch()
    seconds = build(scratch / "large")
    held, own = watch.growth()
    inputs = sum(path.stat().st_size for path in (scratch / "large").rglob("*.safetensors"))
    return {
        "inputs_gb": round(inputs / 1e9, 2),
        "seconds": round(seconds, 1),
        "held_mb": round(held / 1e6, 1),
        "own_mb": round(own / 1e6, 1),
    }


class Watch(threading.Thread):
    """The highest that this process's memory grows to, from when it is made."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = memory()
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            self.peak = tuple(map(max, self.peak, memory()))  # type: ignore[assignment]

    def growth(self) -> tuple[int, int]:
        """(all that is held, what is not a file's) in bytes."""
        self.ended.set()
        self.join()
        return self.peak[0] - self.before[0], self.peak[1] - self.before[1]


def memory() -> tuple[int, int]:
    """(all that this process holds, what is not a file's) in bytes."""
    found = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(found["VmRSS"].split()[0]) * 1024, int(found["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
    else:
        main()
