"""The processor, and the instructions that a stage computes by: both decide in which order numbers are added up."""

import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2,STRICT",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",
}
"""Environment by which torch, oneDNN, MKL and NumPy compute by AVX2 and nothing newer, as every x86-64 CPU since about
2015 has it.

STRICT: the same sums by any number of threads (oneMKL Developer Guide, "Reproducibility Conditions"). MKL reads its
variable on Intel CPUs alone, and has one set of kernels for all of AMD's: the two makers differ in their last bits.
By MKL_CBWR=COMPATIBLE, in about twice the time, their matrix products agree; its square roots still do not.
"""


def pinned_instructions(caller: Mapping[str, str]) -> dict[str, str]:
    """Environment that holds a stage to AVX2; nothing where the CPU has no AVX2, as Arm's.

    A caller's MKL_CBWR stays.
    """
    return {**AVX2, "MKL_CBWR": caller.get("MKL_CBWR", AVX2["MKL_CBWR"])} if {"avx2", "fma"} <= _flags() else {}


def instruction_set(environment: Mapping[str, str]) -> str:
    """The one that a process with this environment is held to, e.g. "avx2"; the kind of processor where it is not."""
    if any(environment.get(name) != value for name, value in AVX2.items() if name != "MKL_CBWR"):
        return platform.machine()
    return "avx2" if (mkl := environment.get("MKL_CBWR")) == AVX2["MKL_CBWR"] else f"avx2, MKL_CBWR={mkl}"


def arithmetic(environment: Mapping[str, str]) -> str:
    """Machines of which this is equal add numbers up alike: "AuthenticAMD avx2", or the CPU's model if not pinned."""
    instructions = instruction_set(environment)
    return f"{_cpuinfo('vendor_id')} {instructions}" if instructions.startswith("avx2") else cpu_model()


def cpu_model() -> str:
    """As its maker calls it; the kind of processor where nobody tells."""
    if CPUINFO.exists():
        return _cpuinfo("model name") or platform.machine()
    asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or platform.machine()


def _flags() -> set[str]:
    return set((_cpuinfo("flags") or "").split())


def _cpuinfo(key: str) -> str | None:
    """The value of a key of the first processor; Linux lists them all alike."""
    text = CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""
    found = re.search(rf"^{key}\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else None
