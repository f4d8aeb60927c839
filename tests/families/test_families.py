"""The entries of families are true of a tiny model of each, and the docs have the same table."""

import copy
import json
import pickle
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from stages.core.errors import UserError
from stages.core.families import FAMILIES, family_of, require_precision, unlisted_words
from stages.data.conversation import Conversation, message
from stages.evaluation.generate import Ending
from stages.models.adapters import part_of
from stages.models.kernels import PACKED
from stages.models.load import meta_model, new_model
from stages.models.prompts import (
    Processor,
    encode,
    end_tokens,
    load_processor,
    rendered,
    resizing,
    tokenizer_of,
)
from stages.tasks.detection.samples import ForModel
from stages.tasks.detection.samples.boxes import codec, decode_boxes
from stages.training.batches import ConversationCollator, packed
from tests import ROOT
from tests.tiny_families import ENDS, config_for, generation_config_for, save_tiny_family, tokenizer_for
from tests.tiny_families import processor_for as built_processor

VISION = [name for name, family in FAMILIES.items() if family.vision]
TALK = [
    {"role": role, "content": text}
    for role, text in zip(
        ("system", "user", "assistant", "user", "assistant"),
        ("Be brief.", "Who?", "You.", "And he?", "Bob."),
        strict=True,
    )
]


@cache
def processor_for(name: str) -> Processor:
    """Loaded from a model's folder."""
    with TemporaryDirectory() as folder:
        built_processor(name).save_pretrained(folder)
        config_for(name).save_pretrained(folder)
        generation_config_for(name, tokenizer_for(name)).save_pretrained(folder)
        return load_processor(Path(folder), None)


def as_text(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    parts = [message(turn["role"], turn["content"]) for turn in messages]
    return rendered(tokenizer, Conversation(sample_id="sample-7", messages=parts))


def turns(*texts: str, images: int = 0) -> Conversation:
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [message(roles[turn % 2], text) for turn, text in enumerate(texts)]
    messages[0]["content"] = [{"type": "image"}] * images + messages[0]["content"]
    shown = [Image.linear_gradient("L").resize((70 + 30 * i, 61)).convert("RGB") for i in range(images)]
    return Conversation(sample_id="sample-7", messages=messages, images=shown)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_that_count_are_the_answers_and_the_ends_of_their_turns(name: str) -> None:
    processor, end = processor_for(name), ENDS.get(name, "<|im_end|>")
    conversation = turns("What is it?", "A table", "Sure?", "yes, two\nlines", images=2 if name in VISION else 0)
    batch = encode(processor, [conversation, turns("a", "b")], padding_side="right", mark_answers=True)
    for row, answers in enumerate((["A table", "yes, two\nlines"], ["b"])):
        counted = tokenizer_of(processor).decode(batch["input_ids"][row][batch["answers"][row]])
        assert counted == "".join(f"{answer}{end}" for answer in answers)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_trained_on_what_it_is_asked_and_what_its_own_template_writes(name: str) -> None:
    tokenizer = tokenizer_of(processor_for(name))
    for messages in (TALK, TALK[1:], TALK[1:3]):
        text = as_text(tokenizer, messages)
        assert text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert text.startswith(as_text(tokenizer, messages[:-1]))
    earlier = as_text(tokenizer, TALK[:2])
    if name == "qwen3":  # it has the block in the prompt, and never in what was said before
        assert earlier.endswith("<think>\n\n</think>\n\n")
        earlier = earlier.removesuffix("<think>\n\n</think>\n\n")
    assert as_text(tokenizer, TALK).startswith(earlier)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_turn_ends_a_completion_and_a_saved_tokenizer_keeps_no_trace_of_its_loading(
    name: str, tmp_path: Path
) -> None:
    folder, end = save_tiny_family(name, tmp_path), ENDS.get(name, "<|im_end|>")
    tokenizer = tokenizer_of(load_processor(folder, None))
    assert Ending(tokenizer, end_tokens(tokenizer)).text(tokenizer(f"Yes{end}\nNo").input_ids) == "Yes"
    processor_for(name).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"]
    assert not {"is_local", "local_files_only", "name_or_path", "trust_remote_code"} & saved.keys()


def test_an_unlisted_family_is_a_text_model_of_which_nothing_is_promised() -> None:
    family = family_of("granite")
    assert (family.vision, family.same_without_padding, family.fused_like) == (None, False, None)
    assert "granite" in (unlisted_words("granite") or "")
    assert unlisted_words("qwen2") is None


def test_gemma_3_in_fp16_is_refused_and_qwen2_in_fp16_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"always overflows in fp16: set memory.precision .* to bf16 or fp32"):
        require_precision("gemma3_text", "fp16")
    for name, precision in (("gemma3_text", "bf16"), ("phi3", "fp16")):
        require_precision(name, precision)
    assert not caplog.records
    require_precision("qwen2", "fp16")
    assert "sometimes overflows in fp16" in caplog.text
    require_precision("granite", "bf16")
    assert "granite" not in caplog.text
    require_precision("granite", "fp16")
    assert "whether granite overflows in fp16 was not tried" in caplog.text


@pytest.mark.parametrize("name", VISION)
def test_vision_tower_projector_and_language_model_are_where_the_family_says(name: str) -> None:
    model = meta_model(config_for(name))
    tower = {f"model.visual.{each}" for each, _ in model.model.visual.named_parameters()}
    merging = {each for each in tower if "merger" in each}
    parts = {
        part: {each for each, _ in model.named_parameters() if part_of(each) == part}
        for part in ("vision", "projector")
    }
    assert parts == {"vision": tower - merging, "projector": merging}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.same_without_padding])
def test_a_row_without_padding_gives_the_same_loss_and_gradients_part_by_part(name: str) -> None:
    processor, config = processor_for(name), config_for(name)
    samples = [
        turns("What is it?" * count, "yes " * count, images=int(name in VISION) * (count % 2)) for count in (1, 2, 4)
    ]
    collate = ConversationCollator(processor, samples, lambda it: it, loss="assistant-only", max_length=4096)
    padded = collate([{"sample": number} for number in range(3)])
    assert not padded["attention_mask"].all()
    found = []
    for attn, batch in (("sdpa", padded), (PACKED, packed(padded, config, "assistant-only"))):
        torch.manual_seed(0)
        model = new_model(config, precision="fp32", attn=attn).train()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        parts: dict[str, list[torch.Tensor]] = {}
        for parameter_name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parts.setdefault(part_of(parameter_name), []).append(parameter.grad.flatten())
        found.append((float(loss), {part: torch.cat(gradients) for part, gradients in parts.items()}))
    (loss, one), (other_loss, other) = found
    assert loss == pytest.approx(other_loss, rel=1e-5)
    assert one.keys() == other.keys() == ({"vision", "projector", "llm"} if name in VISION else {"llm"})
    for part in one:
        assert float((one[part] - other[part]).norm() / one[part].norm()) < 1e-4, part


@pytest.mark.parametrize("name", VISION)
@given(width=st.integers(29, 700), height=st.integers(29, 700), box=st.tuples(*[st.floats(0, 1)] * 4))
@settings(max_examples=25, deadline=None)
def test_boxes_come_back_through_the_processor(name: str, width: int, height: int, box: Any) -> None:
    """Within a step of the resized image; the processor decides its size."""
    x0, y0, x1, y1 = (min(box[::2]), min(box[1::2]), max(box[::2]), max(box[1::2]))
    assume(x0 < x1 and y0 < y1)
    processor = processor_for(name)
    record: Any = SimpleNamespace(
        image_id="image-7",
        prompt="Where?",
        category="table",
        answer="native",
        width=width,
        height=height,
        box=(x0, y0, x1, y1),
        targets=lambda: [((x0, y0, x1, y1), "table")],
    )
    asked = ForModel(name, pickle.loads(pickle.dumps(resizing(processor))))  # noqa: S301 - our own bytes
    conversation = replace(asked.conversation(record, answered=True), images=[Image.new("RGB", (width, height))])
    batch = encode(processor, [conversation], padding_side="right", mark_answers=True)
    _, rows, columns = batch["image_grid_thw"][0].tolist()
    patch = processor.image_processor.patch_size
    shown = (columns * patch, rows * patch)
    answer = tokenizer_of(processor).decode(batch["input_ids"][0][batch["answers"][0]])
    options = asked.score_options([record])
    assert options == {"family": name, "sizes": [shown]}
    (back,) = decode_boxes(answer, family=name, size=shown).boxes
    steps = codec(name).grid(shown)
    for axis in (0, 1):
        assert abs(back[axis] - (x0, y0)[axis]) <= 1 / steps[axis] + 1e-9
        assert abs(back[axis + 2] - (x1, y1)[axis]) <= 1 / steps[axis] + 1e-9


PROCESSORS = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}


@pytest.mark.parametrize("name", VISION)
def test_a_processor_is_saved_under_its_published_names_and_survives_copies_and_workers(
    name: str, tmp_path: Path
) -> None:
    processor = processor_for(name)
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert (saved["processor_class"], saved["video_processor"]["video_processor_type"]) == PROCESSORS[name]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["processor_class"] == PROCESSORS[name][0]
    for other in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):  # noqa: S301 - our own bytes
        assert type(other) is type(processor)
        assert other.to_dict() == processor.to_dict()
        assert end_tokens(tokenizer_of(other)) == end_tokens(tokenizer_of(processor))


def test_the_table_in_the_docs_is_that_of_the_families() -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    _, *rows = re.findall(
        r"^\| ([^|]+) \| `(\w+)` \| ([^|]+) \| ([^|]*)\| ([^|]+) \| ([^|]+) \|", page, flags=re.MULTILINE
    )
    assert {model_type: name for name, model_type, *_ in rows} == {key: each.name for key, each in FAMILIES.items()}
    for _, model_type, tasks, boxes, without_padding, fused in rows:
        family = FAMILIES[model_type]
        assert tasks.startswith("images") == (family.vision is not None), model_type
        assert bool(boxes.strip()) == bool(family.vision and family.vision.boxes), model_type
        assert without_padding.startswith("yes") == family.same_without_padding, model_type
        assert fused.startswith("yes") == (family.fused_like is not None), model_type
