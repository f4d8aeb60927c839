"""Records one training step or one batch of generation: the real run's trainer, recipe and batch, without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from stages.core.params.schema import DeviceParams
from stages.internals.accelerate_internals import reset_accelerator
from stages.internals.torch_internals import pretended_processes
from stages.memory.fakes import fake_dequantization, fake_kernels, quantize_nf4
from stages.memory.recorder import Recorder, Recording, Storage, recorder_of, without_contents
from stages.mixture.trainer import make_trainer
from stages.models.adapters import apply_recipe
from stages.models.forward import forward_takes, has_plain_cache, layer_sizes
from stages.models.kernels import fused_kernels
from stages.models.load import DTYPES, new_model, require_readable, resolve_attention, shard, to_local
from stages.models.prompts import Processor
from stages.planning.cards import multiprocessors
from stages.planning.ladder import LOGIT_ROWS
from stages.planning.plan import Plan
from stages.planning.prediction import Phase
from stages.training.batches import FEATURES
from stages.training.trainer import RecipeTrainer, StartContract, optimizer_states


def record_step(
    plan: Plan,
    config: PreTrainedConfig,
    processor: Processor,
    batch: Mapping[str, torch.Tensor],
) -> Recording:
    """The second optimizer step of a run, by RecipeTrainer: the optimizer has its state by then.

    batch: one micro-batch, as the collator makes it; it serves as every micro-batch of the step.
    """
    here = _on_this_cpu(plan)
    with ExitStack() as stack:
        stack.callback(reset_accelerator)  # nothing of the step's trainer is left in this process
        recorder = stack.enter_context(recorder_of(plan.device, plan.memory.attn, config))
        stack.enter_context(fake_kernels(multiprocessors(plan.device)))
        if plan.features_bytes:
            batch = from_features(batch, config, plan.memory.precision)
        batch = without_contents(batch)
        model = _prepared_model(here, config, recorder, stack, processes=plan.device.total)
        require_readable(model, plan.device)
        trainer = one_batch_trainer(here, model, processor, batch)
        for name, weight in model.named_parameters():
            recorder.label([to_local(weight)], "adapters" if ".lora_" in name else "weights")
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda of: recorder.label([to_local(of.grad)], "gradients"))
        fill_optimizer_state(trainer)
        recorder.label(batch.values(), "activations")
        if plan.on_gpu:  # Trainer fetches all micro-batches of a step before the first one runs
            others = plan.schedule.grad_accumulation - 1
            recorder.add(others * sum(getattr(value, "nbytes", 0) for value in batch.values()), "activations")

        def begin(phase: Phase) -> None:
            if phase == "forward":  # accelerate may have copied it since it was made
                recorder.label(optimizer_states(trainer), "optimizer")
            recorder.begin(phase)

        mark_phases(trainer, begin)
        trainer.train()
        return recorder.finish()


def _prepared_model(
    plan: Plan, config: PreTrainedConfig, recorder: Recorder, stack: ExitStack, *, processes: int
) -> PreTrainedModel | PeftModel:
    """The model with its adapters, as the train stage prepares it; if sharded, this process's share of it.

    stack: undoes what the model needs once it has been used.
    """
    attn = resolve_attention(plan.memory.attn, plan.device, plan.memory.precision, padding_free=plan.padding_free)
    base = new_model(config, precision=plan.memory.precision, attn=attn)
    if plan.is_quantized:
        base = quantize_nf4(base, plan.memory.precision)
        stack.enter_context(fake_dequantization())
    model = apply_recipe(base, plan.recipe)
    stack.enter_context(fused_kernels(model, used=plan.fused_kernels))
    if plan.is_sharded:
        stack.enter_context(recorder.watching_resizes())
        shard(model, plan, stack.enter_context(pretended_processes(processes)))
    return model


def _on_this_cpu(plan: Plan) -> Plan:
    """The plan of one step that this process can take."""
    accumulation, placement = plan.rehearsed_micro_batches, "sharded" if plan.is_sharded else "single"
    return replace(
        plan.with_memory(placement=placement, attn=_attention(plan.memory.attn)),
        device=DeviceParams(kind="cpu"),
        dataloader_workers=0,
        trainable={},
        schedule=replace(
            plan.schedule,
            num_steps=1,
            warmup_steps=0,
            grad_accumulation=accumulation,
            train_samples=plan.memory.micro_batch * accumulation,
        ),
    )


def _attention(attn: str) -> Any:
    """cuda.py has the kernels of torch and of flash-attn."""
    return "eager" if attn == "eager" else "sdpa"


def from_features(
    batch: Mapping[str, torch.Tensor], config: PreTrainedConfig, precision: str
) -> dict[str, torch.Tensor]:
    """The batch with features in place of pixels, without contents: a row for each token of its images."""
    tokens, width = int((batch["input_ids"] == config.image_token_id).sum()), config.get_text_config().hidden_size
    features = torch.empty(tokens, width, dtype=DTYPES[precision])
    return {**{name: tensor for name, tensor in batch.items() if name != "pixel_values"}, FEATURES: features}


def one_batch_trainer(
    plan: Plan,
    model: PreTrainedModel | PeftModel,
    processor: Processor,
    batch: Mapping[str, torch.Tensor],
) -> RecipeTrainer:
    """The real trainer with this batch as every micro-batch, without start contract, rehearsal and progress."""
    trainer = make_trainer(
        plan,
        model=model,
        processor=processor,
        collator=lambda _: dict(batch),
        report_to="none",
        logging_strategy="no",
    )
    for callback in (StartContract, trainer.rehearsal, trainer.progress):
        trainer.remove_callback(callback)
    return trainer


def fill_optimizer_state(trainer: RecipeTrainer) -> None:
    """Make the optimizer and its state, by a step with gradients of 0."""
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def mark_phases(trainer: RecipeTrainer, begin: Callable[[Phase], None]) -> None:
    """Calls `begin` at the start of forward, of backward and of the optimizer's step."""
    compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward

    def forward(*args: Any, **kwargs: Any) -> Any:
        begin("forward")
        return compute_loss(*args, **kwargs)

    def then_step(*args: Any, **kwargs: Any) -> None:
        begin("backward")
        backward(*args, **kwargs)
        begin("step")

    trainer.compute_loss = forward  # type: ignore[method-assign]
    trainer.accelerator.backward = then_step


def record_generation(
    plan: Plan,
    config: PreTrainedConfig,
    batch: Mapping[str, torch.Tensor],
    *,
    batch_size: int,
    max_new_tokens: int,
    likelihoods: bool = False,
) -> Recording:
    """The fullest moments of a batch of generation, as one phase.

    First the prefill of the last prompts, which keeps keys and values and one logit each, while all other completions
    are about to end. Then the last token of completions that all have full length: the cache holds prompts and
    completions, and for an instant one layer's keys twice, as each token is appended (transformers' DynamicCache). With
    likelihoods, last the logits of answers (evaluation/likelihood.py), beside hidden states in place of caches.

    plan: of what is evaluated, on its device. batch: the longest prompts, without labels, as many as are read at once.
    batch_size: completions at once.
    """
    (num_prompts, length), itemsize = batch["input_ids"].shape, DTYPES[plan.memory.precision].itemsize
    with recorder_of(plan.device, plan.memory.attn, config) as recorder:
        inputs = without_contents(batch)
        model = new_model(config, precision=plan.memory.precision, attn=_attention(plan.memory.attn)).eval()
        recorder.label(model.parameters(), "weights")
        recorder.label(inputs.values(), "activations")
        recorder.begin("forward")
        others = recorder.add(0, "activations")
        with torch.inference_mode():
            keep = {"logits_to_keep": 1} if "logits_to_keep" in forward_takes(model) else {}
            cache = {"past_key_values": DynamicCache()} if has_plain_cache(model) else {}  # as evaluation/generate.py
            output = model(**inputs, use_cache=True, **keep, **cache)
        layers = layer_sizes(getattr(output, "past_key_values", None) or output.cache_params)
        # Bytes of one completion of full length in all layers, and of the keys in the largest.
        cached, layer_keys = (
            size * (length + max_new_tokens) // (length * num_prompts) for size in (sum(layers), max(layers) // 2)
        )
        others.size_bytes = (batch_size - num_prompts) * cached
        recording = recorder.finish()
        del output
    end = max(max(storage.born, storage.died or 0) for storage in recording.storages) + 1
    for storage in recording.storages:
        if storage.budget != "weights" and storage.died is None:
            storage.died = end
    # The most likely token is chosen among fp32 logits.
    vocab_size = config.get_text_config().vocab_size
    fp32_bytes = torch.float32.itemsize
    logits = batch_size * vocab_size * (itemsize + fp32_bytes * (itemsize < fp32_bytes))
    recording.storages += [
        Storage(batch_size * (cached + layer_keys), "activations", born=end + 1, died=end + 3),
        Storage(logits, "logits", born=end + 2, died=end + 3),
    ]
    if likelihoods:
        tokens, width = num_prompts * length, config.get_text_config().hidden_size
        # fp32 logits and their log-softmax, and the 16-bit logits that the first were cast from.
        rows = min(LOGIT_ROWS, tokens) * vocab_size * (2 * fp32_bytes + itemsize * (itemsize < fp32_bytes))
        recording.storages += [
            Storage(tokens * width * itemsize, "activations", born=end + 4),
            Storage(rows, "logits", born=end + 5),
        ]
    return recording
