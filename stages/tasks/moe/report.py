"""Comparison of a mixture and its experts: the columns, the evidence, and the questions of the experiment."""

from __future__ import annotations

from functools import partial

from stages.evaluation.statistics import perplexity
from stages.reporting.compare import Metric, Question, TaskReport

_figure = partial(Metric, optional=True)


def _perplexity(domain: str, name: str) -> Metric:
    return _figure(
        *(f"perplexity_{domain}", f"{name} perplexity", ".2f"),
        f"Perplexity on the best answers of {name}: e to the mean negative log-likelihood of a token, over all "
        "tokens of all answers, the ends of their turns included. 1 is certainty; lower is better.",
        higher_is_better=False,
        evidence=(f"{domain}_nats", f"{domain}_tokens"),
        statistic=perplexity,
        among=domain,
    )


REPORT = TaskReport(
    task="moe",
    title="Experts to a mixture",
    metrics=(
        Metric(
            *("perplexity", "Perplexity", ".2f"),
            "Geometric mean of the domains' perplexities, in which each domain counts the same. Lower is better.",
            higher_is_better=False,
            evidence=("truthfulqa_nats", "truthfulqa_tokens", "qmsum_nats", "qmsum_tokens"),
            statistic=perplexity,
        ),
        _perplexity("truthfulqa", "TruthfulQA"),
        _perplexity("qmsum", "QMSum"),
        _figure(
            *("mc1", "MC1", ".1%"),
            "TruthfulQA: share of questions with a best answer that is likelier than every false one.",
            evidence=("mc1",),
            among="truthfulqa",
        ),
        _figure(
            *("mc2", "MC2", ".3f"),
            "TruthfulQA: share of the probability of all answers, true and false, that the true ones have.",
        ),
        _figure(
            *("bleu_difference", "BLEU diff", "+.3f"),
            "TruthfulQA: BLEU of the completion against the nearest correct answer, less that against the nearest "
            "incorrect one.",
        ),
        _figure(
            *("rougeL_difference", "ROUGE-L diff", "+.3f"),
            "TruthfulQA: the same by ROUGE-L; by ROUGE-1 and ROUGE-2 in metrics.json.",
        ),
        _figure(
            *("bleurt_difference", "BLEURT diff", "+.3f"),
            "TruthfulQA: the same by BLEURT, if its checkpoint is available.",
        ),
        _figure(
            "rouge1", "ROUGE-1", ".3f", "QMSum: words that the completion shares with the true answer, as F-measure."
        ),
        _figure("rouge2", "ROUGE-2", ".3f", "QMSum: the same of pairs of words."),
        _figure(
            *("rougeL", "ROUGE-L", ".3f"),
            "QMSum: the same of the longest common sequence of words.",
            evidence=("rougeL",),
            among="qmsum",
        ),
        _figure(
            *("routing_entropy", "Routing entropy", ".2f"),
            "Of a mixture, how undecided its routers are, from 0, sure of one expert, to 1, all alike.",
        ),
        _figure(
            *("routing_apart", "Domains apart", ".2f"),
            "Of a mixture, how differently it spreads the two domains over its experts, from 0, alike, to 1, "
            "no expert in common. The loads themselves are in metrics.json.",
        ),
    ),
    primary_words="perplexity",
    identity=("id", "question", "truth"),
    shown=("text",),
    questions=(
        *(
            Question(f"{topic}, on {name}", ours, theirs, metric=f"perplexity_{domain}")
            for topic, ours, theirs in (
                ("TruthfulQA's expert against QMSum's", "moe-expert-truthfulqa", "moe-expert-qmsum"),
                ("The gated mixture against TruthfulQA's expert", "moe-gate", "moe-expert-truthfulqa"),
                ("The gated mixture against QMSum's expert", "moe-gate", "moe-expert-qmsum"),
                ("Fine-tuning against the gated mixture", "moe-finetune", "moe-gate"),
            )
            for domain, name in (("truthfulqa", "TruthfulQA"), ("qmsum", "QMSum"))
        ),
        Question(
            "Fine-tuning on TruthfulQA alone against the gated mixture, on QMSum",
            "moe-finetune-alone",
            "moe-gate",
            metric="perplexity_qmsum",
        ),
        Question("A trained gate against the merge as it is", "moe-gate", "base-moe"),
        Question("The gated mixture against one dense model", "moe-gate", "moe-dense"),
        Question("The fine-tuned mixture against one dense model", "moe-finetune", "moe-dense"),
    ),
)
