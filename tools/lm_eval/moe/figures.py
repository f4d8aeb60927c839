"""What the harness is asked for, and what of ours it is to agree with."""

from __future__ import annotations

from pathlib import Path

from tools.lm_eval.moe.rouge import ROUGES
from tools.lm_eval.scoring import Figure

TASKS_DIR = Path(__file__).parent
_BARE = "as lm-eval's own tasks have it, without the end of an answer's turn"

FIGURES = (
    Figure(heading="MC1", documents="truthfulqa", task="bakeoff_mc1", metric="acc", ours="mc1"),
    Figure(heading="MC2", documents="truthfulqa", task="bakeoff_mc2", metric="acc", ours="mc2"),
    Figure(heading="MC1, bare", documents="truthfulqa", task="bakeoff_mc1_bare", metric="acc", note=_BARE),
    Figure(heading="MC2, bare", documents="truthfulqa", task="bakeoff_mc2_bare", metric="acc", note=_BARE),
    *(
        Figure(heading=heading, documents="qmsum", task="bakeoff_qmsum", metric=key, ours=key)
        for key, heading in ROUGES.items()
    ),
)
