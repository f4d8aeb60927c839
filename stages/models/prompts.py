"""Prompts: from conversations to a model's inputs, through its own processor and chat template."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
import transformers
from transformers import AutoImageProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils.chat_template_utils import render_jinja_template

from stages.core.errors import UserError
from stages.core.families import FAMILIES, PAGE, family_of
from stages.core.params.schema import ImageParams, TemplateOptions
from stages.core.records import shown
from stages.data.conversation import Conversation, message
from stages.data.images import ImageRecord
from stages.internals.transformers_internals import num_image_tokens
from stages.models.answers import ANSWER, NEXT, Messages, Turn, answer_spans, find_turn, training_text
from stages.models.load import NO_MODEL, library_errors, load_config

Processor: TypeAlias = ProcessorMixin | PreTrainedTokenizerBase
"""A vision-language model's processor, or a text model's tokenizer."""

VIDEO_SETTINGS = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""Settings that a video processor shares with the image processor beside it."""

MAX_CUT_SHARE = 0.01
"""Share of the reference answers that may be longer than max_new_tokens."""

OPTIONS: TemplateOptions = {"enable_thinking": False, "date_string": "26 Jul 2024"}
"""Options that some chat templates have: an answer without a chain of thought (Qwen3), and the date (Llama 3.2), which
is today's otherwise; this one is Llama 3.1's default."""

NO_OPTIONS: TemplateOptions = {}

_CLOCK = """\
{%- macro strftime_now(format) %}{{ format | replace("%Y", "2024") | replace("%m", "07") | replace("%d", "26") |
    replace("%b", "Jul") | replace("%B", "July") }}{% endmacro %}
"""
"""A date that stands still, for templates that call the clock (Granite 3, gpt-oss)."""

_THINKING = re.compile("</?think>")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ImagesOnly:
    """A Qwen-VL processor of an image processor and a tokenizer alone; a video is refused.

    transformers' own needs torchvision for a video processor even if only images are used
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
        return _blank, (self.model_type,), vars(self)


@cache
def images_only(model_type: str) -> type[ProcessorMixin]:
    """The ImagesOnly of a family."""
    plain: type[ProcessorMixin] = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    # Its name is written beside processor and tokenizer.
    kind: type[ProcessorMixin] = type(plain.__name__, (ImagesOnly, plain), {"model_type": model_type})
    return kind


def _blank(model_type: str) -> ProcessorMixin:
    return object.__new__(images_only(model_type))


def load_processor(folder: Path, images: ImageParams | None, options: TemplateOptions = NO_OPTIONS) -> Processor:
    """The processor of a vision-language model, or the tokenizer of a text model, with the profile's pixel limits.

    options: of the chat template (template_options).
    Images are resized by Pillow everywhere, never by torchvision: a CPU and a GPU machine see the same pixels.
    """
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model_type = load_config(folder).model_type
    family = family_of(model_type)
    processor: Processor
    with library_errors(NO_MODEL.format(folder)):
        processor = tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
        if tokenizer.chat_template is None:
            raise UserError(f"{folder} has no chat template; {PAGE} has one, and says where to put it")
        tokenizer.chat_template = with_options(tokenizer.get_chat_template(), options)
        if family.vision is not None:
            image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **offline)
            processor = images_only(model_type)(image_processor, tokenizer, chat_template=tokenizer.chat_template)
    tokenizer.model_ends = _model_ends(folder)
    for name in ("is_local", "local_files_only"):  # transformers would write them into a saved tokenizer_config.json
        tokenizer.init_kwargs.pop(name, None)
    if tokenizer.pad_token is None:  # Llama has none; masks and labels mark the padding
        tokenizer.pad_token = tokenizer.eos_token or next(map(tokenizer.decode, sorted(tokenizer.model_ends)), None)
    if images is not None and isinstance(processor, ProcessorMixin):
        processor.image_processor.size = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
    tokenizer.answer_lead = _turn(processor).lead
    return processor


def with_options(template: str, options: TemplateOptions = NO_OPTIONS) -> str:
    """The chat template with fixed values for its options, OPTIONS without others, and for the clock: a trained model
    is saved with it, and so gets the prompts that it was trained on wherever it goes.

    Raises UserError for an option that the template does not have.
    """
    fixed = ""
    for name, value in {**OPTIONS, **options}.items():
        earlier = rf'(?m)^\{{%- set {name} = (true|false|[-\d]+|".*") %\}}\n'
        if name in options:
            template = re.sub(earlier, "", template)
        if re.search(rf"\b{name}\b", template) is None and name in options:
            raise UserError(f"the chat template has no option {shown(name)} (template_options)")
        if re.search(rf"\b{name}\b", template) and not re.search(earlier, template):
            fixed += f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n"
    clock = _CLOCK if "strftime_now" in template and _CLOCK not in template else ""
    return fixed + clock + template


def _model_ends(folder: Path) -> set[int]:
    """The tokens at which a model stops, by its generation_config.json, or config.json without one."""
    settings = GenerationConfig.from_model_config(load_config(folder))
    if (folder / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(folder, local_files_only=True)
    ends = settings.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end a completion. tokenizer: from `load_processor`, which knows the model's own."""
    own = {token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None}
    return own | getattr(tokenizer, "model_ends", set())


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    return processor if isinstance(processor, PreTrainedTokenizerBase) else processor.tokenizer


def resizing(processor: Processor) -> Callable[[int, int], tuple[int, int]] | None:
    """A picklable function from an image's (width, height) in pixels to those after the processor has resized it.

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
    """A task's samples for one model: the module itself, or its ForModel if the form of an answer depends on the
    model's family and on how its images are resized."""
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

    max_length: tokens to which `shortened` cuts each conversation that has a shortenable text; others stay whole.
    mark_answers: return `answers` (B, T) too, True for each token of an answer that is to be learnt and the end of its
    turn.
    Unanswered conversations end with the prompt for an answer. Returns input_ids and attention_mask (B, T) and, with
    images, pixel_values (patches, features), image_grid_thw (images, 3) and mm_token_type_ids (B, T).
    Raises UserError if a text holds a token with which the template separates messages, and for images in a
    conversation of a text model.
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
            [image.open_image() if isinstance(image, ImageRecord) else image for image in conversation.images]
            for conversation in conversations
            if conversation.images
        ]
        batch = dict(processor(text=texts, images=images or None, return_mm_token_type_ids=True, **options))
    if mark_answers:
        batch["answers"] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for row, (text, conversation) in enumerate(zip(texts, conversations, strict=True)):
            real = batch["attention_mask"][row].bool()
            batch["answers"][row, real] = _answer_tokens(processor, text, conversation, batch["input_ids"][row, real])
    return batch


def _answer_tokens(processor: Processor, text: str, conversation: Conversation, ids: torch.Tensor) -> torch.Tensor:
    """(T,) bool: the assistant's tokens, of the turns that are to be learnt.

    text: as rendered. ids: (T,) its tokens, after the processor has widened the placeholder of each image.
    """
    tokenizer = tokenizer_of(processor)
    narrow = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
    starts, ends = narrow["offset_mapping"][0].unbind(1)
    in_answer = torch.zeros_like(starts, dtype=torch.bool)
    messages = _messages(processor, conversation)
    with _template_errors(processor, conversation):
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = answer_spans(partial(_render, tokenizer), _turn(processor), messages, text)
        for turn, (start, end) in zip(turns, spans, strict=True):
            if turn not in conversation.unlearnt:  # a token that begins before its answer is never generated
                in_answer |= (start <= starts) & (starts < end) & (starts < ends)
        if _MARK.search(tokenizer.chat_template):
            if not text.startswith(_render(tokenizer, messages).removesuffix(_turn(processor).after)):
                raise ValueError("its marks ({% generation %}) are of another text than follows its prompts")
            marked = [(starts < end) & (ends > start) for start, end in _render(tokenizer, messages, marks=True)]
            in_answer &= torch.stack(marked).any(0)
    placeholder = getattr(processor, "image_token_id", None)
    if placeholder is None:
        return in_answer
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[ids != placeholder] = in_answer[narrow["input_ids"][0] != placeholder]
    return answers


def count_tokens(processor: Processor, conversation: Conversation, *, max_length: int | None = None) -> int:
    """The number of tokens that `encode` makes of a conversation; images are counted by their size alone."""
    conversation = shortened(processor, conversation, max_length)
    text = rendered(processor, conversation)
    length = len(tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"])
    if conversation.images:
        # The template writes one placeholder an image, which the processor widens.
        sizes = [(image.height, image.width) for image in conversation.images]
        length += sum(num_image_tokens(processor, sizes)) - len(sizes)
    return length


def require_answer_room(
    processor: Processor, answered: Iterable[Conversation], max_new_tokens: int, setting: str
) -> str:
    """The length of the longest reference answer, for the log.

    answered: conversations with their answers. setting: the path of max_new_tokens in params.yaml, for the UserError
    raised if more than MAX_CUT_SHARE of the answers are longer: a perfect model would score as a wrong one there.
    """
    texts = ["".join(part["text"] for part in each.messages[-1]["content"]) for each in answered]
    lengths = [len(ids) + 1 for ids in tokenizer_of(processor)(texts, add_special_tokens=False)["input_ids"]]
    longer = sum(length > max_new_tokens for length in lengths)
    found = f"reference answers of up to {max(lengths)} tokens, the end of the turn included"
    if longer > MAX_CUT_SHARE * len(lengths):
        raise UserError(
            f"the validation split has {found}; {longer:,} of {len(lengths):,} are longer than {setting}, "
            f"{max_new_tokens}, so no model could give them. Set {setting}: {max(lengths)} in params.yaml"
        )
    return f"{found}; {longer:,} of {len(lengths):,} are longer than max_new_tokens, {max_new_tokens}"


def shortened(processor: Processor, conversation: Conversation, max_length: int | None) -> Conversation:
    """The conversation with its shortenable text cut at the end, so that at most `max_length` tokens are left.

    The cut is between two tokens of the text. The result is longer if the rest alone is; a conversation without a
    shortenable text is returned as it is.
    """
    if max_length is None:
        return conversation
    messages = copy.deepcopy(conversation.messages)
    part = next((part for each in messages for part in each["content"] if part.get("shortenable")), None)
    if part is None:
        return conversation
    text, cut = part["text"], replace(conversation, messages=messages)
    options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    offsets = tokenizer_of(processor)(text, **options)["offset_mapping"]
    ends = [0, *(end for _, end in offsets[:max_length])]  # no more tokens of the text can be left
    while True:
        part["text"] = text[: ends[-1]]
        excess = count_tokens(processor, cut) - max_length
        if excess <= 0 or len(ends) == 1:
            return cut
        # Repeated only if tokens at the cut fuse with the next ones, or a character has several of them.
        del ends[max(1, len(ends) - excess) :]


def rendered(processor: Processor, conversation: Conversation) -> str:
    """The text that the model reads before it is tokenized, with a placeholder for each image.

    An unanswered conversation ends with the prompt for an answer. Raises UserError if the chat template fails.
    """
    messages = _messages(processor, conversation)
    render = partial(_render, tokenizer_of(processor))
    with _template_errors(processor, conversation):
        if conversation.answered():
            return training_text(render, _turn(processor), messages)
        return render(messages, add_generation_prompt=True)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, marks: bool = False, **options: Any) -> Any:
    """The text; with `marks` the spans between the template's own marks, in characters of it."""
    options |= {"chat_template": tokenizer.chat_template, **tokenizer.special_tokens_map}
    (text,), spans = render_jinja_template([messages], return_assistant_tokens_mask=marks, **options)
    return spans[0] if marks else text


def _turn(processor: Processor) -> Turn:
    """The text of the chat template around an answer. Raises UserError if a model could not be trained by it."""
    return _turn_by(processor, tokenizer_of(processor).chat_template)


@cache
def _turn_by(processor: Processor, template: str) -> Turn:
    tokenizer = tokenizer_of(processor)
    texts = (("user", "Who?"), ("assistant", ANSWER), ("user", NEXT), ("assistant", ANSWER))
    probe = _messages(processor, Conversation(sample_id="probe", messages=list(starmap(message, texts))))
    render = partial(_render, tokenizer)
    with library_errors(f"{_template_of(tokenizer)} cannot be used"):
        turn = find_turn(render, probe, [*filter(None, tokenizer.convert_ids_to_tokens(sorted(end_tokens(tokenizer))))])
        if _MARK.search(template):
            marks = _render(tokenizer, probe, marks=True)
            for _, end in answer_spans(render, turn, probe, training_text(render, turn, probe)):
                if not any(first < end <= last for first, last in marks):
                    raise ValueError(
                        "its marks ({% generation %}) leave out the end of an answer, "
                        f"{turn.last_end!r}, so the model would never stop"
                    )
    return turn


def check_chat_template(folder: Path) -> None:
    """Raises UserError if the model's tokenizer cannot be loaded, or its chat template cannot render a conversation, or
    the prompt for an ordinary answer is no beginning of the answered conversation, in text and in (embedded) tokens."""
    processor, rows = load_processor(folder, None), load_config(folder).get_text_config().vocab_size
    messages = [message(role, "You?") for role in ("user", "assistant", "user", "assistant")]
    for end in (2, 4):
        prompt, text = (
            rendered(processor, Conversation(sample_id="check", messages=messages[:n])) for n in (end - 1, end)
        )
        prompted, trained = tokenizer_of(processor)([prompt, text], add_special_tokens=False)["input_ids"]
        if (last := max(*trained, tokenizer_of(processor).pad_token_id)) >= rows:
            token = f"{tokenizer_of(processor).decode(last)!r}, number {last:,} of its tokenizer"
            raise UserError(f"{folder} has {rows:,} embeddings, none of {token}: add them by resize_token_embeddings")
        if not text.startswith(prompt) or trained[: len(prompted)] != prompted:
            tokens = ", in tokens" * text.startswith(prompt)
            raise UserError(
                f"by the chat template of {folder}, a model would be trained on {text!r}, but prompted with "
                f"{prompt!r}, which is no beginning of it{tokens}; {PAGE} says how to bring another"
            )


def check_carried(processor: Processor, conversations: Iterable[Conversation]) -> None:
    """Raises UserError if the chat template does not render one of these answered conversations as its prompt and then
    the answer, or leaves out or changes a message of it: Qwen3's keeps no thinking in earlier answers."""
    problems = [problem for each in conversations if (problem := _not_carried(processor, each))]
    if problems:
        others = f"; {len(problems) - 1:,} more of the samples are like it" if len(problems) > 1 else ""
        raise UserError(problems[0] + others)


def _not_carried(processor: Processor, conversation: Conversation) -> str | None:
    prompt = rendered(processor, replace(conversation, messages=conversation.messages[:-1]))
    text, place = rendered(processor, conversation), 0
    base = tokenizer_of(processor).name_or_path
    if not text.startswith(prompt):
        return (
            f"sample {conversation.sample_id}: by the chat template of {base}, a model would be trained on "
            f"...{text[-200:]!r}, but prompted with ...{prompt[-100:]!r}, which is no beginning of it; leave out of "
            "the answer what the template changes, such as <think>, or set the recipe's template_options, such as "
            "{enable_thinking: true}"
        )
    for number, turn in enumerate(conversation.messages, start=1):
        pieces = [piece for part in turn["content"] for piece in _THINKING.split(part.get("text", ""))]
        for piece in pieces[-1:] if number - 1 in conversation.unlearnt else pieces:
            if (found := text.find(piece.strip(), place)) < 0:
                return (
                    f"sample {conversation.sample_id}: the chat template of {base} leaves out or changes a part of "
                    f"message {number}, {shown(piece.strip())}; thinking may be in the last answer, or in an earlier "
                    "one with `weight: 0`"
                )
            place = 0 if turn["role"] == "system" else found + len(piece.strip())  # it may stand in the last question
    return None


def fuses_with_prompt(processor: Processor, conversation: Conversation) -> bool:
    """Whether the first token of the last answer begins in its prompt, as two line breaks may be one token. It is not
    learnt: a model that has the prompt's own tokens cannot generate it."""
    tokenizer, asked = tokenizer_of(processor), replace(conversation, messages=conversation.messages[:-1])
    prompt, text = rendered(processor, asked), rendered(processor, conversation)
    # Nothing fuses across a special token, so the text from the last one on has the tokens of the whole.
    begin = max((prompt.rfind(token) for token in _markup(tokenizer, tokenizer.chat_template)), default=-1)
    prompt, text = prompt[max(begin, 0) :], text[max(begin, 0) :]
    tokens = tokenizer(text, add_special_tokens=False)
    first = tokens.char_to_token(len(prompt))
    return first is not None and tokens.token_to_chars(first).start < len(prompt)


def accepts(processor: Processor, conversation: Conversation) -> bool:
    """Whether the model takes all parts of a conversation: a text model takes no images."""
    return not (isinstance(processor, PreTrainedTokenizerBase) and conversation.images)


def _messages(processor: Processor, conversation: Conversation) -> list[dict[str, Any]]:
    """The messages in the template's form: templates of text models, Qwen2.5's among them, know no text parts."""
    if not isinstance(processor, PreTrainedTokenizerBase):
        return conversation.messages
    if not accepts(processor, conversation):
        known = [name for name, family in FAMILIES.items() if family.vision]
        raise UserError(
            f"sample {conversation.sample_id} has images, and {processor.name_or_path} is a text model; take a base of "
            f"{', '.join(known)}, or leave the images out"
        )
    return [{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in conversation.messages]


def _refuse_markup(processor: Processor, conversation: Conversation) -> None:
    """Raises UserError if a text holds a token with which the chat template separates messages."""
    tokenizer = tokenizer_of(processor)
    markup = _markup(tokenizer, tokenizer.chat_template)
    for text in (part.get("text", "") for turn in conversation.messages for part in turn["content"]):
        if token := next((token for token in markup if token in text), None):
            raise UserError(f"a text of sample {conversation.sample_id} holds chat markup, {token}; remove it")


@cache
def _markup(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """Special tokens that the template writes. Some have no name: Gemma 3's <end_of_turn> is only an added token."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = template + "".join(token for name, token in tokenizer.special_tokens_map.items() if name in template)
    return tuple(sorted(token for token in added.union(tokenizer.all_special_tokens) if token in written))


def _template_errors(processor: Processor, conversation: Conversation) -> AbstractContextManager[None]:
    where = _template_of(tokenizer_of(processor))
    return library_errors(f"{where} fails on the messages of sample {conversation.sample_id}")


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"the chat template of {tokenizer.name_or_path} (chat_template.jinja, or in tokenizer_config.json)"
