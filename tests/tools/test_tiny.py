"""The committed bases and data sets are those that the scripts make."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from stages.data.parquet import read_rows
from stages.models.folders import check_model_folder
from stages.models.prompts import load_processor
from tools.tiny import scenes
from tools.tiny.bases import BASES, TINY_DIR, untrained
from tools.tiny.texts import files


@pytest.fixture
def _torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("_torch_settings")
@pytest.mark.parametrize("name", BASES)
def test_the_first_steps_of_the_committed_bases_reproduce(name: str) -> None:
    record = json.loads((TINY_DIR / name / "pretraining.json").read_text())
    train, shipped = BASES[name]
    # The tests' threads: more would only wait for each other, and matter less than the tolerance.
    settings = replace(shipped, **record["settings"] | {"threads": torch.get_num_threads()})
    losses = train(*untrained(name, settings.seed), settings)
    # Another processor adds numbers in another order; another sample or weight changes far more than that.
    assert list(itertools.islice(losses, 2)) == pytest.approx(record["first_losses"][:2], abs=2e-3)


@pytest.mark.parametrize(("name", "text"), files().items())
def test_the_scripts_write_the_committed_texts(name: str, text: str) -> None:
    assert (TINY_DIR / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("split", scenes.SPLITS)
def test_the_script_draws_the_committed_packages(split: str) -> None:
    path = TINY_DIR / f"nutrition-tables/data/{split}-00000-of-00001.parquet"
    drawn = list(scenes.generate_rows(split, 8, scenes.SEED))
    assert list(itertools.islice(read_rows(path), 8)) == drawn


@pytest.mark.parametrize("name", BASES)
def test_a_committed_base_is_a_plain_folder(name: str) -> None:
    check_model_folder(TINY_DIR / name)
    loader = AutoModelForImageTextToText if name.endswith("vl") else AutoModelForCausalLM
    model, info = loader.from_pretrained(TINY_DIR / name, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert load_processor(TINY_DIR / name, None).chat_template


@pytest.mark.parametrize("name", BASES)
def test_a_conversation_is_rendered_as_qwen2_vl_renders_it(name: str) -> None:
    """The expected text is that of Qwen2-VL-7B-Instruct's own template (its chat_template.json)."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIR / name)
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Here."}]},
        {"role": "user", "content": "And now?"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n"
        "<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, masked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if masked]
    assert tokenizer.decode(answer) == "Here.<|im_end|>"
