"""Load models from folders, on the devices that a plan names: safetensors only, no remote code, never offloaded.

A model lies on one device, or its layers are spread over GPUs (placement balanced), or each of several processes holds
a share of every weight (placement sharded, torch's FSDP2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
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

from stages.core.errors import UserError, join_truncated
from stages.core.params.schema import DeviceParams
from stages.internals.transformers_internals import layer_classes, mark_distributed
from stages.models.folders import read_config
from stages.models.kernels import EXPERTS, PACKED, replace_modules

if TYPE_CHECKING:
    from stages.planning.plan import Plan

NF4_BLOCK = 64
"""Weights with a scale of their own."""
NO_MODEL = "{} is no model that can be loaded"

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_model(
    folder: Path,
    *,
    device: DeviceParams,
    precision: str,
    quantization: str = "none",
    attn: str = "sdpa",
    padding_free: bool = False,
    placement: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A model from a Hugging Face folder, on the device of this process.

    precision: of the weights. padding_free: whether its inputs are several samples in a row. placement: options
    of `from_pretrained` for other devices than that one; the start of a training checks where its weights are.
    Raises UserError if a layer would land on a CPU or a disk beside a GPU, or a CPU would read it wrongly in 4 bits.
    """
    check_device(device, precision)
    config, attn = load_config(folder), resolve_attention(attn, device, precision, padding_free=padding_free)
    options = dict({"device_map": {"": local_device(device)}} if placement is None else placement)
    if quantization == "nf4":
        options["quantization_config"] = nf4_config(DTYPES[precision])
    model, loaded = auto_class(config).from_pretrained(
        folder,
        output_loading_info=True,
        config=config,
        dtype=DTYPES[precision],
        **implementations(attn),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        **options,
    )
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(
            f"{folder} lacks {len(missing)} weights of {type(model).__name__}, among them {', '.join(missing[:3])}"
        )
    replace_modules(model, attn)
    for module in model.modules():
        # bitsandbytes repacks 4-bit weights for evaluation on such a CPU, and rounds otherwise from then on.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    require_readable(model, device)
    if placement is None:
        check_placement(model, device)
    return model


def require_readable(model: torch.nn.Module, device: DeviceParams) -> None:
    """Raises UserError if a CPU would dequantize 4-bit weights wrongly: in rows of a multiple of 16 that is none of
    NF4_BLOCK, bitsandbytes 0.50.2 takes the scales of other blocks (with AVX-512; a test tries the widths)."""
    in_4_bits: Iterator[Any] = (each for each in model.modules() if hasattr(each, "support_avx512bf16_for_cpu"))
    inputs = {module.in_features for module in in_4_bits}
    wrong = sorted(number for number in inputs if number % 16 == 0 and number % NF4_BLOCK)
    if wrong and device.kind == "cpu":
        raise UserError(
            f"the model has layers with {', '.join(map(str, wrong))} inputs, and on a CPU bitsandbytes 0.50.2 reads "
            f"their 4-bit weights wrongly, as with any multiple of 16 that is none of {NF4_BLOCK}; set quantization: "
            "none (int8 for an export), or take a profile with a GPU"
        )


def load_base(plan: Plan) -> PreTrainedModel:
    """The base of a recipe, placed as planned; on the CPU if it is still to be sharded (`shard`)."""
    placement: Mapping[str, Any] | None = {"device_map": {"": "cpu"}} if plan.is_sharded else None
    if plan.memory.placement == "balanced":
        # Whole layers, about as many bytes on each GPU; weights that are tied stay together. With room for any amount
        # on each, this does not depend on a GPU's free memory, and nothing moves to a CPU.
        placement = {"device_map": "balanced", "max_memory": dict.fromkeys(range(plan.device.count), 1 << 60)}
    return load_model(
        Path(plan.base_dir),
        device=plan.device,
        precision=plan.memory.precision,
        quantization=plan.quantization,
        attn=plan.memory.attn,
        padding_free=plan.padding_free,
        placement=placement,
    )


def nf4_config(dtype: torch.dtype, *, double_quantization: bool = True) -> BitsAndBytesConfig:
    """Weights in 4 bits. dtype: of the arithmetic. double_quantization: store their scales in 8 bits, rounded."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )


def new_model(config: PreTrainedConfig, *, precision: str, attn: str = "sdpa") -> PreTrainedModel:
    """A model with freshly initialized weights, which computes as a loaded one does."""
    model = auto_class(config).from_config(config, dtype=DTYPES[precision], **implementations(attn))
    return replace_modules(model, attn)


def implementations(attn: str) -> dict[str, Any]:
    """transformers' names of attention and experts. None: SDPA, or eager in each part that has no SDPA."""
    return {"attn_implementation": None if attn == "sdpa" else attn, "experts_implementation": EXPERTS}


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model's real geometry without its weights, for counting and planning."""
    with torch.device("meta"), library_errors(NO_MODEL.format(config.name_or_path or "config.json")):
        return auto_class(config).from_config(config)


def load_config(folder: Path) -> PreTrainedConfig:
    """Raises UserError unless the folder holds the configuration of a model."""
    read_config(folder)
    with library_errors(NO_MODEL.format(folder)):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Raises UserError, with the problem and the reason, for any error of the libraries in the block.

    Libraries raise arbitrary exceptions: tokenizers a bare Exception, a chat template whatever its code raises.
    """
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:  # noqa: BLE001
        raise UserError(f"{problem}: {' '.join(str(error)[:1_000].split()) or type(error).__name__}") from None


def auto_class(config: PreTrainedConfig) -> type[AutoModelForImageTextToText | AutoModelForCausalLM]:
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def resolve_attention(attn: str, device: DeviceParams, precision: str, *, padding_free: bool = False) -> str:
    """`auto` is SDPA, or `packed_attention` with several samples in a row: torch has flash-attn's kernels too, and
    transformers calls flash-attn's own with less preparation in no case. Raises UserError if flash-attn is asked for
    and cannot run.
    """
    if attn == "flash_attention_2":
        runs = device.kind == "cuda" and precision != "fp32" and is_flash_attn_2_available()
        if not runs or torch.cuda.get_device_capability() < (8, 0):  # flash-attn's README, "NVIDIA CUDA Support"
            raise UserError(
                "memory.attn is flash_attention_2, which needs flash-attn installed, an Ampere GPU or newer, and "
                f"precision fp16 or bf16 (here {precision}); use auto or sdpa"
            )
    sdpa = PACKED if padding_free else "sdpa"
    return sdpa if attn in ("auto", "sdpa") else attn


def limit_visible_gpus(device: DeviceParams) -> None:
    """Hide all GPUs but the first `device.count` of those that may be used; before CUDA starts.

    transformers' Trainer would split batches over every GPU that it sees, and device_map spread layers over them.
    """
    if device.kind == "cuda":
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(allowed.split(",")[: device.count])


def local_device(device: DeviceParams) -> torch.device:
    """The device of this process: cpu, or the GPU that its local rank names."""
    if device.kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.distributed.get_node_local_rank(fallback_rank=0))


def gpus_in_use(device: DeviceParams, placement: str = "single") -> Sequence[int]:
    """The GPUs that this process puts tensors on; none on a CPU.

    Raises UserError if there are fewer GPUs than the profile wants.
    """
    check_device(device)
    if device.kind == "cpu":
        return ()
    return range(device.count) if placement == "balanced" else (local_device(device).index,)


def check_device(device: DeviceParams, precision: str = "fp32") -> None:
    """Raises UserError if there are fewer GPUs than the profile wants, or they do not compute in its precision."""
    if device.kind == "cpu":
        return
    if torch.cuda.device_count() < device.count:
        raise UserError(
            f"the profile wants {device.count} CUDA device(s), but {torch.cuda.device_count()} can be seen; "
            "choose another with: dvc exp run -S profile=tiny"
        )
    # torch counts emulated bf16 as support by default; a Turing card would crawl.
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16; set memory.precision of the profile to fp16")


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
            f"offloaded away from {wanted}: {join_truncated(misplaced, 3)}; free its memory, or use a profile that fits"
        )


def shard(model: PreTrainedModel | PeftModel, plan: Plan, mesh: DeviceMesh) -> None:
    """Leave this process its share of the model's weights, on its device, layer by layer.

    A layer's weights are gathered when it is due, forward and backward, and its gradients summed and shared out.
    Every process calls this with the same weights, on a CPU so that a device never holds them all. They stay in fp32
    where they are trained, are gathered in the plan's precision, and their gradients summed in fp32. The embeddings are
    a group of their own, freed after use like a layer. The head goes with the last norm, as TRL's loss takes its weight
    without calling it, and stays gathered from there to the end of backward; so do weights outside of all layers.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    policy = MixedPrecisionPolicy(
        param_dtype=None if plan.memory.precision == "fp32" else DTYPES[plan.memory.precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # autocast decides, as in a process on its own
    )
    layers = layer_classes(base)
    for module in base.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if embeddings.weight is not head.weight:  # tied, both stay with the rest
        fully_shard(embeddings, mesh=mesh, mp_policy=policy)
        norm = base.get_decoder().norm
        fully_shard([norm, head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(base, mesh=mesh, mp_policy=policy)
    mark_distributed(base)


def reshard(model: torch.nn.Module) -> None:
    """Leave this process its share alone, after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, gathered from all processes, which have to call this together.

    Its gradient is the processes' mean, like that of weights which FSDP gathers.
    """
    return tensor.full_tensor(grad_placements=[Partial("avg")]) if isinstance(tensor, DTensor) else tensor
