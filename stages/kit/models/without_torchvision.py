"""Qwen2-VL's processor on a machine without torchvision: pictures, no videos.

transformers reads videos with torchvision, and its Qwen2VLProcessor insists on a video processor even where
only pictures are used (huggingface/transformers#48558). PyPI has no torchvision for the CPU build of torch,
so on a CPU machine this class takes its place. It reads and writes the same files, under the same class name.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2VLProcessor
from transformers.image_processing_utils import BaseImageProcessor

VIDEO_SETTINGS = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
"""What a video processor shares with the image processor beside it."""


class PicturesOnlyProcessor(Qwen2VLProcessor):
    """A Qwen2VLProcessor of an image processor and a tokenizer alone; a video is refused."""

    def __init__(
        self,
        image_processor: BaseImageProcessor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chat_template: str | None = None,
        **_: Any,  # the settings of the video processor, as read from a folder
    ):
        # ProcessorMixin takes its parts from this signature: video_processor is not one of them.
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def to_dict(self) -> dict[str, Any]:
        """What is saved: the same as by Qwen2VLProcessor, so that it loads where torchvision is installed."""
        settings = super().to_dict()
        images = settings["image_processor"]
        settings["video_processor"] = {"video_processor_type": "Qwen2VLVideoProcessor"}
        settings["video_processor"] |= {name: images[name] for name in VIDEO_SETTINGS if name in images}
        settings["processor_class"] = "Qwen2VLProcessor"
        return settings
