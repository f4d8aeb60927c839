"""Processors and tokenizers: from conversations to the model's inputs, through the model's own chat template."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLProcessor,
)

from stages.core.errors import UserError
from stages.core.params.schema import ImageParams
from stages.kit.data.conversation import Conversation
from stages.kit.data.images import ImageRecord
from stages.kit.models.load import load_config, read_from

Processor: TypeAlias = ProcessorMixin | PreTrainedTokenizerBase
"""A vision-language model's processor, or a text model's tokenizer."""

VIDEO_SETTINGS = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""What a video processor shares with the image processor beside it."""


class PicturesOnlyProcessor(Qwen2VLProcessor):
    """A Qwen2VLProcessor of an image processor and a tokenizer alone; a video is refused.

    transformers' own needs torchvision for a video processor even where only pictures are used
    (huggingface/transformers#48558), and there is none for the CPU build of torch. This one reads and writes the same
    files, under the same class name.
    """

    # ProcessorMixin takes its parts from this signature. `_`: the video processor's settings, as read from a folder.
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def to_dict(self) -> dict[str, Any]:
        """The settings to save: Qwen2VLProcessor's, so that it loads where torchvision is installed."""
        settings = super().to_dict()
        images = settings["image_processor"]
        settings["video_processor"] = {"video_processor_type": "Qwen2VLVideoProcessor"}
        settings["video_processor"] |= {name: images[name] for name in VIDEO_SETTINGS if name in images}
        settings["processor_class"] = "Qwen2VLProcessor"
        return settings


def load_processor(folder: Path, images: ImageParams | None) -> Processor:
    """The processor of a vision-language model, or the tokenizer of a text model, with the profile's pixel limits.

    Pictures are resized by Pillow everywhere, never by torchvision: a CPU and a GPU machine see the same pixels.
    """
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    shows_pictures = load_config(folder).model_type == "qwen2_vl"
    processor: Processor
    with read_from(folder):
        if shows_pictures:
            tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
            image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **offline)
            processor = PicturesOnlyProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)
        else:
            processor = AutoProcessor.from_pretrained(folder, **offline)
    if images is not None and isinstance(processor, ProcessorMixin):
        processor.image_processor.size = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    return processor


def encode(
    processor: Processor,
    conversations: Sequence[Conversation],
    *,
    padding_side: Literal["left", "right"],
    max_length: int | None = None,
) -> dict[str, torch.Tensor]:
    """The model's inputs for these conversations, through the model's own chat template.

    max_length: in tokens, to which `shortened` cuts each that has a text which may be cut; the others stay as they are.
    Unanswered ones end with the prompt for an answer. Returns input_ids and attention_mask (B, T) and, with pictures,
    pixel_values (patches, features), image_grid_thw (images, 3) and mm_token_type_ids (B, T).
    """
    texts = [rendered(processor, shortened(processor, conversation, max_length)) for conversation in conversations]
    options: dict[str, Any] = {"padding": True, "padding_side": padding_side, "return_tensors": "pt"}
    if isinstance(processor, PreTrainedTokenizerBase):
        return dict(processor(texts, add_special_tokens=False, **options))
    images = [
        [picture.open_image() if isinstance(picture, ImageRecord) else picture for picture in conversation.images]
        for conversation in conversations
        if conversation.images
    ]
    return dict(processor(text=texts, images=images or None, return_mm_token_type_ids=True, **options))


def count_tokens(processor: Processor, conversation: Conversation, *, max_length: int | None = None) -> int:
    """The number of tokens that `encode` makes of a conversation; pictures are counted by their size alone."""
    conversation = shortened(processor, conversation, max_length)
    text = rendered(processor, conversation)
    length = len(tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"])
    if conversation.images:
        sizes = [(picture.height, picture.width) for picture in conversation.images]
        # The template writes one placeholder a picture, which the processor widens.
        counted = processor._get_num_multimodal_tokens(sizes)["num_image_tokens"]  # noqa: SLF001 - as vLLM counts them
        length += sum(counted) - len(sizes)
    return length


def shortened(processor: Processor, conversation: Conversation, max_length: int | None) -> Conversation:
    """The conversation with its shortenable text cut at the end, so that no more than `max_length` tokens are left.

    The cut is between two tokens of the text. Longer still, if the rest alone is; itself where nothing may be cut.
    """
    place = next(
        (
            (turn, number)
            for turn, message in enumerate(conversation.messages)
            for number, part in enumerate(message["content"])
            if isinstance(part, dict) and part.get("shortenable")
        ),
        None,
    )
    if max_length is None or place is None:
        return conversation
    turn, number = place
    part = conversation.messages[turn]["content"][number]
    ends = [0, *_token_ends(tokenizer_of(processor), part["text"], max_length)]  # no more of them can be left
    while True:
        messages = copy.deepcopy(conversation.messages)
        messages[turn]["content"][number]["text"] = part["text"][: ends[-1]]
        cut = replace(conversation, messages=messages)
        excess = count_tokens(processor, cut) - max_length
        if excess <= 0 or len(ends) == 1:
            return cut
        # Again only where tokens at the cut fuse with what follows, or a character has several of them.
        del ends[max(1, len(ends) - excess) :]


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    return processor if isinstance(processor, PreTrainedTokenizerBase) else processor.tokenizer


def check_chat_template(folder: Path) -> None:
    """Raises UserError where the model's tokenizer cannot be loaded, or its chat template cannot render a question and
    its answer."""
    question, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}
    processor = load_processor(folder, None)
    for messages in ([question], [question, answer]):
        rendered(processor, Conversation(sample_id="check", messages=messages))


def rendered(processor: Processor, conversation: Conversation) -> str:
    """What the model reads: the text that is tokenized, with a placeholder for each picture.

    Raises UserError where the chat template fails.
    """
    messages = conversation.messages
    if isinstance(processor, PreTrainedTokenizerBase):
        messages = [{**message, "content": _plain(message["content"])} for message in messages]
    try:
        return processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not conversation.answered()
        )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001, a template is a program, and raises what comes
        folder = tokenizer_of(processor).name_or_path
        raise UserError(
            f"the chat template of {folder} (chat_template.jinja, or in tokenizer_config.json) fails on the messages "
            f"of sample {conversation.sample_id}: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def _plain(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Text parts as one text: the chat templates of text models, Qwen2.5's among them, know no parts."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "".join(part["text"] for part in content)


def _token_ends(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> list[int]:
    """Where the first `count` tokens of a text end, in characters."""
    options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    # Of a transcript of hours only the beginning is looked at, if it has as many tokens.
    for stop in (16 * count, None):
        ends = [end for _, end in tokenizer(text[:stop], **options)["offset_mapping"]]
        if len(ends) > count:
            break
    return ends[:count]
