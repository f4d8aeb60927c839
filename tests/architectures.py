"""Tiny random models of architectures without an entry of families, and their way through all stages."""

from __future__ import annotations

import filecmp
import json
import shutil
import signal
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from click.testing import Result
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from stages.core.params.schema import DeviceParams
from stages.data.conversation import Conversation, message
from stages.evaluation.generate import Ending
from stages.models.certificate import MergeCertificate
from stages.models.load import auto_class, load_model
from stages.models.prompts import Processor, encode, end_tokens, load_processor, tokenizer_of
from stages.training.resume import SaveInTime
from tests.stage_runs import made, run, small_params, write_params
from tests.tiny import generator_of
from tests.tiny_families import tokenizer_for

TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
"""Sizes of a language model, of which an architecture takes those that it knows."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "topk_group": 1}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MAMBA = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
HEADS, WINDOW = {"head_dim": 16}, {"sliding_window": 8}
GEMMA_4 = {"global_head_dim": 16, "vocab_size_per_layer_input": 600, "hidden_size_per_layer_input": 16}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}


class Architecture(NamedTuple):
    name: str
    """Name in its makers' spelling."""
    sizes: Mapping[str, Any] = {}
    """Sizes of its language model beside TEXT's."""
    images: Mapping[str, Any] = {}
    """Settings beside the language model's, of a model with a vision tower."""
    refused: str = ""
    """Part of the message with which its plan is refused."""


ARCHITECTURES = {
    "cohere2": Architecture("Command R7B, Command A", {**WINDOW, "logit_scale": 0.25}),
    "deepseek_v3": Architecture(
        "DeepSeek-V3, R1; Kimi K2",
        {**LATENT, **ROUTED_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2},
    ),
    "ernie4_5": Architecture("ERNIE 4.5"),
    "exaone4": Architecture("EXAONE 4", {**WINDOW, "sliding_window_pattern": 2}),
    "falcon_h1": Architecture(
        "Falcon-H1",
        {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1, "lm_head_multiplier": 0.5},
    ),
    "gemma2": Architecture("Gemma 2", {**HEADS, **WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": Architecture(
        "Gemma 3 with images, on texts",
        {**HEADS, **WINDOW},
        {
            "vision_config": {**TOWER, "image_size": 56, "patch_size": 14},
            "image_token_index": 5,
            "boi_token_index": 6,
            "eoi_token_index": 7,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4_text": Architecture("Gemma 4, text", {**HEADS, **WINDOW, **GEMMA_4, "num_kv_shared_layers": 0}),
    "glm4": Architecture("GLM-4-0414", HEADS),
    "glm4_moe": Architecture("GLM-4.5, 4.6", {**HEADS, **ROUTED_EXPERTS, "n_group": 1, "first_k_dense_replace": 1}),
    "gpt2": Architecture("GPT-2", {"intermediate_size": None}),
    "gpt_neox": Architecture("Pythia, GPT-NeoX"),
    "gpt_oss": Architecture("gpt-oss", {**HEADS, **WINDOW, **LOCAL_EXPERTS}),
    "granite": Architecture("Granite 3", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "granitemoehybrid": Architecture(
        "Granite 4",
        {
            **LOCAL_EXPERTS,
            **MAMBA,
            "mamba_n_heads": 8,
            "shared_intermediate_size": 32,
            "logits_scaling": 4.0,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
        },
    ),
    "hunyuan_v1_dense": Architecture("Hunyuan, dense", HEADS),
    "lfm2": Architecture("LFM2", {**CONVOLUTIONS, "block_ff_dim": 96}),
    "lfm2_moe": Architecture("LFM2, mixture", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}),
    "mamba2": Architecture(
        "Mamba 2, Codestral Mamba",
        {**HEADS, "num_heads": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2},
    ),
    "minimax_m2": Architecture("MiniMax-M2", {**HEADS, **LOCAL_EXPERTS}),
    "mistral": Architecture("Mistral 7B, Nemo, Small", WINDOW),
    "mixtral": Architecture("Mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    "nemotron_h": Architecture(
        "Nemotron-H, Nemotron 3",
        {
            **HEADS,
            **ROUTED_EXPERTS,
            "num_hidden_layers": None,
            "n_groups": 2,
            "chunk_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 32,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        },
    ),
    "olmo3": Architecture("OLMo 3", WINDOW),
    "phi": Architecture("Phi-1.5, Phi-2"),
    "phimoe": Architecture("Phi-3.5-MoE", LOCAL_EXPERTS),
    "qwen3_5": Architecture(
        "Qwen3.5, on texts",
        {**HEADS, **DELTA_NET},
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
            },
            "image_token_id": 5,
            "video_token_id": 6,
            "vision_start_token_id": 7,
            "vision_end_token_id": 8,
        },
    ),
    "qwen3_5_text": Architecture("Qwen3.5, text", {**HEADS, **DELTA_NET}),
    "qwen3_moe": Architecture("Qwen3-MoE", {**HEADS, **EXPERTS}),
    "qwen3_next": Architecture("Qwen3-Next", {**HEADS, **DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "recurrent_gemma": Architecture("RecurrentGemma", {"lru_width": 64}, refused="TRL's loss of a recurrent_gemma is"),
    "seed_oss": Architecture("Seed-OSS", HEADS),
    "smollm3": Architecture("SmolLM3"),
    "starcoder2": Architecture("StarCoder2"),
}
"""Each by its model_type."""


def config_of(model_type: str) -> Any:
    """A configuration of some 0.2 million weights."""
    architecture, tokenizer = ARCHITECTURES[model_type], tokenizer_for("qwen2")
    plain = AutoConfig.for_model(model_type).get_text_config()
    known = {*vars(plain), *plain.attribute_map}
    sizes = {name: size for name, size in TEXT.items() if name in known} | dict(architecture.sizes)
    unset = {name for name, size in sizes.items() if size is None and name in TEXT}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = {name: size for name, size in sizes.items() if name not in unset} | {"vocab_size": len(tokenizer), **ids}
    if architecture.images:
        return AutoConfig.for_model(model_type, text_config=text, **architecture.images)
    return AutoConfig.for_model(model_type, **text)


def save_tiny_architecture(model_type: str, folder: Path) -> None:
    """Write a model of random weights in fp32, with Qwen2.5's tokenizer and template."""
    config, tokenizer = config_of(model_type), tokenizer_for("qwen2")
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).float()
    ends = {"eos_token_id": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends)
    for each in (model, tokenizer):
        each.save_pretrained(folder)


def turns(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    messages = [message(roles[number % 2], text) for number, text in enumerate(texts)]
    return Conversation(sample_id=texts[0], messages=messages)


ANSWERED = (turns("What is it?", "A table"), turns("a", "b, a longer answer here", "c", "d"))
ASKED = (turns("What is it?"), turns("a", "b longer answer here", "c"), turns("Tell me about the table. " * 5))
NEW_TOKENS = 12


def load_tiny(folder: Path) -> tuple[PreTrainedModel, Processor]:
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    return model, load_processor(folder, None)


def head_deviations(folder: Path) -> dict[str, float]:
    """The loss by TRL's fused head, and by the likelihood of answers, relative to that of the model's own logits."""
    model, processor = load_tiny(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # so that scales and soft caps show
        batch = encode(processor, ANSWERED, padding_side="right", mark_answers=True)
        labels = torch.where(batch.pop("answers"), batch["input_ids"], -100)
        logits = model(**batch, use_cache=False).logits.float()
        own = float(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        scored = generator_of(model, processor, batch_size=16, max_new_tokens=1).likelihoods(ANSWERED)
        likelihood = -sum(each.sum_logprob for each in scored) / sum(each.num_tokens for each in scored)
        add_fused_lm_head(model)
        trl = float(model(**batch, labels=labels, fused_lm_head=True).loss)
    return {"trl": abs(trl / own - 1), "likelihood": abs(likelihood / own - 1)}


def completions(folder: Path) -> tuple[list[str], list[str]]:
    """Completions in a batch, and those of the model's own `generate` one by one."""
    model, processor = load_tiny(folder)
    together = generator_of(model, processor, batch_size=8, max_new_tokens=NEW_TOKENS).completions(ASKED)
    ending, alone = Ending(tokenizer_of(processor), end_tokens(tokenizer_of(processor))), []
    for question in ASKED:
        inputs = encode(processor, [question], padding_side="left")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)[0]
        alone.append(ending.text(ids[inputs["input_ids"].shape[1] :].tolist()))
    return [*together], alone


BASE_DIR = Path("data/bases/assistant")
RECIPES = ("chat-lora", "chat-full")
STEPS = 3


def prepared_workspace(folder: Path) -> Path:
    """A folder with prepared conversations, for copies of it."""
    folder.mkdir(parents=True, exist_ok=True)
    return made(folder, small_params(), ("prepare", "conversations"))


class Way(NamedTuple):
    """Results of the stages of a recipe."""

    planned: str
    """Log of the plan."""
    memory_error: float
    """Predicted memory of tensors against the measured one."""
    logit_deviation: float
    """The certificate's."""


def refusal_of(model_type: str, workspace: Path) -> str:
    """The message with which the plan of a tiny model is refused."""
    with chdir(workspace):
        _write_settings(model_type, precision="fp32")
        _done("base", "assistant")
        result = _run("plan", RECIPES[0])
    assert isinstance(result.exception, SystemExit), result.output
    return " ".join(result.output.split())


def all_the_way(model_type: str, workspace: Path, *, recipe: str = RECIPES[0], precision: str = "fp32") -> Way:
    """Takes a tiny model through base, plan, training, merge and evaluation. workspace: a copy of a prepared one."""
    with chdir(workspace):
        _write_settings(model_type, precision=precision)
        _done("base", "assistant")
        planned = _done("plan", recipe)
        _done("train", recipe)
        run_dir = Path("data/runs") / recipe
        measured = json.loads((run_dir / "training/training.json").read_text())["peak_memory_bytes"]
        predicted = json.loads((run_dir / "memory.json").read_text())["prediction"]["allocated_bytes"]
        _done("merge", recipe)
        certificate = MergeCertificate.read(run_dir / "merge.json", fix="")
        assert not certificate.problems()
        _done("evaluate", recipe)
    return Way(planned, predicted / measured - 1, certificate.logit_deviation)


def _write_settings(model_type: str, *, precision: str) -> None:
    if not Path("model").exists():
        Path("model").mkdir()
        save_tiny_architecture(model_type, Path("model"))
    raw = small_params()
    tiny = raw["profiles"]["tiny"]
    tiny["bases"]["assistant"] = f"folder:{Path('model').resolve()}"
    tiny["memory"] |= {"precision": precision, "padding_free": "off"}
    for name in RECIPES:
        raw["recipes"][name].update(effective_batch=4, epochs=8, max_steps=STEPS)
    raw["recipes"]["chat-lora"]["lora"]["rank"] = 8
    write_params(raw)


def _run(stage: str, name: str) -> Result:
    with patch("stages.memory.preview.require_answer_room", return_value=""):  # as in `tests.stage_runs.done`
        return run(stage, name)


def _done(stage: str, name: str) -> str:
    result = _run(stage, name)
    assert result.exit_code == 0, f"{stage} {name}: {result.output[-2000:]}{result.exception}"
    return result.output


def resumes_alike(workspace: Path, recipe: str = RECIPES[0]) -> bool:
    """Whether a training that is stopped before its last step and resumed leaves the bytes of one that ran through.

    workspace: one in which the recipe was trained.
    """
    run_dir = Path("data/runs") / recipe
    on_step_end = SaveInTime.on_step_end

    def stopped(saving: Any, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        if state.global_step == STEPS - 1:
            saving.requested_by = signal.SIGTERM
        return on_step_end(saving, args, state, control, **rest)

    with chdir(workspace):
        before = [shutil.move(run_dir / name, run_dir / f"{name}-before") for name in ("trained", "training")]
        shutil.rmtree(".bakeoff")
        with patch.object(SaveInTime, "on_step_end", stopped):
            assert run("train", recipe).exit_code == 128 + signal.SIGTERM
        _done("train", recipe)
        weights = [path.relative_to(before[0]) for path in Path(before[0]).rglob("*.safetensors")]
        assert weights
        return all(
            filecmp.cmp(one, other, shallow=False)
            for one, other in (
                *((Path(before[0], name), run_dir / "trained" / name) for name in weights),
                (Path(before[1]) / "trace.csv", run_dir / "training/trace.csv"),
            )
        )
