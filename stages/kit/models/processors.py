"""Processors and tokenizers: from conversations to the model's inputs, through the model's own chat template."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
import transformers
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from stages.core.errors import UserError
from stages.core.params.schema import ImageParams
from stages.kit.data.conversation import Conversation
from stages.kit.data.images import ImageRecord
from stages.kit.data.prepared import shows_pictures
from stages.kit.families import PAGE, all_families, family_of
from stages.kit.models.load import load_config, read_from
from stages.kit.models.templates import answer_spans, rendered_messages, template_of

Processor: TypeAlias = ProcessorMixin | PreTrainedTokenizerBase
"""A vision-language model's processor, or a text model's tokenizer."""

VIDEO_SETTINGS = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""What a video processor shares with the image processor beside it."""


LOADED_BY = ("is_local", "local_files_only")
"""How a tokenizer was read, which transformers would write into the tokenizer_config.json that it saves."""


class PicturesOnly:
    """A Qwen-VL processor of an image processor and a tokenizer alone; a video is refused.

    transformers' own needs torchvision for a video processor even where only pictures are used
    (huggingface/transformers#48558), and there is none for the CPU build of torch. This one reads and writes the same
    files, under the same class name.
    """

    model_type: str

    # ProcessorMixin takes its parts from this signature. `_`: the video processor's settings, as read from a folder.
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        """The settings to save: those of transformers' class, so that it loads where torchvision is installed."""
        settings = super().to_dict()  # type: ignore[misc]
        images = settings["image_processor"]
        vision = family_of(self.model_type).vision
        assert vision is not None
        settings["video_processor"] = {"video_processor_type": vision.video_processor}
        settings["video_processor"] |= {name: images[name] for name in VIDEO_SETTINGS if name in images}
        return settings

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.model_type, vars(self))


@cache
def pictures_only(model_type: str) -> type[ProcessorMixin]:
    """The PicturesOnly of a family."""
    plain: type[ProcessorMixin] = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    # Its name is written beside processor and tokenizer.
    kind: type[ProcessorMixin] = type(plain.__name__, (PicturesOnly, plain), {"model_type": model_type})
    return kind


def _restored(model_type: str, settings: dict[str, Any]) -> ProcessorMixin:
    kind = pictures_only(model_type)
    processor: ProcessorMixin = object.__new__(kind)
    vars(processor).update(settings)
    return processor


def load_processor(folder: Path, images: ImageParams | None) -> Processor:
    """The processor of a vision-language model, or the tokenizer of a text model, with the profile's pixel limits.

    Raises UserError for a model of an unknown family.
    Pictures are resized by Pillow everywhere, never by torchvision: a CPU and a GPU machine see the same pixels.
    """
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model_type = load_config(folder).model_type
    family = family_of(model_type)
    processor: Processor
    with read_from(folder):
        if family.vision is not None:
            tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
            image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **offline)
            kind = pictures_only(model_type)
            processor = kind(image_processor, tokenizer, chat_template=tokenizer.chat_template)
        else:
            processor = tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
    for name in LOADED_BY:
        tokenizer.init_kwargs.pop(name, None)
    if tokenizer.pad_token is None:  # Llama's; masks and labels say what is padding
        tokenizer.pad_token = tokenizer.eos_token
    if images is not None and isinstance(processor, ProcessorMixin):
        processor.image_processor.size = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    return processor


def resizing(processor: Processor) -> Callable[[int, int], tuple[int, int]] | None:
    """Gives the (width, height) in pixels that a picture of so many has once the processor has resized it; picklable.

    None for a text model.
    """
    if isinstance(processor, PreTrainedTokenizerBase):
        return None
    images = processor.image_processor
    limits = {"min_pixels": images.size["shortest_edge"], "max_pixels": images.size["longest_edge"]}
    return partial(_resized, factor=images.patch_size * images.merge_size, **limits)


def _resized(width: int, height: int, **limits: int) -> tuple[int, int]:
    height, width = smart_resize(height, width, **limits)
    return width, height


def samples_for(samples: ModuleType, model_type: str, processor: Processor) -> Any:
    """A task's samples as one model is asked them: the module itself, or its ForModel where the form of an answer
    depends on the model's family and on how its pictures are resized."""
    return samples.ForModel(model_type, resizing(processor)) if hasattr(samples, "ForModel") else samples


def encode(
    processor: Processor,
    conversations: Sequence[Conversation],
    *,
    padding_side: Literal["left", "right"],
    max_length: int | None = None,
    mark_answers: bool = False,
) -> dict[str, torch.Tensor]:
    """The model's inputs for these conversations, through the model's own chat template.

    mark_answers: return `answers` (B, T) too, True for each token of an answer and the end of its turn.

    max_length: in tokens, to which `shortened` cuts each that has a text which may be cut; the others stay as they are.
    Unanswered ones end with the prompt for an answer. Returns input_ids and attention_mask (B, T) and, with pictures,
    pixel_values (patches, features), image_grid_thw (images, 3) and mm_token_type_ids (B, T).
    Raises UserError where a text holds a token by which the template sets messages apart, and for pictures that a text
    model is to be shown.
    """
    for conversation in conversations:
        _refuse_markup(processor, conversation)
    conversations = [shortened(processor, conversation, max_length) for conversation in conversations]
    texts = [rendered(processor, conversation) for conversation in conversations]
    options: dict[str, Any] = {"padding": True, "padding_side": padding_side, "return_tensors": "pt"}
    if isinstance(processor, PreTrainedTokenizerBase):
        batch = dict(processor(texts, add_special_tokens=False, **options))
    else:
        images = [
            [picture.open_image() if isinstance(picture, ImageRecord) else picture for picture in conversation.images]
            for conversation in conversations
            if conversation.images
        ]
        batch = dict(processor(text=texts, images=images or None, return_mm_token_type_ids=True, **options))
    if mark_answers:
        batch["answers"] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for row, (text, conversation) in enumerate(zip(texts, conversations, strict=True)):
            real = batch["attention_mask"][row].bool()
            batch["answers"][row, real] = _answers(processor, text, conversation, batch["input_ids"][row, real])
    return batch


def _answers(processor: Processor, text: str, conversation: Conversation, ids: torch.Tensor) -> torch.Tensor:
    """Which tokens are the assistant's.

    text: as rendered. ids: (T,) its tokens, where the processor has widened the placeholder of each picture. Returns
    (T,) bool.
    """
    tokenizer = tokenizer_of(processor)
    narrow = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
    starts, ends = narrow["offset_mapping"][0].unbind(1)
    said = torch.zeros_like(starts, dtype=torch.bool)
    for start, end in _answer_spans(processor, conversation):
        said |= (starts < end) & (ends > start)
    placeholder = getattr(processor, "image_token_id", None)
    if placeholder is None:
        return said
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[ids != placeholder] = said[narrow["input_ids"][0] != placeholder]
    return answers


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
    """Raises UserError where the model's tokenizer cannot be loaded, or its chat template cannot render a conversation,
    or renders an answered one otherwise than up to the prompt for its last answer."""
    talk = [{"role": role, "content": "You?"} for role in ("user", "assistant", "user", "assistant")]
    processor = load_processor(folder, None)
    asked, answered = (rendered(processor, Conversation(sample_id="check", messages=talk[:end])) for end in (3, 4))
    if not answered.startswith(asked):
        raise UserError(
            f"by the chat template of {folder}, a model would be trained on {answered!r}, and asked {asked!r}, with "
            f"which that does not begin; {PAGE} says how to bring another"
        )


def rendered(processor: Processor, conversation: Conversation) -> str:
    """What the model reads: the text that is tokenized, with a placeholder for each picture.

    Raises UserError where the chat template fails.
    """
    with _blaming(processor, conversation):
        return rendered_messages(tokenizer_of(processor), _messages(processor, conversation))


def takes(processor: Processor, conversation: Conversation) -> bool:
    """Whether the model can be shown all that a conversation has: a text model takes no pictures."""
    return not (isinstance(processor, PreTrainedTokenizerBase) and conversation.images)


def require_takes(processor: Processor, prepared_dir: Path) -> None:
    """Raises UserError where a dataset has pictures in any of its splits, and the model is a text model."""
    if isinstance(processor, PreTrainedTokenizerBase) and shows_pictures(prepared_dir):
        raise _blind(processor, f"{prepared_dir} has samples with pictures (see its stats.json)")


def _blind(text_model: PreTrainedTokenizerBase, what: str) -> UserError:
    known = [name for name, family in all_families().items() if family.vision]
    return UserError(
        f"{what}, and {text_model.name_or_path} is a text model; take a base of {', '.join(known)}, or leave the "
        "pictures out"
    )


def _answer_spans(processor: Processor, conversation: Conversation) -> list[tuple[int, int]]:
    with _blaming(processor, conversation):
        return list(answer_spans(tokenizer_of(processor), _messages(processor, conversation)))


def _refuse_markup(processor: Processor, conversation: Conversation) -> None:
    """Raises UserError where a text holds a token by which the chat template sets messages apart."""
    tokenizer = tokenizer_of(processor)
    markup = _markup(tokenizer, template_of(tokenizer))
    for message in conversation.messages:
        parts = [message["content"]] if isinstance(message["content"], str) else message["content"]
        for text in (part if isinstance(part, str) else part.get("text", "") for part in parts):
            if token := next((token for token in markup if token in text), None):
                raise UserError(f"a text of sample {conversation.sample_id} holds chat markup, {token}; remove it")


@cache
def _markup(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """Special tokens that the template writes. Some have no name: Gemma 3's <end_of_turn> is an added token alone."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(token for token in added.union(tokenizer.all_special_tokens) if token in template))


def _messages(processor: Processor, conversation: Conversation) -> list[dict[str, Any]]:
    if isinstance(processor, PreTrainedTokenizerBase):
        if not takes(processor, conversation):
            raise _blind(processor, f"sample {conversation.sample_id} has pictures")
        return [{**message, "content": _plain(message["content"])} for message in conversation.messages]
    return conversation.messages


@contextmanager
def _blaming(processor: Processor, conversation: Conversation) -> Iterator[None]:
    """Raises UserError, which names the template and the sample, where rendering fails."""
    try:
        yield
    except (MemoryError, UserError):
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
