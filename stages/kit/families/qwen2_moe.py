"""Qwen1.5-MoE, Qwen2-MoE, and the mixtures that are built here."""

from stages.kit.families import Family

FAMILY = Family(
    name="Qwen1.5-MoE, Qwen2-MoE",
    linears=("q_proj", "k_proj", "v_proj", "o_proj"),  # experts are no linear layers, and a shared one may be idle
    same_without_padding=True,
    same_with_fused_kernels=True,
)
