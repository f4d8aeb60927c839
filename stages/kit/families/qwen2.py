"""Qwen2 and Qwen2.5."""

from stages.kit.families import Family

FAMILY = Family(name="Qwen2, Qwen2.5", same_without_padding=True, same_with_fused_kernels=True)
