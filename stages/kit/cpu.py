"""The processor, of which the model decides in which order numbers are added up."""

import platform
import re
import subprocess
from pathlib import Path


def cpu_model() -> str:
    """As its maker calls it; the kind of processor where nobody tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        return found[1] if found else platform.machine()
    asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or platform.machine()
