"""Phi-3 and Phi-3.5. Queries, keys and values are one layer, gate and up another."""

from stages.kit.families import Family

FAMILY = Family(
    name="Phi-3, Phi-3.5",
    linears=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    same_without_padding=True,
    same_with_fused_kernels=False,
)
