"""How many words an answer shares with a reference: ROUGE and SQuAD's F1, as torchmetrics computes them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any


def rouge(answer: str, reference: str, keys: Sequence[str], *, of_any_language: bool = False) -> dict[str, float]:
    """F-measures, from 0 to 1, of one-word, two-word and longest common sequences: rouge1, rouge2 and rougeL of `keys`.
    As Google's rouge-score without stemming.

    of_any_language: words are runs of Unicode's letters and digits, not of a to z and digits alone.
    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """
    # Imports torch, which what only reads this module's names need not wait for.
    from torchmetrics.functional.text.rouge import rouge_score

    scores = rouge_score(answer, reference, rouge_keys=tuple(keys), normalizer=_words if of_any_language else None)
    return {key: float(scores[f"{key}_fmeasure"]) for key in keys}


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words, in any order, from 0 to 1: without case, ASCII punctuation and English articles.

    Source: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016, evaluate-v1.1.
    """
    from torchmetrics.functional.text.squad import squad

    target: dict[str, Any] = {
        "id": "",
        "answers": {"answer_start": [0], "text": [unicodedata.normalize("NFC", reference)]},
    }
    found = squad({"id": "", "prediction_text": unicodedata.normalize("NFC", answer)}, target)
    return float(found["f1"]) / 100


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFC", text).casefold())
