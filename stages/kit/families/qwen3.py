"""Qwen3, dense."""

from stages.kit.families import Family

# An answer begins with a <think> block where nobody asks anything after it; TRL's marked template writes one in each.
_LAST = "{%- if loop.index0 > ns.last_query_index %}"
_HEADER = "{{- '<|im_start|>' + message.role + '\\n"
_END = "{{- '<|im_end|>\\n' }}\n    "
_TOOL = '{%- elif message.role == "tool" %}'

FAMILY = Family(
    name="Qwen3",
    answer_marks={
        _LAST: _HEADER + "' }}{%- generation %}" + _LAST,
        _HEADER + "<think>": "{{- '<think>",
        _HEADER + "' + content }}": "{{- content }}",
        _END + _TOOL: _END + "{%- endgeneration %}" + _TOOL,
    },
    same_without_padding=True,
    same_with_fused_kernels=False,
)
