"""Which environment variables reach a stage.

An allow-list: whatever else is set on the machine, secrets above all, stays outside, and two people who run
the same commit run it in the same environment.
"""

from collections.abc import Mapping

from stages.core.cpu import pinned_instructions

OF_THE_MACHINE = frozenset(
    {
        # LD_LIBRARY_PATH: where some clusters keep the CUDA driver.
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
        # Where downloaded models and data lie. Not TRITON_CACHE_DIR: what another set of packages has compiled may be
        # there, so the launcher names a folder for this one.
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
        # The C compiler, for Triton. An image has its own.
        "CC",
        # CUDA, and which GPUs this caller may use. A container has just those that it was given, under new numbers.
        *("CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    }
)
"""Passed to processes on it, and without meaning in a container."""

DEVICES = frozenset(
    {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "NVIDIA_TF32_OVERRIDE"}
)
"""By name, because NVIDIA_API_KEY is a secret."""

PASSED = DEVICES | frozenset(
    {
        # Terminal, language, clock.
        *("TZ", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE"),
        # What DVC tells its stages. By name, because DVC_STUDIO_TOKEN is a secret.
        *("DVC_ROOT", "DVC_STAGE", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV", "DVC_IGNORE_ISATTY"),
    }
)

NUMERIC_PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "NCCL_", "PYTORCH_")
"""Threads and kernels. None of these families holds a secret."""

PASSED_PREFIXES = ("LC_", "GLOO_", *NUMERIC_PREFIXES)

PROXIES = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    }
)
"""The way out, which can hold a password."""

CERTIFICATES = frozenset({"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"})
"""Where the certificates of whoever may be spoken to lie."""

PASSED_WITH_NETWORK = (
    PROXIES
    | CERTIFICATES
    | frozenset(
        {
            *("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
            # It may be told to stay offline, as by `make demo`.
            *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
        }
    )
)

OF_THE_NODE = frozenset({"TMPDIR", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"})
"""Variables that a batch system sets on the node where a job runs."""

PASSED_TO_JOB = frozenset(
    {
        *("BAKEOFF_ENGINE", "BAKEOFF_PINS", "DOCKER_HOST", "CONTAINER_HOST", "VIRTUAL_ENV", "SLURM_CONF"),
        *("APPTAINER_CACHEDIR", "APPTAINER_CONFIGDIR", "APPTAINER_TMPDIR"),
        # A person's own defaults, for sbatch itself.
        *("SBATCH_ACCOUNT", "SBATCH_CONSTRAINT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"),
        *("SBATCH_CLUSTERS", "SLURM_CLUSTERS"),
    }
)
"""Variables that sbatch, and the launcher in the job, read beside those that a stage may get."""

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
    # torch's profiler says that it starts and ends, and that it did not see what was there before being made.
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "MPLBACKEND": "Agg",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""The same for every stage, whatever the caller's environment says."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


NO_TERMINAL = {"TQDM_DISABLE": "1"}
"""Libraries draw their progress bars on a terminal only; the stages write lines elsewhere."""


TMP_DIR = "/tmp"  # noqa: S108 - in a container it is the container's own

CONTAINER = {
    # The caller's number has no name and no home inside.
    "HOME": TMP_DIR,
    "USER": "bakeoff",
    "LOGNAME": "bakeoff",
}
"""What a stage finds in a container in place of the machine's."""

ON_ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Processes that train together in a container meet on the only interface there is without a network."""


def stage_environment(stage: str, caller: Mapping[str, str], *, network: bool, terminal: bool) -> dict[str, str]:
    """The whole environment of a stage on the machine itself, from that of whoever calls it.

    network: whether it fetches something. terminal: whether a person watches its output on one.
    """
    passed = _passed(stage, caller, PASSED | OF_THE_MACHINE, network=network)
    return passed | _given(caller, network=network, terminal=terminal)


def container_environment(
    stage: str, caller: Mapping[str, str], *, network: bool, terminal: bool, num_nodes: int = 1
) -> tuple[list[str], dict[str, str]]:
    """The same in a container, beside what its image sets: the caller's variables that it gets, and given ones."""
    passed = _passed(stage, caller, PASSED, network=network)
    passed.pop("WANDB_API_KEY", None)  # of no use without a network
    # docker passes the proxies of its own configuration, password included, unless told otherwise.
    proxies = {} if network else dict.fromkeys(sorted(PROXIES), "")
    meeting = ON_ONE_NODE if num_nodes == 1 else {}
    given = _given(caller, network=network, terminal=terminal) | CONTAINER | meeting | proxies
    return sorted(passed.keys() - given.keys()), given


def job_environment(stage: str, caller: Mapping[str, str], *, network: bool) -> dict[str, str]:
    """The environment of a launcher that runs in a job, from that of whoever submits it."""
    passed = _passed(stage, caller, PASSED | OF_THE_MACHINE | PASSED_TO_JOB, network=network)
    return {name: value for name, value in passed.items() if name not in OF_THE_NODE}


def numeric_settings(caller: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables that reach a stage and may change how numbers are added up."""
    return {
        name: value
        for name, value in sorted(caller.items())
        if (name in DEVICES or name.startswith(NUMERIC_PREFIXES)) and name not in SET
    }


def _passed(stage: str, caller: Mapping[str, str], names: frozenset[str], *, network: bool) -> dict[str, str]:
    names |= PASSED_WITH_NETWORK if network else frozenset()
    prefixes = PASSED_PREFIXES + ((TRACKING_PREFIX,) if stage in TRACKING_STAGES else ())
    return {name: value for name, value in caller.items() if name in names or name.startswith(prefixes)}


def _given(caller: Mapping[str, str], *, network: bool, terminal: bool) -> dict[str, str]:
    return SET | pinned_instructions(caller) | ({} if terminal else NO_TERMINAL) | ({} if network else OFFLINE)
