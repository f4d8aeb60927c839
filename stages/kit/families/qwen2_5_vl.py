"""Qwen2.5-VL. Source of its boxes: the grounding examples of its model card, in pixels of the resized picture."""

from stages.kit.families import Boxes, Family, Vision
from stages.kit.families.qwen2_vl import TOKENS

FAMILY = Family(
    name="Qwen2.5-VL",
    vision=Vision(
        tower=r"model\.visual\.",
        projector=r"model\.visual\.merger\.",
        linears=("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        tokens=TOKENS,
        video_processor="Qwen2VLVideoProcessor",
        boxes=Boxes(form="json", steps=None),
        same_from_features=False,
    ),
    same_without_padding=True,
    same_with_fused_kernels=False,
)
