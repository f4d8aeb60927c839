"""Qwen2-VL."""

from stages.kit.families import Boxes, Family, Vision

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

FAMILY = Family(
    name="Qwen2-VL",
    vision=Vision(
        tower=r"model\.visual\.",
        projector=r"model\.visual\.merger\.",
        linears=("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"),
        tokens=TOKENS,
        video_processor="Qwen2VLVideoProcessor",
        boxes=Boxes(form="grounding", steps=1000),
        same_from_features=True,
    ),
    same_without_padding=True,
    same_with_fused_kernels=True,
)
