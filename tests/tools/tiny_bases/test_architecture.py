import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2ForCausalLM,
    Qwen2VLForConditionalGeneration,
)

from stages.kit.models.without_torchvision import PicturesOnlyProcessor
from tools.tiny_bases.architecture import (
    CHAT_TEMPLATE,
    SMALLEST,
    SMALLEST_TEXT,
    SPECIAL_TOKENS,
    TINY,
    TINY_TEXT,
    build_tiny_qwen2,
    build_tiny_qwen2_vl,
    save_model,
    tiny_config,
    tiny_text_config,
    train_tokenizer,
)

CORPUS = ("Detect the bounding box of the nutrition table.", "(123,456),(789,10)") * 20
TURNS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Here."}]},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def built():
    return build_tiny_qwen2_vl(CORPUS, SMALLEST, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, processor = build_tiny_qwen2_vl(CORPUS, SMALLEST, seed=3)
    path = tmp_path_factory.mktemp("tiny") / "vlm"
    save_model(model, processor, path)
    return path


def test_a_conversation_is_rendered_as_qwen2_vl_renders_it(built):
    _, processor = built
    text = processor.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    # As Qwen2-VL-7B-Instruct's own template does: its model card and chat_template.json.
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n"
        "<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_default(built):
    _, processor = built
    text = processor.apply_chat_template([{"role": "system", "content": "Be brief."}, *TURNS], tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_the_template_marks_what_the_assistant_says(built):
    _, processor = built
    encoded = processor.tokenizer.apply_chat_template(
        TURNS, chat_template=CHAT_TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    said = [i for i, said in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if said]
    assert processor.tokenizer.decode(said) == "Here.<|im_end|>"


def test_each_special_token_is_one_token_that_no_text_makes(built):
    _, processor = built
    ids = [processor.tokenizer.encode(token, add_special_tokens=False) for token in SPECIAL_TOKENS]
    assert all(len(tokens) == 1 for tokens in ids)
    pieces = json.loads(processor.tokenizer.backend_tokenizer.to_str())["model"]["vocab"].values()
    assert len({token for (token,) in ids} - set(pieces)) == len(SPECIAL_TOKENS)


@pytest.mark.parametrize("text", ["(7,1000),(45,9)", "Nährwerte pro 100 g: Brennwert 1.234 kJ", "表 \n\t€"])
def test_any_text_survives_the_tokenizer(text: str):
    tokenizer = train_tokenizer(CORPUS, 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own():
    tokenizer = train_tokenizer(["123 456 123 456"] * 50, 300)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234")) == ["1", "2", "3", "4"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(built):
    same, _ = build_tiny_qwen2_vl(CORPUS, SMALLEST, seed=3)
    other, _ = build_tiny_qwen2_vl(CORPUS, SMALLEST, seed=4)
    weights = [model.lm_head.weight for model in (built[0], same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_default_geometry_has_about_three_million_weights():
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(tiny_config(train_tokenizer(CORPUS, 640), TINY))
    assert 2_700_000 < sum(parameter.numel() for parameter in model.parameters()) < 3_300_000


def test_the_folder_is_a_plain_one_in_bfloat16(folder: Path):
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    assert config.model_type == "qwen2_vl"
    model, info = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sorted(path.suffix for path in folder.iterdir()).count(".safetensors") == 1
    assert json.loads((folder / "processor_config.json").read_text())["processor_class"] == "Qwen2VLProcessor"
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_the_saved_model_and_processor_answer_as_the_built_ones(built, folder: Path):
    model, processor = built
    rounded = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    model.load_state_dict(rounded)
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    loaded_processor = PicturesOnlyProcessor.from_pretrained(folder)
    picture = Image.radial_gradient("L").convert("RGB").resize((90, 120))
    inputs, loaded_inputs = (
        each(text="<|vision_start|><|image_pad|><|vision_end|>Where?", images=[picture], return_tensors="pt")
        for each in (processor, loaded_processor)
    )
    for name, tensor in inputs.items():
        assert torch.equal(tensor, loaded_inputs[name]), name
    with torch.no_grad():
        logits = [each.eval()(**inputs).logits for each in (model, loaded)]
    assert torch.equal(*logits)


def test_pictures_take_as_many_tokens_as_the_geometry_allows(built):
    _, processor = built
    for size in ((112, 112), (900, 300), (30, 20)):
        grid = processor.image_processor(Image.new("RGB", size), return_tensors="pt")["image_grid_thw"][0]
        assert SMALLEST.min_pixels <= int(grid.prod()) * 14 * 14 <= SMALLEST.max_pixels


def test_a_text_model_is_a_plain_folder_that_answers_as_the_built_one(tmp_path: Path):
    model, tokenizer = build_tiny_qwen2(CORPUS, SMALLEST_TEXT, seed=3)
    expected = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    save_model(model, tokenizer, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, output_loading_info=True)
    assert isinstance(loaded, Qwen2ForCausalLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.chat_template == tokenizer.chat_template == CHAT_TEMPLATE
    assert saved.encode("Where? 12 ạ") == tokenizer.encode("Where? 12 ạ")
    assert saved.convert_ids_to_tokens(loaded.generation_config.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]


def test_the_same_seed_gives_the_same_text_model():
    same, other = (build_tiny_qwen2(CORPUS, SMALLEST_TEXT, seed=seed)[0] for seed in (3, 4))
    again = build_tiny_qwen2(CORPUS, SMALLEST_TEXT, seed=3)[0]
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (same, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_default_text_geometry_has_about_one_million_weights():
    # The tokenizer's size is what counts, not what it has learnt.
    with torch.device("meta"):
        model = Qwen2ForCausalLM(tiny_text_config(train_tokenizer(CORPUS, 300), TINY_TEXT))
    inner = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert 700_000 < inner < 900_000
    assert model.config.num_key_value_heads < model.config.num_attention_heads
