"""The comparison of detection models: its columns, its evidence, and the questions the experiment asks."""

from __future__ import annotations

from stages.reporting.compare import Metric, Question, TaskReport

REPORT = TaskReport(
    task="detection",
    title="Nutrition-table detection",
    metrics=(
        Metric(
            *("mean_iou", "Mean IoU", ".3f"),
            "Overlap of the first true box with the first predicted box, from 0 to 1, averaged over "
            "all samples. Output that cannot be parsed counts as 0. With several categories: of all boxes, matched "
            "one to one, 0 for each that is missing or too many.",
            evidence=("iou",),
        ),
        Metric(
            *("detection_rate", "Det Rate", ".1%"),
            "Share of completions with a readable box, wherever it lies; or that say that there is none, where "
            "there is none.",
        ),
        Metric("iou_over_50", "IoU>0.5", ".1%", "Share of samples with an IoU above 0.5: the table is found."),
        Metric(
            *("iou_over_70", "IoU>0.7", ".1%"),
            "Share of samples with an IoU above 0.7: the box is good enough to crop by.",
        ),
    ),
    primary_words="mean IoU",
    identity=("image_id", "truth"),
    questions=(
        Question("Two-stage against LLM-only", "r3-two-stage", "r1-llm-only"),
        Question("Joint against LLM-only", "r4-joint", "r1-llm-only"),
        Question("Joint against two-stage", "r4-joint", "r3-two-stage"),
        Question("Vision-only against LLM-only", "r2-vision-only", "r1-llm-only"),
        Question("Second stage against the first alone", "r3-two-stage", "r2-vision-only"),
    ),
)
