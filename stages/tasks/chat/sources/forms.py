"""The forms of a conversation, and the meaning of every key of a row and of a message.

A key is read, or changes in some trainer's format what is learnt and is refused, or describes the row. Nothing else is
in a message or in a part of its content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

from stages.core.errors import pluralize
from stages.core.records import cut, dotted, shown
from stages.data.folder import IMAGES
from stages.data.sources import is_set
from stages.data.texts import SURROGATE, markup_problem
from stages.tasks.chat.samples import Message, order_problems

PLACEHOLDER = "<image>"
"""The place of an image in a text, as in LLaMA-Factory, ms-swift and LLaVA."""
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
"""Roles by their names; the last two are ShareGPT's."""
LEARNT = ("weight", "loss_weight", "train", "loss")
"""Keys of a turn that say whether it is learnt, 1 or 0: OpenAI's, LLaMA-Factory's, axolotl's, ms-swift's."""

PART_IMAGES = ("image", "path", "url", "image_url")
"""Keys of a part of a content that holds its image itself: Qwen's, transformers' and OpenAI's."""
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys of the thinking before an assistant's answer: DeepSeek's, vLLM's, gpt-oss's."""


class Form(NamedTuple):
    name: str
    needed: tuple[str, ...]
    """Keys that make a row one of this form."""
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return self.needed + self.optional

    def __str__(self) -> str:
        return " and ".join(self.needed)


FORMS = (
    Form("messages (OpenAI, TRL, ms-swift)", ("messages",)),
    Form("conversations (ShareGPT, LLaMA-Factory, LLaVA)", ("conversations",)),
    Form("conversation (LMSYS)", ("conversation",)),
    Form("prompt and completion (TRL)", ("prompt", "completion")),
    Form("instruction and output (Alpaca, LLaMA-Factory)", ("instruction", "output"), ("input", "history")),
    Form("instruction and response (Dolly)", ("instruction", "response"), ("context",)),
    Form("query and response (ms-swift)", ("query", "response"), ("history",)),
)
BESIDE = ("system", "images", "image")
"""Keys that are read beside each form's."""
TURNS = {key for form in FORMS for key in form.keys}
READ = TURNS.union(BESIDE)

REFUSED = {
    key: meaning
    for meaning, keys in {
        "a video (LLaMA-Factory, ms-swift)": "video videos video_path video_url",
        "a recording (LLaMA-Factory, ms-swift, OpenAI)": "audio audios audio_path audio_url",
        "an image under another name; `image` and `images` are read": (
            "image_path image_paths image_file image_url image_urls image_base64 image_bytes img imgs"
        ),
        "calls of tools (OpenAI, TRL, LLaMA-Factory)": (
            "tools tool_calls tool_call_id tool_choice parallel_tool_calls functions function_call"
        ),
        "thinking before an answer (DeepSeek, Qwen3)": "reasoning_content reasoning thinking",
        "settings of the chat template (TRL, ms-swift)": "chat_template chat_template_kwargs enable_thinking",
        "KTO's verdict on an answer (TRL, LLaMA-Factory, ms-swift)": "label kto_tag is_correct",
        "a preference between answers (TRL, OpenAI, LLaMA-Factory, ms-swift)": (
            "chosen rejected margin preferred_output non_preferred_output rejected_response rejected_messages "
            "rejected_images positive_messages negative_messages"
        ),
        "steps with a verdict each (TRL)": "completions labels",
        "the part of a row or turn in the loss (Fireworks, LLaMA-Factory, axolotl, NeMo, slime)": (
            "weight weights loss_weight loss_mask loss_scale train train_detail loss mask sample_weight "
            "assistant_masks completion_mask"
        ),
        "a form that the answer has to have (OpenAI)": "response_format",
        "boxes for <bbox> in a text (ms-swift)": "objects",
        "tokens in place of text (TRL)": "input_ids attention_mask position_ids",
        "a system prompt under another name; `system` is read": (
            "system_prompt system_message system_instruction instructions preamble"
        ),
        "texts that the question is about (Cohere)": "documents",
        "a text after the answer (OpenAI)": "suffix",
        "another conversation (Gemini, Cohere, axolotl)": "contents chat_history segments",
    }.items()
    for key in keys.split()
}
"""Keys that change what is learnt in some trainer's format, by the names that these give them, with what they hold."""
WAY_OUT = "remove it, or add it to reader.ignore"
_IMAGE_TAG = re.compile(r"<img>[^<>]+</img>")
"""An image in a text, as Qwen-VL and ms-swift 2 have it."""
_OTHER_PLACE = re.compile(r"<(image[ _-]?(\d*|placeholder)|img_context|video|audio|bbox|ref-object)>", re.IGNORECASE)
"""The place of an image, a video, a recording or a box, which is text in a message without images."""


class Turn(NamedTuple):
    message: Message
    offsets: Sequence[int] = ()
    """Characters before each image of the message."""
    images: Sequence[Any] = ()
    """Images within its parts."""
    learnt: bool = True


class ParsedConversation(NamedTuple):
    problems: Sequence[str]
    """All of the row's; with any, the rest is as far as it was read."""
    images: Sequence[Any]
    """Values that stand for images, of the row, or else of its messages' parts if there are no problems."""
    messages: tuple[Message, ...] = ()
    image_positions: Sequence[tuple[int, int]] = ()
    """(message, offset) of each image: the message that shows it, counted from 0, and the characters before it."""
    unlearnt: tuple[int, ...] = ()
    """Numbers, counted from 0, of the assistant's messages that are not to be learnt."""


def form_of(content: Mapping[str, Any]) -> Form | None:
    """The first form with keys that a row has."""
    return next((form for form in FORMS if all(content.get(key) not in (None, []) for key in form.needed)), None)


def unread_keys(content: Mapping[str, Any]) -> list[str]:
    """The keys of a row that are neither read nor refused."""
    return [key for key, value in content.items() if is_set(value) and key not in READ and not _meaning(key)]


@lru_cache(maxsize=4096)
def _meaning(key: str) -> str:
    """The meaning of a key that is refused, also in another case or without its underscores; empty for another key."""
    plain = _plain(key)
    if key not in READ and plain in _PLAIN_READ:
        return f"another spelling of {_PLAIN_READ[plain]}, which is read"
    return _PLAIN_REFUSED.get(plain, "")


def _plain(key: str) -> str:
    return re.sub("[-_ ]", "", key).lower()


_PLAIN_READ = {_plain(key): key for key in READ}
_PLAIN_REFUSED = {_plain(key): meaning for key, meaning in REFUSED.items()}


def _images_of(content: Mapping[str, Any]) -> list[Any]:
    """The values of a row that stand for images."""
    values = [content[name] for name in ("images", "image") if is_set(content.get(name))]
    return [image for value in values for image in (value if isinstance(value, list) else [value])]


def parse_conversation(content: Mapping[str, Any]) -> ParsedConversation:
    """The conversation of a row, with all its problems."""
    keys = [key for key, value in content.items() if is_set(value)]
    form, images = form_of(content), _images_of(content)
    meaning = partial(_refused, content)
    if refused := sorted(filter(meaning, keys), key=meaning):
        return ParsedConversation([_refusal(*same, meaning=what) for what, same in groupby(refused, meaning)], images)
    if form is None:
        named = cut(", ".join(dotted([key]) for key in keys)) or "nothing"
        problem = f"no conversation: found {named}, expected {', or '.join(map(str, FORMS))}"
        return ParsedConversation([problem], images)
    turns, problems = list[Turn](), list[str]()
    for name, value in _sections(content, form):
        placed = sum(len(turn.offsets) for turn in turns)
        turns += _turns(name, value, problems, placed, placeholders=images != [])
    messages, held = tuple(turn.message for turn in turns), [image for turn in turns for image in turn.images]
    # A turn's text once more, as in UltraChat's prompt or Magpie's instruction and response, is no other conversation.
    own = [*map(content.get, form.keys), *(message.content for message in messages)]
    if beside := [key for key in keys if key in TURNS and content[key] not in own]:
        problems.append(f"{', '.join(beside)} beside {form}: a row has one conversation; {WAY_OUT}")
    problems += ["image and images are both set"] * ("images" in keys and "image" in keys)
    if held and (images or any(PLACEHOLDER in message.content for message in messages)):
        problems.append(f"parts of messages hold images beside {'the row' if images else PLACEHOLDER}")
    count = len(images or held)
    positions = [(number, offset) for number, turn in enumerate(turns) for offset in turn.offsets]
    if count and not positions:
        positions = [(next((at for at, each in enumerate(messages) if each.role == "user"), 0), 0)] * count
    elif count != len(positions):
        problems.append(f"{pluralize(len(positions), 'place')} of an image, but {pluralize(count, 'image')}")
    problems = problems or _text_problems(messages, {number for number, _ in positions})
    problems = problems or order_problems(messages)
    if not problems:
        others = [number + 1 for number, _ in positions if messages[number].role != "user"]
        problems = [f"message {number} shows an image, which only a user's message may" for number in others[:1]]
    unlearnt = tuple(number for number, turn in enumerate(turns) if not turn.learnt)
    if not problems and unlearnt[-1:] == (len(messages) - 1,):
        last = "the last turn is scored, but not to be learnt; leave it out, with its question"
        some = len(unlearnt) < sum(message.role == "assistant" for message in messages)
        problems = [last if some else "no turn is to be learnt"]
    return ParsedConversation(problems, images if problems else images or held, messages, positions, unlearnt)


def _refused(content: Mapping[str, Any], key: str) -> str:
    """The meaning of a key that is refused for its name, or as its text is an image's name; empty for another key."""
    value = content[key]
    texts = [each.lower() for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    if key not in READ and any(each.endswith(IMAGES) and "\n" not in each for each in texts):
        return REFUSED["image_path"]
    return "" if value == "[]" else _meaning(key)  # LLaMA-Factory writes an empty list of tools as a text


def _refusal(*keys: str, where: str = "", meaning: str = "") -> str:
    """keys: of one meaning, by name unless it is given."""
    names, are = ", ".join(dotted([key]) for key in keys), "is" if len(keys) == 1 else "are"
    meaning = f": {found}" if (found := meaning or _meaning(keys[0])) else ""
    return f"{where}{names} {are} set, which this task does not read{meaning}{'' if where else f'; {WAY_OUT}'}"


def _sections(content: Mapping[str, Any], form: Form) -> Iterator[tuple[str, Any]]:
    """The lists of messages that make up a conversation, in order, with a name for each."""

    def as_list(role: str, value: Any) -> Any:
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    if is_set(content.get("system")):
        yield "system", as_list("system", content["system"])
    if len(form.needed) == 1:
        yield form.needed[0], content[form.needed[0]]
        return
    history = content.get("history") if "history" in form.optional else None
    for number, pair in enumerate(history if isinstance(history, list) else [history] * is_set(history), start=1):
        sides = pair if isinstance(pair, list) and len(pair) == 2 else [pair]
        for role, side in zip(("user", "assistant"), sides, strict=False):
            yield f"history, turn {number}", as_list(role, side)
    question, answer = form.needed
    keys = [key for key in (question, "input", "context") if key in form.keys and is_set(content.get(key))]
    asked = {key: content[key] for key in keys}
    if all(isinstance(each, str) for each in asked.values()):
        asked = {question: "\n".join(asked.values())}
    yield from ((key, as_list("user", value)) for key, value in asked.items())
    yield answer, as_list("assistant", content[answer])


def _turns(name: str, value: Any, problems: list[str], placed: int, *, placeholders: bool) -> Iterator[Turn]:
    """The turns of a list of messages. Appends to `problems`. placed: the number of images before."""
    if not isinstance(value, list):
        text = "" if isinstance(value, str) else "a text or "
        problems.append(f"{name} is {shown(value)}, expected {text}a list of messages")
        return
    for number, message in enumerate(value, start=1):
        where = f"{name}, message {number}"
        if not isinstance(message, dict):
            problems.append(f"{where} is {shown(message)}, expected a role and a content")
            continue
        keys = ("from", "value") if message.get("role") is None and "from" in message else ("role", "content")
        named, content = (message.get(key) for key in keys)
        role = ROLES.get(str(named), str(named))
        if str(named) not in ROLES:
            problems.append(f"{where} has the role {shown(named)}, expected one of {', '.join(ROLES)}")
        text, offsets, images, wrong = _text(content, placed, placeholders=placeholders)
        placed += len(offsets)
        thoughts = {each for key in THINKING if isinstance(each := message.get(key), str) and each.strip()}
        thinks = role == "assistant" and len(thoughts) == 1 and not text.lstrip().startswith("<think>")
        text = f"<think>\n{thoughts.pop().strip()}\n</think>\n\n{text}" if thinks else text
        read = (*keys, *LEARNT, *(THINKING if thinks else ()))
        unread = [key for key, each in message.items() if key not in read and is_set(each)]
        problems += [f"{where} {problem}" for problem in wrong] + [_refusal(key, where=f"{where}: ") for key in unread]
        flags = {key: message[key] for key in LEARNT if message.get(key) is not None}
        if any(flag not in (0, 1) for flag in flags.values()) or len({bool(flag) for flag in flags.values()}) > 1:
            problems.append(f"{where} has {shown(flags)}, expected 1 or true to learn it, 0 or false not to")
        elif role != "assistant" and any(flags.values()):
            problems.append(f"{where} has {shown(flags)}, but only the assistant's turns are learnt")
        yield Turn(Message(role, text), offsets, images, all(flags.values()) or role != "assistant")


def _text(content: Any, placed: int, *, placeholders: bool) -> tuple[str, list[int], list[Any], list[str]]:
    """The text of a content, which may be in parts, the offsets of images in it, those that it holds, its problems."""
    if not isinstance(content, str | list) or content == []:
        return "", [], [], [f"has the content {shown(content)}, expected text or parts of it"]
    text, offsets, images, problems = "", list[int](), list[Any](), list[str]()
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind, inner = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        own = ["type", "text"] if kind == "text" else ["type"]
        if kind in ("image", "image_url"):
            own += [key for key in PART_IMAGES if is_set(part.get(key))][:1]
            image = part.get(own[-1])
            if isinstance(image, dict) and [key for key, value in image.items() if is_set(value)] == ["url"]:
                image = image["url"]
            images += [image] * (len(own) - 1)
            own += ["index"] * (part.get("index") == placed + len(offsets))  # as in TRL's llava-instruct-mix-vsft
            offsets.append(len(text))
        elif kind != "text" or not isinstance(inner, str):
            problems.append(f"has the part {shown(part)}, expected a text or an image")
            continue
        unread = [key for key in part if key not in own and is_set(part[key])]
        problems += [_refusal(key, where="has a part in which ") for key in unread]
        for index, piece in enumerate((inner or "").split(PLACEHOLDER) if placeholders else [inner or ""]):
            offsets += [len(text)] * (index > 0)
            text += piece
    return text, offsets, images, problems


def _text_problems(messages: Sequence[Message], with_images: set[int]) -> list[str]:
    texts = [message.content for message in messages]
    shown_beside = (_OTHER_PLACE.search(texts[number]) for number in sorted(with_images))
    markup, tag = markup_problem(*texts), next(filter(None, (*map(_IMAGE_TAG.search, texts), *shown_beside)), None)
    return [
        *(["a text holds half of a surrogate pair"] if any(SURROGATE.search(text) for text in texts) else []),
        *(
            f"message {number + 1} is empty"
            for number, text in enumerate(texts)
            if not text.strip() and number not in with_images and messages[number].role != "system"
        ),
        *([markup] if markup else []),
        *([f"a text holds {shown(tag[0])}; as an image, {PLACEHOLDER} with `images` is read"] if tag else []),
    ]
