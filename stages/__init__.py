"""The pipeline's stages, one file each, and what they are built of.

What every process of theirs has to know before it loads torch.
"""

import gc
import logging
import os

# Nothing here is compiled by torch: that takes a compiler, which images do not have. bitsandbytes asks for it when it
# is imported, and torch would load all that it compiles with: a second.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Loading torch, transformers and trl makes a million objects, hardly one of them garbage. Looking through the newest
# every 700, as Python does unasked, takes a second or two.
gc.set_threshold(50_000, 10, 10)

# When it is imported, by peft and trl, it misses a kernel for CPUs that nothing here calls.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
