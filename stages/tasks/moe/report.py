"""Comparison of a mixture and its experts: the columns, the evidence, and the questions of the experiment."""

from __future__ import annotations

from stages.kit.reporting.compare import Metric, Question, TaskReport
from stages.kit.statistics import perplexity


def _perplexity(domain: str, name: str) -> Metric:
    return Metric(
        key=f"perplexity_{domain}",
        heading=f"{name} perplexity",
        format=".2f",
        meaning=f"Perplexity on the best answers of {name}: e to the mean negative log-likelihood of a token, over all "
        "tokens of all answers, the ends of their turns included. 1 is certainty; lower is better.",
        higher_is_better=False,
        optional=True,
        evidence=(f"{domain}_nats", f"{domain}_tokens"),
        statistic=perplexity,
        among=domain,
    )


REPORT = TaskReport(
    task="moe",
    title="Experts to a mixture",
    metrics=(
        Metric(
            key="perplexity",
            heading="Perplexity",
            format=".2f",
            meaning="Geometric mean of the domains' perplexities, in which each domain counts the same. Lower is "
            "better.",
            higher_is_better=False,
            evidence=("truthfulqa_nats", "truthfulqa_tokens", "qmsum_nats", "qmsum_tokens"),
            statistic=perplexity,
        ),
        _perplexity("truthfulqa", "TruthfulQA"),
        _perplexity("qmsum", "QMSum"),
        Metric(
            key="mc1",
            heading="MC1",
            format=".1%",
            meaning="TruthfulQA: share of questions whose best answer the model finds likelier than every false one.",
            optional=True,
            evidence=("mc1",),
            among="truthfulqa",
        ),
        Metric(
            key="mc2",
            heading="MC2",
            format=".3f",
            meaning="TruthfulQA: share of the probability of all answers, true and false, that the true ones have.",
            optional=True,
        ),
        Metric(
            key="bleu_difference",
            heading="BLEU diff",
            format="+.3f",
            meaning="TruthfulQA: BLEU of the model's own answer against the nearest correct answer, less that against "
            "the nearest incorrect one.",
            optional=True,
        ),
        Metric(
            key="rougeL_difference",
            heading="ROUGE-L diff",
            format="+.3f",
            meaning="TruthfulQA: the same by ROUGE-L; by ROUGE-1 and ROUGE-2 in metrics.json.",
            optional=True,
        ),
        Metric(
            key="bleurt_difference",
            heading="BLEURT diff",
            format="+.3f",
            meaning="TruthfulQA: the same by BLEURT, if its checkpoint is available.",
            optional=True,
        ),
        Metric(
            key="rouge1",
            heading="ROUGE-1",
            format=".3f",
            meaning="QMSum: words that the model's own answer shares with the true one, as F-measure.",
            optional=True,
        ),
        Metric(
            key="rouge2",
            heading="ROUGE-2",
            format=".3f",
            meaning="QMSum: the same of pairs of words.",
            optional=True,
        ),
        Metric(
            key="rougeL",
            heading="ROUGE-L",
            format=".3f",
            meaning="QMSum: the same of the longest common sequence of words.",
            optional=True,
            evidence=("rougeL",),
            among="qmsum",
        ),
        Metric(
            key="routing_entropy",
            heading="Routing entropy",
            format=".2f",
            meaning="Of a mixture, how undecided its routers are, from 0, sure of one expert, to 1, all alike.",
            optional=True,
        ),
        Metric(
            key="routing_apart",
            heading="Domains apart",
            format=".2f",
            meaning="Of a mixture, how differently it spreads the two domains over its experts, from 0, alike, to 1, "
            "no expert in common. The loads themselves are in metrics.json.",
            optional=True,
        ),
    ),
    primary_words="perplexity",
    identity=("id", "question", "truth"),
    score="token_probability",
    score_heading="probability of an answer's token",
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
