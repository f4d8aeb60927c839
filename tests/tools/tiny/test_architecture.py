import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from stages.kit.models.prompts import images_only
from tests.tiny import SMALLEST, SMALLEST_TEXT
from tools.tiny.architecture import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    build_tiny_qwen2,
    build_tiny_qwen2_vl,
    save_model,
    train_tokenizer,
)

CORPUS = ("Detect the bounding box of the nutrition table.", "(123,456),(789,10)") * 20
TURNS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Here."}]},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(CORPUS, 320)


def test_a_conversation_is_rendered_as_qwen2_vl_renders_it(tokenizer):
    # As Qwen2-VL-7B-Instruct's own template does: its model card and chat_template.json.
    turns = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n"
        "<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
    )
    text = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert text == (f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{turns}<|im_start|>assistant\n")
    system = {"role": "system", "content": "Be brief."}
    replaced = tokenizer.apply_chat_template([system, *TURNS], tokenize=False)
    assert replaced == f"<|im_start|>system\nBe brief.<|im_end|>\n{turns}"
    encoded = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, masked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if masked]
    assert tokenizer.decode(answer) == "Here.<|im_end|>"


def test_each_special_token_and_each_digit_is_one_token(tokenizer):
    ids = [tokenizer.encode(token, add_special_tokens=False) for token in SPECIAL_TOKENS]
    assert all(len(tokens) == 1 for tokens in ids)
    pieces = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"].values()
    assert len({token for (token,) in ids} - set(pieces)) == len(SPECIAL_TOKENS), "no text makes one"
    digits = train_tokenizer(["123 456 123 456"] * 50, 300)
    assert digits.convert_ids_to_tokens(digits.encode("1234")) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("build", "geometry", "loader", "model_type"),
    [
        (build_tiny_qwen2_vl, SMALLEST, AutoModelForImageTextToText, "qwen2_vl"),
        (build_tiny_qwen2, SMALLEST_TEXT, AutoModelForCausalLM, "qwen2"),
    ],
)
def test_the_folder_is_a_plain_one_with_the_built_weights_in_bfloat16(
    build, geometry, loader, model_type: str, tmp_path: Path
):
    model, processor = build(CORPUS, geometry, seed=3)
    expected = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    save_model(model, processor, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, local_files_only=True).model_type == model_type
    loaded, info = loader.from_pretrained(tmp_path, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    saved, built = AutoTokenizer.from_pretrained(tmp_path), getattr(processor, "tokenizer", processor)
    assert saved.chat_template == CHAT_TEMPLATE
    assert saved.encode("Where? 12 ạ") == built.encode("Where? 12 ạ")
    assert saved.convert_ids_to_tokens(loaded.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]


def test_the_saved_processor_is_the_built_one_and_keeps_pictures_to_the_geometry(tmp_path: Path):
    _, processor = build_tiny_qwen2_vl(CORPUS, SMALLEST)
    processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "processor_config.json").read_text())["processor_class"] == "Qwen2VLProcessor"
    saved = images_only("qwen2_vl").from_pretrained(tmp_path)
    for size in ((112, 112), (900, 300), (30, 20)):
        picture = Image.radial_gradient("L").convert("RGB").resize(size)
        inputs, again = (
            each(text="<|vision_start|><|image_pad|><|vision_end|>Where?", images=[picture], return_tensors="pt")
            for each in (processor, saved)
        )
        for name, tensor in inputs.items():
            assert torch.equal(tensor, again[name]), name
        area = int(inputs["image_grid_thw"][0].prod()) * 14 * 14
        assert SMALLEST.pixels[0] <= area <= SMALLEST.pixels[1]
