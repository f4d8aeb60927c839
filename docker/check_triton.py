"""Fails where Triton cannot compile and load the code that launches its kernels. Runs in the build of the `cuda` image.

A build has no GPU, and so no NVIDIA driver: the driver's library, which that code calls, is a stand-in here.
"""

import ctypes
import os
import re
import subprocess
import tempfile
from pathlib import Path

from triton import knobs
from triton.backends.nvidia import driver

LIBRARY = "libcuda.so.1"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = f"{folder}/cache"
        knobs.nvidia.libcuda_path = folder
        # Once it is loaded, whatever asks for a library of that name gets it.
        ctypes.CDLL(make_driver_library(Path(folder)))
        driver.CudaUtils()
        (compiled,) = Path(folder, "cache").rglob("*.so")
        print(f"Triton compiled and loaded {compiled.name}")


def make_driver_library(folder: Path) -> str:
    """The path of a libcuda.so.1 with every function that Triton calls; each answers 100, "no CUDA device"."""
    calls = Path(driver.__file__).with_name("driver.c").read_text(encoding="utf-8")
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", calls)))
    source, library = folder / "libcuda.c", folder / LIBRARY
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", library, source], check=True)
    return str(library)


if __name__ == "__main__":
    main()
