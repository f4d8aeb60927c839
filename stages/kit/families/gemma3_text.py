"""Gemma 3 without pictures: 270M and 1B. Its residual stream leaves the range of fp16 (transformers#36822)."""

from stages.kit.families import Family

FAMILY = Family(
    name="Gemma 3, text",
    overflows_in_fp16=True,
    same_without_padding=False,  # layers with sliding attention
    same_with_fused_kernels=False,
)
