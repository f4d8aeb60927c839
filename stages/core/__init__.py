"""Modules for stages and tools that need no model. Importing any prepares the process before it loads torch."""

import atexit
import gc
import logging
import os
import sys

from stages.core.errors import excepthook

sys.excepthook = excepthook

# torch.compile compiles nothing here. bitsandbytes calls it when it is imported, for which torch loads all that it
# compiles with: a second. Triton's own kernels, as in TRL's loss, do not pass through it and run all the same.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Loading torch, transformers and trl makes a million objects, hardly one of them garbage. Looking through the newest
# every 700, as Python does unasked, takes a second or two.
gc.set_threshold(50_000, 10, 10)

# Python looks through them all again, several times, before it ends: a quarter of what a stage's start costs. Only the
# functions registered here before, and files that nobody closed and nothing but garbage knows, could tell.
atexit.register(gc.freeze)

# bitsandbytes warns at import that it misses the package `kernels`, with which it would fetch code from the hub, for an
# operation on CPUs with AVX-512 BF16 that nothing here calls (models/load.py). Its other warnings are shown.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward from kernels-community" not in record.getMessage()
)
