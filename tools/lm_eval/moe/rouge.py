"""How the harness scores an answer about a meeting. It loads this file by its path, so it imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def nearest(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """F-measures of the answer against the correct one that it is nearest to, from 0 to 1.

    By Google's rouge-score, without stemming, which comes with lm-eval; ours are torchmetrics'.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGES))
    scores = [scorer.score(correct, results[0]) for correct in doc["answers"]]
    return {key: max(score[key].fmeasure for score in scores) for key in ROUGES}
