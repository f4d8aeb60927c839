"""BLEURT, a learned measure of how alike two texts are in meaning, where its checkpoint is at hand.

Source: Sellam, Das and Parikh, "BLEURT: Learning Robust Metrics for Text Generation", ACL 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

CHECKPOINT = Path("data/bleurt")
"""A BLEURT checkpoint as a transformers folder: a BERT that classifies pairs of texts, with a single output."""


def load_bleurt(folder: Path = CHECKPOINT) -> Callable[[str, str], float] | None:
    """The measure, of (answer, reference), about 0 for unrelated texts and 1 for equal ones; None without a checkpoint.

    Raises UserError where the folder holds another kind of model.
    """
    if not folder.is_dir():
        return None
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from stages.kit.errors import UserError

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
    ).eval()
    if model.config.num_labels != 1:
        raise UserError(
            f"{folder} holds a classifier of {model.config.num_labels} outputs, BLEURT has 1; "
            "put its checkpoint there, or remove the folder"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    @cache
    def measure(answer: str, reference: str) -> float:
        inputs = tokenizer(reference, answer, truncation="longest_first", max_length=512, return_tensors="pt")
        with torch.inference_mode():
            return model(**inputs).logits.item()

    return measure
