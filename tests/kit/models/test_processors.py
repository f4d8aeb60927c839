from typing import Any

import pytest

from stages.kit.data.conversation import Conversation
from stages.kit.models.prompts import count_tokens, encode
from tests.tiny import SMALLEST_TEXT
from tools.tiny.architecture import build_tiny_qwen2

# As Qwen2.5-7B-Instruct's tokenizer_config.json renders a message: it adds its content to a text.
PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.fixture
def tokenizer() -> Any:
    return build_tiny_qwen2(["tôi đi học"], SMALLEST_TEXT)[1]


def turns(*contents: Any) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]
    return Conversation(sample_id="sample", messages=messages)


@pytest.mark.parametrize("template", ["own", "plain"])
def test_text_parts_are_one_text_to_a_text_model(tokenizer: Any, template: str):
    if template == "plain":
        tokenizer.chat_template = PLAIN_TEMPLATE
    parts = turns([{"type": "text", "text": "tôi đi"}, {"type": "text", "text": " đâu ?"}])
    (ids,) = encode(tokenizer, [parts], padding_side="left")["input_ids"].tolist()
    assert tokenizer.decode(ids).endswith("<|im_start|>user\ntôi đi đâu ?<|im_end|>\n<|im_start|>assistant\n")
    assert [ids] == encode(tokenizer, [turns("tôi đi đâu ?")], padding_side="left")["input_ids"].tolist()
    assert count_tokens(tokenizer, parts) == len(ids)


def test_an_answered_conversation_ends_with_its_answer(tokenizer: Any):
    (ids,) = encode(tokenizer, [turns("tôi ?", [{"type": "text", "text": "đi"}])], padding_side="right")["input_ids"]
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\nđi<|im_end|>\n")
