from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from stages.core.errors import UserError
from stages.kit.reporting.compare import (
    UNAVAILABLE,
    Comparison,
    Contender,
    Metric,
    Question,
    TaskReport,
    compare,
    difference_words,
    score_contender,
)
from stages.kit.reporting.page import _difference_drawing
from stages.kit.reporting.runs import Run
from stages.kit.reporting.sections import comparison_table, design_words, flat_metrics
from stages.kit.reporting.tables import ABSENT, cell_text
from stages.kit.statistics import Floats, Interval, difference

REPORT = TaskReport(
    task="a-task",
    title="A task",
    metrics=(Metric(key="score", heading="Score", format=".3f", meaning="How good it is.", evidence=("score",)),),
    primary_words="score",
    identity=("id",),
    score="score",
    score_heading="score",
    questions=(Question("B against A", "b", "a"), Question("B against one that nobody defined", "b", "z")),
)
HARDNESS = np.random.default_rng(0).normal(0, 0.1, 60)


def run_of(name: str, scores: Floats, recorded: float | None = None) -> Run:
    ids = tuple(map(str, range(len(scores))))
    metrics = {"score": float(scores.mean()) if recorded is None else recorded}
    return Run(
        name=name,
        stage=f"evaluate@{name}",
        model=f"{scores.sum()}",
        metrics=metrics,
        samples=ids,
        sample_ids=ids,
        columns={"score": scores},
        examples={},
    )


def contender(name: str, scores: Floats | None, *, baseline: str | None = "base") -> Contender:
    return score_contender(REPORT, name, [] if scores is None else [run_of(name, scores)], baseline=baseline)


def scores_around(mean: float, seed: int) -> Floats:
    return mean + HARDNESS + np.random.default_rng(seed).normal(0, 0.03, len(HARDNESS))


def comparison_of(a: float | None, b: float | None, base: float | None = 0.1) -> Comparison:
    means = {"base": base, "a": a, "b": b}
    return compare(
        REPORT,
        [
            contender(
                name,
                None if mean is None else scores_around(mean, seed),
                baseline=None if name == "base" else "base",
            )
            for seed, (name, mean) in enumerate(means.items())
        ],
    )


def test_best_is_said_only_where_every_interval_says_so() -> None:
    comparison = comparison_of(0.5, 0.6)
    assert comparison.best.name == "b"
    assert comparison.conclusive
    assert comparison.headline.startswith("The model of b is best: score 0.")
    assert comparison.headline.endswith("better than every other.")


def test_highest_is_not_best_where_no_difference_is_shown() -> None:
    comparison = comparison_of(0.5, 0.5)
    assert not comparison.conclusive
    rival = "a" if comparison.best.name == "b" else "b"
    assert comparison.headline.endswith(f"but no difference is shown against that of {rival}.")


def test_a_base_that_no_recipe_beats_is_what_scores_highest() -> None:
    comparison = comparison_of(0.3, 0.2, base=0.6)
    assert comparison.headline.startswith("The model of base is best")
    assert comparison.insights[-1].words.startswith("the model of b is worse than that of base by -0.")


def test_best_of_those_that_were_run_is_not_called_best_of_all() -> None:
    comparison = comparison_of(None, 0.6)
    assert comparison.headline.endswith("better than that of base that was run.")
    assert [missing.note for missing in comparison.missing] == ["not run: dvc repro evaluate@a"]


def test_an_only_model_is_not_called_best() -> None:
    comparison = comparison_of(None, 0.6, base=None)
    assert comparison.headline.startswith("b is the only model evaluated")
    assert not comparison.conclusive


@pytest.mark.parametrize(("num_samples", "words"), [(1, "1 sample is too few"), (5, "5 samples are too few")])
def test_too_few_samples_decide_nothing(num_samples: int, words: str) -> None:
    low, high = np.linspace(0.1, 0.2, num_samples), np.linspace(0.8, 0.9, num_samples)
    comparison = compare(REPORT, [contender("a", low), contender("b", high)])
    assert not comparison.conclusive
    assert words in comparison.headline
    assert words in comparison.insights[0].words


def test_questions_come_first_then_every_recipe_against_its_base() -> None:
    topics = [insight.topic for insight in comparison_of(0.5, 0.6).insights]
    assert topics == ["B against A", "a against its base", "b against its base"]


def test_a_question_about_a_missing_run_says_what_to_run() -> None:
    insight = comparison_of(None, 0.6).insights[0]
    assert insight.difference is None
    assert insight.words == "not answered, not run: dvc repro evaluate@a"


def test_words_follow_the_verdict_and_name_models_where_each_was_trained_once() -> None:
    def words(shift: float, samples: int = 60, trainings: int = 1) -> str:
        ours = np.stack([scores_around(0.5 + shift, seed) for seed in range(trainings)])[:, :samples]
        theirs = np.stack([scores_around(0.5, 10 + seed) for seed in range(trainings)])[:, :samples]
        return difference_words("r4", "r1", difference(ours, theirs))

    models = "the model of r4 is {} than that of r1 by {}0.0"
    assert words(0.05).startswith(models.format("better", "+"))
    assert words(-0.05).startswith(models.format("worse", "-"))
    assert words(0.05).endswith("], p < 0.001")
    assert words(0).startswith("no difference shown between the model of r4 and that of r1 (")
    assert words(0.5, samples=4).startswith("4 samples are too few to tell the model of r4 from that of r1 (+0.5")
    assert words(0.05, trainings=3).startswith("r4 is better than r1 by +0.0")
    assert words(0, trainings=3).startswith("no difference shown between r4 and r1 (")


def over_seeds(means: dict[str, list[float]]) -> Comparison:
    """Of recipes with a training of each mean; `base` is a baseline."""
    contenders = []
    for number, (name, trained) in enumerate(means.items()):
        runs = [run_of(name, scores_around(mean, 10 * number + seed)) for seed, mean in enumerate(trained)]
        contenders.append(score_contender(REPORT, name, runs, baseline=None if name == "base" else "base"))
    return compare(REPORT, contenders)


def test_recipes_are_compared_over_their_seeds() -> None:
    comparison = over_seeds({"base": [0.1], "a": [0.5, 0.51, 0.52], "b": [0.6, 0.61, 0.63]})
    assert comparison.over_seeds
    assert comparison.headline.startswith("b is best: score 0.6")
    assert comparison.headline.endswith("better than every other model.")
    assert [insight.words.split(" by ")[0] for insight in comparison.insights] == [
        "b is better than a",
        "a is better than base",
        "b is better than base",
    ]
    table = comparison_table(comparison)
    assert [cell_text(row.cells[3], table.columns[3]) for row in table.rows] == ["1", "3", "3"]
    assert [column.heading for column in table.columns][-3:] == ["Seeds", "Between seeds", ""]
    b = comparison.contenders[2]
    assert b.figure("score") == pytest.approx(np.mean([run.metrics["score"] for run in b.runs]))
    assert comparison.runs[2] is b.runs[0]


def test_seeds_that_lie_further_apart_than_recipes_show_no_difference() -> None:
    comparison = over_seeds({"a": [0.5, 0.55, 0.45], "b": [0.56, 0.5, 0.6]})
    assert comparison.insights[0].words.startswith("no difference shown between b and a")
    assert comparison.headline.endswith("but no difference is shown against a.")


def test_a_recipe_with_one_seed_takes_no_part_among_several() -> None:
    comparison = over_seeds({"a": [0.9], "b": [0.6, 0.61], "base": [0.1]})
    assert comparison.best.name == "b"
    assert comparison.insights[0].words == "not answered, a was trained under one seed only"


def test_all_questions_of_a_report_are_one_family_to_be_best_among_them() -> None:
    comparison = comparison_of(0.5, 0.6)
    families = {insight.difference.family for insight in comparison.insights if insight.difference}
    assert families == {4}  # B against A, each against its base, the best against the next


def test_metrics_that_do_not_match_the_predictions_are_refused() -> None:
    with pytest.raises(UserError, match=r"metrics\.json of a has score 0\.9000, its predictions.* 0\.5000"):
        score_contender(REPORT, "a", [run_of("a", np.full(10, 0.5), recorded=0.9)], baseline=None)


def test_a_missing_or_nonsense_metric_is_refused() -> None:
    run = run_of("a", np.full(10, 0.5), recorded=float("nan"))
    with pytest.raises(UserError, match="score nan"):
        score_contender(REPORT, "a", [run], baseline=None)
    run = replace(run, metrics={})
    with pytest.raises(UserError, match="no number score"):
        score_contender(REPORT, "a", [run], baseline=None)


def test_a_figure_that_only_some_models_have_is_optional() -> None:
    only_some = Metric(key="restored", heading="Restored", format=".3f", meaning="Of two steps.", optional=True)
    report = replace(REPORT, metrics=(*REPORT.metrics, only_some))
    run = run_of("a", np.full(10, 0.5))
    without, with_it = run, replace(run, metrics={**run.metrics, "restored": 0.25})
    contenders = [
        score_contender(report, name, [each], baseline=None) for name, each in (("a", without), ("b", with_it))
    ]
    table = comparison_table(compare(report, contenders))
    assert [cell_text(row.cells[2], table.columns[2]) for row in table.rows] == [ABSENT, "0.250"]
    unavailable = replace(run, metrics={**run.metrics, "restored": UNAVAILABLE})
    assert score_contender(report, "a", [unavailable], baseline=None).run == unavailable
    with pytest.raises(UserError, match="no number restored"):
        score_contender(report, "a", [replace(run, metrics={**run.metrics, "restored": "high"})], baseline=None)


LOSS = Metric(
    key="loss", heading="Loss", format=".3f", meaning="How bad it is.", higher_is_better=False, evidence=("loss",)
)


def losses_of(*names: str, apart: float) -> list[Contender]:
    """Models that lose more the later they are named."""
    report = replace(REPORT, metrics=(LOSS,))
    contenders = []
    for number, name in enumerate(names):
        losses = scores_around(2 + apart * number, number)
        run = run_of(name, losses)
        run = replace(run, metrics={"loss": float(losses.mean())}, columns={"loss": losses, "score": losses})
        contenders.append(score_contender(report, name, [run], baseline=None if name == "base" else "base"))
    return contenders


def test_where_less_is_better_the_least_is_best_and_the_verdicts_say_so() -> None:
    report = replace(REPORT, metrics=(LOSS,), primary_words="loss")
    comparison = compare(report, losses_of("b", "a", "base", apart=0.5))
    assert comparison.best.name == "b"
    assert comparison.headline.startswith("The model of b is best: loss 2.0")
    assert comparison.insights[0].words.startswith("the model of b is better than that of a by -0.4")
    assert comparison.insights[1].words.startswith("the model of b is better than that of base by -")
    drawing = _difference_drawing(LOSS, comparison)
    assert drawing is not None
    assert "Left of the dashed line" in drawing.caption


def test_where_less_is_better_and_the_evidence_not_enough_the_lowest_is_marked() -> None:
    report = replace(REPORT, metrics=(LOSS,), primary_words="loss")
    comparison = compare(report, losses_of("b", "a", apart=0.001))
    assert f"The model of {comparison.best.name} scores lowest, loss 2." in comparison.headline
    marks = {row.cells[0]: row.cells[-1] for row in comparison_table(comparison).rows}
    assert marks[comparison.best.name] == "lowest"


def test_a_metric_of_some_samples_has_an_interval_and_verdicts_of_its_own() -> None:
    own = Metric(
        key="own", heading="Own", format=".2f", meaning="Of some.", optional=True, evidence=("own",), among="ours",
        higher_is_better=False,
    )  # fmt: skip
    question = Question("Of some, B against A", "b", "a", metric="own")
    report = replace(REPORT, metrics=(*REPORT.metrics, own), questions=(question,))
    assert report.columns == ("ours", "own", "score")

    def contenders(among: Floats) -> list[Contender]:
        found = []
        for seed, (name, mean) in enumerate((("a", 0.3), ("b", 0.7))):
            scores = scores_around(mean, seed)
            run = run_of(name, scores)
            columns = {"score": scores, "own": scores * among, "ours": among}
            metrics = {**run.metrics, **({"own": float(scores[among == 1].mean())} if among.any() else {})}
            found.append(score_contender(report, name, [replace(run, columns=columns, metrics=metrics)], baseline=None))
        return found

    comparison = compare(report, contenders((np.arange(60) % 3 == 0).astype(float)))
    assert comparison.best.name == "b", "the primary metric alone ranks"
    (insight,) = comparison.insights
    assert insight.words.startswith("the model of b is worse than that of a by +0.398 [")
    assert insight.difference is not None
    assert insight.difference.samples == 20
    table = comparison_table(comparison)
    assert [column.heading for column in table.columns] == ["Model", "Score", "Own", "95% interval", "95% interval", ""]
    assert isinstance(table.rows[0].cells[3], Interval)
    flat = flat_metrics(comparison)
    low, high = json.loads(str(flat["a.own_interval"]))
    assert low < float(flat["a.own"]) < high
    drawing = _difference_drawing(own, comparison)
    assert drawing is not None
    assert "Of some, B against A" in drawing.svg

    (unanswered,) = compare(report, contenders(np.zeros(60))).insights
    assert unanswered.words == "not answered, no sample is about Own"


def test_an_evaluation_of_no_sample_is_refused() -> None:
    with pytest.raises(UserError, match="a was evaluated on no sample"):
        score_contender(REPORT, "a", [run_of("a", np.zeros(0), recorded=0.0)], baseline=None)


def test_another_engine_that_answered_is_named() -> None:
    comparison = comparison_of(0.5, 0.6)
    assert "vLLM" not in " ".join(design_words(comparison))
    for run in comparison.all_runs:
        assert isinstance(run.metrics, dict)
        run.metrics["engine"] = "vLLM 0"
    assert "Completions are from vLLM 0, which was checked against transformers." in design_words(comparison)
    first = comparison.all_runs[0].metrics
    assert isinstance(first, dict)
    del first["engine"]
    assert f"(transformers: {comparison.all_runs[0].name}; vLLM 0: " in " ".join(design_words(comparison))
