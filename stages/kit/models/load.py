"""Load models from folders: safetensors only, no remote code, and never silently offloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import is_flash_attn_2_available

from stages.core.errors import UserError, some
from stages.core.params.schema import DeviceParams
from stages.kit.models.folders import read_config
from stages.kit.models.modules import EXPERTS, replace_modules
from stages.kit.models.packed_attention import PACKED

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_model(
    folder: Path,
    *,
    device: DeviceParams,
    precision: str,
    quantization: str = "none",
    attn: str = "sdpa",
    padding_free: bool = False,
    placement: str = "single",
    gpus: Mapping[str, int] | None = None,
) -> PreTrainedModel:
    """A model from a Hugging Face folder, all of it on the device or devices that the profile names.

    precision: of the weights. padding_free: whether it gets several samples in a row. placement: single and ddp put it
    on one device, balanced spreads the layers over `gpus` (by module name), sharded leaves it on the CPU, to be shared
    out (placement.py has both).
    Raises UserError where a layer would land on a CPU or a disk beside a GPU.
    """
    assert (gpus is not None) == (placement == "balanced"), placement
    check_device(device, precision)
    where = torch.device("cpu") if placement == "sharded" else local_device(device)
    config = load_config(folder)
    options: dict[str, Any] = {"device_map": {"": where} if gpus is None else dict(gpus)}
    if quantization == "nf4":
        options["quantization_config"] = nf4_config(precision)
    model, loaded = auto_class(config).from_pretrained(
        folder,
        output_loading_info=True,
        config=config,
        dtype=DTYPES[precision],
        attn_implementation=resolve_attention(attn, device, precision, padding_free=padding_free),
        experts_implementation=EXPERTS,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        **options,
    )
    if missing := sorted(loaded["missing_keys"]):
        shown = ", ".join(missing[:3])
        raise UserError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, among them {shown}")
    replace_modules(model)
    for module in model.modules():
        # bitsandbytes repacks 4-bit weights for evaluation on such a CPU, and rounds otherwise from then on.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if placement != "sharded":
        check_placement(model, device)
    return model


def nf4_config(precision: str) -> BitsAndBytesConfig:
    """Frozen weights in 4 bits with double quantization. precision: of the arithmetic."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[precision],
    )


def new_model(config: PreTrainedConfig, *, precision: str, attn: str = "sdpa") -> PreTrainedModel:
    """A model with its weights just initialised, which computes as a loaded one does."""
    model = auto_class(config).from_config(
        config, dtype=DTYPES[precision], attn_implementation=attn, experts_implementation=EXPERTS
    )
    return replace_modules(model)


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model's real geometry without its weights, for counting and planning."""
    with torch.device("meta"), read_from(config.name_or_path or "config.json"):
        return auto_class(config).from_config(config)


def load_config(folder: Path) -> PreTrainedConfig:
    """Raises UserError where the folder holds no model's configuration."""
    read_config(folder)
    with read_from(folder):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def read_from(folder: Path | str) -> Iterator[None]:
    """Raises UserError where the libraries cannot read the folder's files."""
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:  # noqa: BLE001, the libraries raise what comes: bare Exception (tokenizers), ValueError, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{folder} is no model that can be loaded: {reason}") from None


def auto_class(config: PreTrainedConfig) -> type[AutoModelForImageTextToText | AutoModelForCausalLM]:
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def resolve_attention(attn: str, device: DeviceParams, precision: str, *, padding_free: bool = False) -> str:
    """`auto` is flash attention where it runs, else SDPA. Raises UserError where it is asked for and does not run.

    Of several samples in a row, flash-attn's own package and eager attention go by the positions themselves
    (transformers); in SDPA's place there is packed_attention.
    """
    runs = device.kind == "cuda" and precision != "fp32" and is_flash_attn_2_available()
    runs = runs and torch.cuda.get_device_capability() >= (8, 0)  # flash-attn's README, "NVIDIA CUDA Support"
    if attn == "auto":
        attn = "flash_attention_2" if runs else "sdpa"
    if attn == "flash_attention_2" and not runs:
        raise UserError(
            "memory.attn is flash_attention_2, which needs flash-attn installed, an Ampere GPU or newer, and "
            f"precision fp16 or bf16 (here {precision}); use auto or sdpa"
        )
    return PACKED if padding_free and attn == "sdpa" else attn


def see_only(device: DeviceParams) -> None:
    """Hide all GPUs but the first `device.count` of those that may be used; before CUDA starts.

    transformers' Trainer would split batches over every GPU that it sees, and device_map spread layers over them.
    """
    if device.kind == "cuda":
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(allowed.split(",")[: device.count])


def expand_segments() -> None:
    """Let torch's allocator map a GPU's memory page by page; before it allocates (PYTORCH_ALLOC_CONF does the same)."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # noqa: SLF001


def local_device(device: DeviceParams) -> torch.device:
    """The device of this process: cpu, or the GPU that its local rank names."""
    if device.kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.distributed.get_node_local_rank(fallback_rank=0))


def gpus_in_use(device: DeviceParams, placement: str = "single") -> Sequence[int]:
    """The GPUs that this process puts tensors on; none on a CPU.

    Raises UserError if there are fewer GPUs than the profile wants.
    """
    check_count(device)
    if device.kind == "cpu":
        return ()
    return range(device.count) if placement == "balanced" else (local_device(device).index,)


def check_device(device: DeviceParams, precision: str) -> None:
    check_count(device)
    # torch counts emulated bf16 as support unless told not to; a Turing card would crawl.
    if device.kind == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16; set memory.precision to fp16")


def check_count(device: DeviceParams) -> None:
    """Raises UserError where there are fewer GPUs than the profile wants."""
    if device.kind == "cuda" and torch.cuda.device_count() < device.count:
        raise UserError(
            f"the profile wants {device.count} CUDA device(s), but {torch.cuda.device_count()} can be seen; "
            "choose another with: dvc exp run -S profile=tiny"
        )


def check_placement(model: torch.nn.Module, device: DeviceParams) -> None:
    """Every weight on the kind of device that the profile names: none on meta, a disk, or a CPU beside a GPU."""
    wanted, misplaced = device.kind, []
    if wanted == "cuda":
        where = getattr(model, "hf_device_map", {}).items()
        misplaced = [f"{name or 'the model'} on {place}" for name, place in where if str(place) in ("cpu", "disk")]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    misplaced += [f"{name} on {tensor.device}" for name, tensor in tensors if tensor.device.type != wanted]
    if misplaced:
        raise UserError(
            f"offloaded away from {wanted}: {some(misplaced, 3)}; free its memory, or choose a profile that fits"
        )
