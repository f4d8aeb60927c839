"""Which environment variables reach a stage.

An allow-list: whatever else is set on the machine, secrets above all, stays outside, and two people who run
the same commit run it in the same environment.
"""

from collections.abc import Mapping

FETCHING_STAGES = frozenset({"base", "prepare"})
"""The stages that fetch models and data: they alone may get the network, and the hub's token."""

OF_THE_MACHINE = frozenset(
    {
        # LD_LIBRARY_PATH: where some clusters keep the CUDA driver.
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
        # Where downloaded models and data, and compiled kernels lie.
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    }
)
"""Passed to processes on it, and without meaning in a container."""

PASSED = frozenset(
    {
        # Terminal, language, clock.
        *("TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE"),
        # What DVC tells its stages. By name, because DVC_STUDIO_TOKEN is a secret.
        *("DVC_ROOT", "DVC_STAGE", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV", "DVC_IGNORE_ISATTY"),
    }
)

PASSED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "NVIDIA_", "NCCL_", "PYTORCH_")
"""Threads and devices. None of these families holds a secret."""

PASSED_TO_FETCHING = frozenset(
    {
        *("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"),
        # A fetching stage may be told to stay offline too, as `make demo` does.
        *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        # The way out, which can hold a password.
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)

TRACKING_STAGES = frozenset({"train"})
TRACKING_PREFIX = "WANDB_"

SET = {
    # Bit-for-bit repeatable runs: string hashes, cuBLAS workspaces, the backward of flash-attn.
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # Tokenizer threads deadlock, loudly, in forked data-loader workers.
    "TOKENIZERS_PARALLELISM": "false",
    # Only the locked packages: none from ~/.local.
    "PYTHONNOUSERSITE": "1",
    # A line is seen when it is written, also through DVC's pipes.
    "PYTHONUNBUFFERED": "1",
    # Threads that wait give their core away: where another process wants it, spinning makes a step ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "MPLBACKEND": "Agg",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""The same for every stage, whatever the caller's environment says."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


NO_TERMINAL = {"TQDM_DISABLE": "1"}
"""Libraries draw their progress bars on a terminal only; the stages write lines elsewhere."""


NOT_IN_CONTAINERS = frozenset(
    {
        # They are of the families above. A container has just the GPUs that it was given, under new numbers.
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH"),
        # No use without a network.
        "WANDB_API_KEY",
    }
)

TMP_DIR = "/tmp"  # noqa: S108 - in a container it is the container's own

CONTAINER = {
    # The caller's number has no name and no home inside.
    "HOME": TMP_DIR,
    "USER": "bakeoff",
    "LOGNAME": "bakeoff",
    # Processes that train together meet on the only interface there is without a network.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""What a stage finds in a container in place of the machine's."""


def stage_environment(stage: str, caller: Mapping[str, str], *, terminal: bool) -> dict[str, str]:
    """The whole environment of a stage on the machine itself, from that of whoever calls it.

    terminal: whether a person watches the stage's output on one.
    """
    return _environment(stage, caller, PASSED | OF_THE_MACHINE, terminal)


def container_environment(stage: str, caller: Mapping[str, str], *, terminal: bool) -> dict[str, str]:
    """The same in a container, beside what its image sets."""
    of_the_container = _environment(stage, caller, PASSED, terminal) | CONTAINER
    return {name: value for name, value in of_the_container.items() if name not in NOT_IN_CONTAINERS}


def _environment(stage: str, caller: Mapping[str, str], names: frozenset[str], terminal: bool) -> dict[str, str]:
    fetching = stage in FETCHING_STAGES
    passed = names | PASSED_TO_FETCHING if fetching else names
    prefixes = PASSED_PREFIXES + ((TRACKING_PREFIX,) if stage in TRACKING_STAGES else ())
    environment = {name: value for name, value in caller.items() if name in passed or name.startswith(prefixes)}
    return environment | SET | ({} if terminal else NO_TERMINAL) | ({} if fetching else OFFLINE)
