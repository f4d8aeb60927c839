"""Which environment variables reach a stage.

An allow-list: whatever else is set on the machine, secrets above all, stays outside, and two people who run
the same commit run it in the same environment.
"""

from collections.abc import Mapping

from stages.kit.containers.stage_run import FETCHING_STAGES

PASSED = frozenset(
    {
        # The machine and the person at it. LD_LIBRARY_PATH: where some clusters keep the CUDA driver.
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
        # Terminal and language.
        *("TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE"),
        # What DVC tells its stages. By name, because DVC_STUDIO_TOKEN is a secret.
        *("DVC_ROOT", "DVC_STAGE", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV", "DVC_IGNORE_ISATTY"),
        # Where downloaded models and data lie.
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
        # Where compiled kernels lie.
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
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


def stage_environment(stage: str, caller: Mapping[str, str], *, terminal: bool) -> dict[str, str]:
    """The whole environment of a stage, from that of whoever calls it.

    terminal: whether a person watches the stage's output on one.
    """
    fetching = stage in FETCHING_STAGES
    passed = PASSED | PASSED_TO_FETCHING if fetching else PASSED
    prefixes = PASSED_PREFIXES + ((TRACKING_PREFIX,) if stage in TRACKING_STAGES else ())
    environment = {name: value for name, value in caller.items() if name in passed or name.startswith(prefixes)}
    return environment | SET | ({} if terminal else NO_TERMINAL) | ({} if fetching else OFFLINE)
