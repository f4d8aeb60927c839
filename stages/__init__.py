"""The pipeline's stages, one file each, and what they are built of."""

import logging

# When it is imported, by peft and trl, it misses a kernel for CPUs that nothing here calls.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
