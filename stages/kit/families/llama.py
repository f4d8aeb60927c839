"""Llama 3, 3.1, 3.2 and 3.3, and what others publish in its form."""

from stages.kit.families import Family

# Lines of the chat templates of Llama 3.1 and 3.2, which TRL knows without marking their answers.
_ANY_TURN = """\
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
"""
_MARKED = """\
    {%- if message.role == 'assistant' and 'tool_calls' not in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}
        {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- elif not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
"""

FAMILY = Family(
    name="Llama 3, 3.1, 3.2, 3.3",
    answer_marks={_ANY_TURN: _MARKED},
    same_without_padding=True,
    same_with_fused_kernels=False,
)
