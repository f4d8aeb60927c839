"""Qwen3, dense."""

from stages.kit.families import Family

FAMILY = Family(name="Qwen3", same_without_padding=True, same_with_fused_kernels=False)
