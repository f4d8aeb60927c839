"""BLEURT, a learned measure of how alike two texts are in meaning, where its checkpoint is at hand.

Source: Sellam, Das and Parikh, "BLEURT: Learning Robust Metrics for Text Generation", ACL 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from stages.core.errors import UserError
from stages.kit.models.folders import check_model_folder

CHECKPOINT = Path("data/bleurt")
"""A BLEURT checkpoint as a transformers folder: a BERT that classifies pairs of texts, with a single output."""

_TOKENIZERS = ("tokenizer.json", "vocab.txt")
"""Files that a tokenizer is read from; of none transformers makes an empty one."""


def load_bleurt(folder: Path = CHECKPOINT) -> Callable[[str, str], float] | None:
    """The measure, of (answer, reference), about 0 for unrelated texts and 1 for equal ones; None without a checkpoint.

    Raises UserError where the folder holds anything else.
    """
    if not folder.is_dir():
        return None
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    fix = (
        "expected is BLEURT as transformers saves it: config.json of a BERT with one output, model.safetensors and its "
        "tokenizer; put that there, or remove the folder"
    )
    offline = {"local_files_only": True, "trust_remote_code": False}
    try:
        _check_files(folder)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **offline
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
    except UserError as error:
        raise UserError(f"{error.message}; {fix}") from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # what transformers has against a folder
        raise UserError(f"{folder} cannot be loaded: {' '.join(str(error).split())}; {fix}") from error
    if model.config.num_labels != 1:
        raise UserError(f"{folder} holds a classifier of {model.config.num_labels} outputs, BLEURT has 1; {fix}")
    if lacking := sorted(loaded["missing_keys"]):
        raise UserError(f"{folder} lacks the weights {', '.join(lacking[:3])}; {fix}")
    model.eval()

    @cache
    def measure(answer: str, reference: str) -> float:
        inputs = tokenizer(reference, answer, truncation="longest_first", max_length=512, return_tensors="pt")
        with torch.inference_mode():
            return model(**inputs).logits.item()

    return measure


def _check_files(folder: Path) -> None:
    check_model_folder(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(f"{folder} has no tokenizer: neither {' nor '.join(_TOKENIZERS)}")
