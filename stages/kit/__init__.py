import logging

# On import it misses a kernel for CPUs that nothing here calls; said to whoever imports peft or trl.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
