"""The environment that reaches a stage, and the processor that it computes on.

Variables pass by an allow-list: secrets and whatever else is set on the machine stay outside, and two people who run
the same commit run it in the same environment. Instructions are pinned because they decide in which order numbers are
added up.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

OF_THE_MACHINE = frozenset(
    {
        # LD_LIBRARY_PATH: where some clusters keep the CUDA driver (`library_path`).
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
        # Downloaded models and data. Not TRITON_CACHE_DIR: the launcher names a folder for kernels that this set of
        # packages has compiled.
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
        # The C compiler, for Triton. An image has its own.
        "CC",
        # CUDA, and the GPUs that this caller may use. A container sees only those that it is given, renumbered.
        *("CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    }
)
"""Variables of the machine, for processes; they mean nothing in a container."""

DEVICES = frozenset(
    {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "NVIDIA_TF32_OVERRIDE"}
)
"""Listed by name, because NVIDIA_API_KEY is a secret."""

PASSED = DEVICES | frozenset(
    {
        # Terminal, language, clock.
        *("TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE"),
        # DVC's variables for stages, listed by name, because DVC_STUDIO_TOKEN is a secret.
        *("DVC_ROOT", "DVC_STAGE", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV", "DVC_IGNORE_ISATTY"),
    }
)

NUMERIC_PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "NCCL_", "PYTORCH_")
"""Threads and kernels. None of these families holds a secret."""

ARITHMETIC_PREFIXES = (
    *NUMERIC_PREFIXES,
    *("CUBLAS_", "NVIDIA_TF32_", "FLASH_ATTENTION_", "ATEN_", "DNNL_", "NPY_"),
)
"""Variables that make libraries choose other kernels, those that the launcher sets included."""

PASSED_PREFIXES = ("LC_", "GLOO_", *NUMERIC_PREFIXES)

PROXIES = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    }
)
"""Proxies: their URLs can hold a password."""

CERTIFICATES = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"})
"""Trusted TLS certificates."""

PASSED_WITH_NETWORK = (
    PROXIES
    | CERTIFICATES
    | frozenset(
        {
            *("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
            # A caller may forbid the network, as `make demo` does.
            *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        }
    )
)

SET = {
    # Bit-for-bit repeatable runs: string hashes, cuBLAS workspaces, the backward of flash-attn.
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # NCCL would try in each process whether the kernel shares host memory by cuMem; two processes that find different
    # answers fail (NVIDIA/nccl#2190).
    "NCCL_CUMEM_HOST_ENABLE": "0",
    # Tokenizer threads deadlock, loudly, in forked data-loader workers.
    "TOKENIZERS_PARALLELISM": "false",
    # Only the locked packages: none from ~/.local.
    "PYTHONNOUSERSITE": "1",
    # Lines appear when they are written, also through DVC's pipes.
    "PYTHONUNBUFFERED": "1",
    # Waiting threads yield their core: if another process wants it, spinning makes a step ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # torch's profiler logs that it starts and ends, and which allocations it has not seen.
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "MPLBACKEND": "Agg",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it takes no other value of DO_NOT_TRACK than "true"
}
"""Variables of every stage, whatever the caller has set."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


NO_TERMINAL = {"TQDM_DISABLE": "1"}
"""Libraries draw their progress bars on a terminal only; the stages write lines elsewhere."""


TMP_DIR = "/tmp"  # noqa: S108 - in a container it is the container's own

CONTAINER = {
    # The caller's user id has no name and no home inside.
    "HOME": TMP_DIR,
    "USER": "bakeoff",
    "LOGNAME": "bakeoff",
}
"""Variables of a container in place of the machine's."""

ON_ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Processes that train together in a container without a network meet on its only interface."""


def stage_environment(
    stage: str, caller: Mapping[str, str], *, network: bool, terminal: bool, native: bool = False
) -> dict[str, str]:
    """The whole environment of a stage that runs as a process.

    caller: the environment of whoever starts it. network: whether the stage may use it. terminal: whether a person
    watches its output on one. native: whether it may use all instructions of this CPU.
    """
    passed = _passed(stage, caller, PASSED | OF_THE_MACHINE, network=network)
    if "LD_LIBRARY_PATH" in passed:
        passed["LD_LIBRARY_PATH"] = library_path(passed["LD_LIBRARY_PATH"])
    return passed | _given(caller, network=network, terminal=terminal, native=native)


def library_path(folders: str) -> str:
    """LD_LIBRARY_PATH without the folders that hold a cuDNN, cuBLAS or NCCL: the loader would take those, and not the
    locked ones, which it finds by torch's own RUNPATH.
    """
    shadowing = ("libcudnn*.so*", "libcublas*.so*", "libnccl*.so*")
    return ":".join(
        folder for folder in folders.split(":") if not any(next(Path(folder).glob(name), None) for name in shadowing)
    )


def container_environment(
    stage: str, caller: Mapping[str, str], *, network: bool, terminal: bool, native: bool = False, num_nodes: int = 1
) -> tuple[list[str], dict[str, str]]:
    """(names of the caller's variables that a container gets, the variables that it is given)."""
    passed = _passed(stage, caller, PASSED, network=network)
    passed.pop("WANDB_API_KEY", None)  # of no use without a network
    # docker passes the proxies of its own configuration, password included, unless they are set.
    proxies = {} if network else dict.fromkeys(sorted(PROXIES), "")
    meeting = ON_ONE_NODE if num_nodes == 1 else {}
    given = _given(caller, network=network, terminal=terminal, native=native) | CONTAINER | meeting | proxies
    return sorted(passed.keys() - given.keys()), given


def numeric_settings(caller: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables that reach a stage and may change the order of additions."""
    return {
        name: value
        for name, value in sorted(caller.items())
        if (name in DEVICES or name.startswith(NUMERIC_PREFIXES)) and name not in SET
    }


def _passed(stage: str, caller: Mapping[str, str], names: frozenset[str], *, network: bool) -> dict[str, str]:
    names |= PASSED_WITH_NETWORK if network else frozenset()
    prefixes = (*PASSED_PREFIXES, *(("WANDB_",) if stage == "train" else ()))
    return {name: value for name, value in caller.items() if name in names or name.startswith(prefixes)}


def _given(caller: Mapping[str, str], *, network: bool, terminal: bool, native: bool) -> dict[str, str]:
    instructions = pinned_instructions(caller, native=native)
    return SET | instructions | ({} if terminal else NO_TERMINAL) | ({} if network else OFFLINE)


AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2,STRICT",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4",
}
"""Variables that hold torch, oneDNN, MKL and NumPy to AVX2, which every x86-64 CPU since about 2015 has.

STRICT: the same sums with any number of threads (oneMKL Developer Guide, "Reproducibility Conditions"). MKL reads its
variable on Intel CPUs alone, and has one set of kernels for all of AMD's: the two makers differ in their last bits.
With MKL_CBWR=COMPATIBLE their matrix products agree, in about twice the time; MKL's square roots still do not.
"""

CPUINFO = Path("/proc/cpuinfo")


def pinned_instructions(caller: Mapping[str, str], *, native: bool = False) -> dict[str, str]:
    """Variables that hold a stage to AVX2; none if the CPU has no AVX2, as Arm's. A caller's MKL_CBWR stays.

    native: hold it to nothing; MKL then takes what this CPU has, in a form that is the same from run to run.
    """
    if native:
        return {"MKL_CBWR": caller.get("MKL_CBWR", "AUTO")}
    has_avx2 = {"avx2", "fma"} <= set((_cpuinfo("flags") or "").split())
    return {**AVX2, "MKL_CBWR": caller.get("MKL_CBWR", AVX2["MKL_CBWR"])} if has_avx2 else {}


def instruction_set(environment: Mapping[str, str]) -> str:
    """The instructions that a process with this environment is held to, e.g. "avx2"; else the kind of processor."""
    if any(environment.get(name) != value for name, value in AVX2.items() if name != "MKL_CBWR"):
        return platform.machine()
    return "avx2" if (mkl := environment.get("MKL_CBWR")) == AVX2["MKL_CBWR"] else f"avx2, MKL_CBWR={mkl}"


def arithmetic(environment: Mapping[str, str]) -> str:
    """Equal on machines that add numbers up alike: "AuthenticAMD avx2", or the CPU's model if nothing is pinned."""
    instructions = instruction_set(environment)
    return f"{_cpuinfo('vendor_id')} {instructions}" if instructions.startswith("avx2") else cpu_model()


def cpu_model() -> str:
    """The maker's name of the CPU, or the kind of processor if the system does not report it."""
    return _cpuinfo("model name") or platform.machine()


def _cpuinfo(key: str) -> str | None:
    """The value of a key of the first processor; Linux lists all of them alike."""
    text = CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""
    match = re.search(rf"^{key}\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else None


def usable_cores() -> int:
    """Cores that this process may use, as torch counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_packages(search_path: Sequence[str]) -> dict[str, str]:
    """Version by normalized name; if a package is installed twice, the version that is imported.

    From the names of their `NAME-VERSION.dist-info` (packaging.python.org, Recording installed projects).
    """
    packages: dict[str, str] = {}
    for folder in search_path:
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return dict(sorted(packages.items()))
