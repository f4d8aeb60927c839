"""Qwen3-VL, dense. Source of its boxes: the grounding examples of its model card, 0 to 1000 whatever the picture."""

from stages.kit.families import Boxes, Family, Vision
from stages.kit.families.qwen2_vl import TOKENS

FAMILY = Family(
    name="Qwen3-VL",
    vision=Vision(
        tower=r"model\.visual\.",
        projector=r"model\.visual\.(merger|deepstack_merger_list)\.",
        linears=("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"),
        tokens=TOKENS,
        video_processor="Qwen3VLVideoProcessor",
        boxes=Boxes(form="json", steps=1000),
        same_from_features=False,  # some features go to several layers
    ),
    same_without_padding=True,
    same_with_fused_kernels=False,
)
