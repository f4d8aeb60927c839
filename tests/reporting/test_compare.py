"""Rank, questions, corrections and words of a comparison, on made-up scores."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stages.core.errors import UserError
from stages.evaluation.statistics import Floats, Interval
from stages.planning.resolve import resolve_plan
from stages.reporting.compare import (
    Comparison,
    Contender,
    Metric,
    Question,
    TaskReport,
    compare,
    difference_words,
    guard_metric,
    score_contender,
)
from stages.reporting.evidence import difference
from stages.reporting.page import _difference_drawing
from stages.reporting.runs import Run
from stages.reporting.sections import (
    comparison_table,
    comparison_text,
    design_words,
    exports_table,
    flat_metrics,
)
from stages.reporting.tables import cell_text
from tests.made_up_runs import project_params

REPORT = TaskReport(
    task="a-task",
    title="A task",
    metrics=(Metric(key="score", heading="Score", format=".3f", meaning="The score.", evidence=("score",)),),
    primary_words="score",
    identity=("id",),
    questions=(Question("B against A", "b", "a"), Question("B against an unknown one", "b", "z")),
)
LOSS = Metric(key="loss", heading="Loss", format=".3f", meaning="", higher_is_better=False, evidence=("loss",))
HARDNESS = np.random.default_rng(0).normal(0, 0.1, 60)


def run_of(name: str, scores: Floats, metrics: Mapping[str, Any] | None = None, *, key: str = "score") -> Run:
    ids = tuple(map(str, range(len(scores))))
    return Run(
        name=name,
        stage=f"evaluate@{name}",
        model=f"{scores.sum()}",
        metrics={key: float(scores.mean()), **(metrics or {})},
        samples=ids,
        sample_ids=ids,
        columns={"score": scores, key: scores},
        examples={},
    )


def scores_around(mean: float, seed: int) -> Floats:
    return mean + HARDNESS + np.random.default_rng(seed).normal(0, 0.03, len(HARDNESS))


def contender_of(report: TaskReport, name: str, runs: Sequence[Run], *, baseline: str | None) -> Contender:
    return score_contender(report, name, runs, stage=f"evaluate@{name}", baseline=baseline)


def compared(means: Mapping[str, float | list[float] | None], report: TaskReport = REPORT) -> Comparison:
    """means: of each training, by name; `base` is a baseline, None a model that was not run."""
    contenders, key = [], report.primary.key
    for number, (name, mean) in enumerate(means.items()):
        trained = [] if mean is None else mean if isinstance(mean, list) else [mean]
        runs = [run_of(name, scores_around(each, 10 * number + seed), key=key) for seed, each in enumerate(trained)]
        contenders.append(contender_of(report, name, runs, baseline=None if name == "base" else "base"))
    return compare(report, contenders)


def test_the_best_is_better_than_every_other() -> None:
    comparison = compared({"base": 0.1, "a": 0.5, "b": 0.6})
    assert comparison.best.name == "b"
    assert comparison.conclusive
    assert comparison.headline.startswith("The model of b is best: score 0.")
    assert comparison.headline.endswith("better than every other.")
    assert [insight.topic for insight in comparison.insights] == [
        "B against A", "a against its base", "b against its base",
    ]  # fmt: skip
    families = {insight.difference.family for insight in comparison.insights if insight.difference}
    assert families == {4}, "the questions, and whether the best is better than the next"


def test_whether_the_best_is_better_is_corrected_for_the_number_of_questions() -> None:
    comparison = compared({"base": 0.1, "a": 0.5, "b": 0.512})
    found = comparison.insights[0].difference
    assert found is not None
    assert found.p_value < 0.05 < found.adjusted_p
    assert not comparison.conclusive


def test_missing_runs_limit_the_claims() -> None:
    comparison = compared({"base": 0.1, "a": None, "b": 0.6})
    assert comparison.headline.endswith("better than that of base, the only other that was compared.")
    assert [each.note for each in comparison.contenders if not each.run] == ["not run: dvc repro evaluate@a"]
    assert comparison.insights[0].words == "not decided, not run: dvc repro evaluate@a"
    alone = compared({"base": None, "a": None, "b": 0.6})
    assert alone.headline.startswith("b is the only model evaluated")
    assert not alone.conclusive


def test_every_recipe_is_compared_with_its_base_and_with_each_file_of_answers() -> None:
    given: dict[str, Any] = {"peer": {"answers": "data/answers/peer.txt"}}
    names = enumerate(("base", "peer", "b"))
    runs = {name: run_of(name, scores_around(0.5, seed), given.get(name)) for seed, name in names}
    bases = {"base": None, "peer": None, "b": "base"}
    found = compare(REPORT, [contender_of(REPORT, name, [run], baseline=bases[name]) for name, run in runs.items()])
    assert [insight.topic for insight in found.insights] == ["b against its base", "b against peer"]
    assert [each.role for each in found.contenders] == ["baseline", "answers", ""]


@pytest.mark.parametrize(("num_samples", "words"), [(1, "1 sample is too few"), (5, "5 samples are too few")])
def test_too_few_samples_decide_nothing(num_samples: int, words: str) -> None:
    runs = (run_of("a", np.linspace(0.1, 0.2, num_samples)), run_of("b", np.linspace(0.8, 0.9, num_samples)))
    comparison = compare(REPORT, [contender_of(REPORT, run.name, [run], baseline="base") for run in runs])
    assert not comparison.conclusive
    assert words in comparison.headline
    assert words in comparison.insights[0].words
    alone = compare(REPORT, comparison.contenders[:1])
    assert words in alone.headline
    number = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    for each in (comparison, alone):
        assert design_words(each)[0] == f"{number}: too few for any interval or verdict."


@pytest.mark.parametrize(("groups", "conclusive"), [(5, False), (20, True)])
def test_a_report_on_groups_says_how_many_and_counts_them_alone(groups: int, conclusive: bool) -> None:
    runs = [
        replace(run_of(name, scores_around(mean, seed)), groups=np.arange(60) % groups)
        for seed, (name, mean) in enumerate((("a", 0.5), ("b", 0.6)))
    ]
    comparison = compare(REPORT, [contender_of(REPORT, run.name, [run], baseline=None) for run in runs])
    assert comparison.conclusive == conclusive
    words = "the model of b is better" if conclusive else "60 samples in 5 groups are too few to tell"
    assert comparison.insights[0].words.startswith(words)
    assert conclusive or comparison.headline.endswith("but 60 samples in 5 groups are too few to tell.")
    limits = "intervals are 95%, paired by group." if conclusive else "too few for any interval or verdict."
    assert re.fullmatch(rf"60 samples in {groups} groups[;:] {limits}.*", design_words(comparison)[0])


@pytest.mark.parametrize("trainings", [1, 3])
def test_a_loss_on_a_guard_is_shown_or_not_by_the_guards_own_rows(trainings: int) -> None:
    metric = guard_metric("general")
    report = replace(REPORT, metrics=(*REPORT.metrics, metric), questions=())
    nats = 100 * np.exp(np.random.default_rng(1).normal(0, 0.3, 40))  # of other rows than the samples, and fewer

    def run(name: str, growth: float, seed: int) -> Run:
        own = nats * growth * (1 + np.random.default_rng(seed).normal(0, 0.01, len(nats)))
        columns = {"guard_general_nats": own, "guard_general_tokens": np.full(len(nats), 50.0)}
        figure = {metric.key: float(np.exp(own.mean() / 50))}
        made = run_of(name, scores_around(0.5, seed), figure)
        return replace(made, columns={**made.columns, **columns}, groups=np.arange(60) % 20)

    peer = run_of("peer", scores_around(0.5, 9), {"answers": "data/answers/peer.txt"})
    none = {f"guard_general_{name}": np.zeros(0) for name in ("nats", "tokens")}
    runs = {
        "base": [run("base", 1, 1)],
        "peer": [replace(peer, columns={**peer.columns, **none}, groups=np.arange(60) % 20)],
        "worse": [run("worse", 1.2, 10 + seed) for seed in range(trainings)],
        "same": [run("same", 1, 20 + seed) for seed in range(trainings)],
    }
    bases = dict.fromkeys(("worse", "same"), "base")
    found = compare(report, [contender_of(report, name, runs[name], baseline=bases.get(name)) for name in runs])
    words = {each.topic: each.words for each in found.insights if each.metric is metric}
    assert list(words) == ["worse against its base, on general", "same against its base, on general"]
    shown, not_shown = words.values()
    assert re.search(r"worse is worse than .*base by \+[3-9]\.\d{3}", shown)
    assert not_shown.startswith("no difference shown between" if trainings == 1 else "not settled whether")
    cells = dict(
        zip(
            (each.heading for each in comparison_table(found).columns),
            comparison_table(found).rows[1].cells,
            strict=False,
        )
    )
    assert cells["On general"] is None
    assert re.search(r"On general\s+95% interval", comparison_text(found))
    drawn = _difference_drawing(metric, found)
    assert drawn is not None
    assert "paired by sample" in base64.b64decode(drawn.light.partition(",")[2]).decode()


def test_groups_of_a_single_sample_each_change_nothing() -> None:
    runs = [run_of(name, scores_around(mean, seed)) for seed, (name, mean) in enumerate((("a", 0.5), ("b", 0.6)))]
    texts = [
        comparison_text(compare(REPORT, [contender_of(REPORT, run.name, [run], baseline=None) for run in each]))
        for each in (runs, [replace(run, groups=np.arange(60)[::-1]) for run in runs])
    ]
    assert texts[0] == texts[1]
    assert "60 samples; intervals are 95%, paired by sample." in texts[0]


def test_words_follow_the_verdict_and_name_models_if_each_was_trained_once() -> None:
    def words(shift: float, samples: int = 60, trainings: int = 1, matters: float | None = None) -> str:
        ours = np.stack([scores_around(0.5 + shift, seed) for seed in range(trainings)])[:, :samples]
        theirs = np.stack([scores_around(0.5, 10 + seed) for seed in range(trainings)])[:, :samples]
        return difference_words("r4", "r1", difference([ours, theirs], matters=matters))

    models = "the model of r4 is {} than that of r1 by {}0.0"
    assert words(0.05).startswith(models.format("better", "+"))
    assert words(-0.05).startswith(models.format("worse", "-"))
    assert words(0.05).endswith("], p < 0.001")
    assert words(0).startswith("no difference shown between the model of r4 and that of r1 (")
    assert words(0.5, samples=4).startswith("4 samples are too few to tell the model of r4 from that of r1 (+0.5")
    assert words(0.05, trainings=3).startswith("r4 is better than r1 by +0.0")
    assert re.match(r"r4 is better than r1 by \+0\.0\d+, \+1\d%, likely between \+0\.0", words(0.055, trainings=3))
    assert words(0.005, trainings=3).startswith("not settled whether r4 or r1 is better (+0.0")
    assert words(0.005, trainings=3).endswith(
        "more samples, and not only more seeds, would settle whether a difference as large as that is real"
    )
    same = np.stack([scores_around(0.5, seed) for seed in range(3)])
    assert difference_words("r4", "r1", difference([same, same])).startswith(
        "no difference shown between r4 and r1 (+0"
    )
    assert words(0, trainings=3, matters=0.5).startswith("r4 is as good as r1: the two differ by less than 0.5 (")


def test_recipes_are_compared_over_their_seeds() -> None:
    comparison = compared({"base": [0.1], "a": [0.5, 0.51, 0.52], "b": [0.6, 0.61, 0.63]})
    assert comparison.over_seeds
    assert comparison.headline.startswith("b is best: score 0.6")
    assert comparison.headline.endswith("better than every other model.")
    assert [insight.words.split(" by ")[0] for insight in comparison.insights] == [
        "b is better than a", "a is better than base", "b is better than base",
    ]  # fmt: skip
    table = comparison_table(comparison)
    assert [cell_text(row.cells[3], table.columns[3]) for row in table.rows] == ["1", "3", "3"]
    assert [column.heading for column in table.columns][-3:] == ["Seeds", "Between seeds", ""]
    b = comparison.contenders[2]
    assert b.metric("score") == pytest.approx(np.mean([run.metrics["score"] for run in b.runs]))


def test_a_recipe_with_one_seed_takes_no_part_among_several() -> None:
    comparison = compared({"a": [0.9], "b": [0.6, 0.61], "base": [0.1]})
    assert comparison.best.name == "b"
    assert comparison.insights[0].words == "not decided, a was trained under one seed only"


def with_export(seeds: Sequence[int], change: float, noise: float) -> Comparison:
    """A recipe of three trainings, which vary by more than what matters, and its export under some of their seeds."""
    runs = [
        replace(run_of("a", scores_around(mean, seed)), completions=(f"by seed {seed}",) * len(HARDNESS))
        for seed, mean in enumerate((0.5, 0.6, 0.7))
    ]
    draw = np.random.default_rng(5)
    scores = {seed: runs[seed].columns["score"] + draw.normal(change, noise, len(HARDNESS)) for seed in seeds}
    exports = [
        replace(run_of("q8", each), base=runs[seed].model, completions=runs[seed].completions)
        for seed, each in scores.items()
    ]
    base = contender_of(REPORT, "base", [run_of("base", scores_around(0.1, 9))], baseline=None)
    export = replace(contender_of(REPORT, "q8", exports, baseline=None), export_of="a")
    report = replace(REPORT, matters=0.03)
    return compare(report, [base, contender_of(REPORT, "a", runs, baseline="base"), export])


@pytest.mark.parametrize(
    ("seeds", "change", "noise", "words"),
    [
        ((0, 1, 2), 0.0, 0.005, "q8 is as good as a: the two differ by less than 0.03 ("),
        ((2, 1, 0), 0.0, 0.0, "q8 is as good as a: the two differ by less than 0.03 (+0.000, "),
        ((0, 1, 2), 1.0, 0.02, "q8 is better than a by +0.99"),
        ((2, 1), 1.0, 0.02, "q8 is better than a by +0.99"),
        ((0, 1, 2), -0.0004, 1e-5, "q8 is worse than a by less than 0.001."),
        ((2,), 1.0, 0.02, "not decided, only one model of q8 was scored"),
    ],
)
def test_an_export_is_compared_with_its_own_model_of_each_seed(
    seeds: Sequence[int], change: float, noise: float, words: str
) -> None:
    found = with_export(seeds, change, noise)
    assert found.insights[-1].words.startswith(words)
    if (gap := found.insights[-1].difference) and change:
        assert gap.ahead + gap.behind == 60, "each model against its own export"
    same, completions = exports_table(found).rows[0].cells[4:6]
    assert same == completions == 60 * len(seeds)
    assert found.headline.endswith(", better than base. Exports are not ranked.")
    alone = with_export((), 0, 0)
    assert alone.headline.endswith(", better than base.")
    assert found.insights[0].words == alone.insights[0].words, "exports do not count in the spread of recipes"


def test_an_export_of_another_training_is_not_compared() -> None:
    model, other = (run_of("a", scores_around(0.5, seed)) for seed in (1, 2))
    export = replace(
        contender_of(REPORT, "q8", [replace(other, name="q8", base=other.model)], baseline=None), export_of="a"
    )
    found = compare(REPORT, [contender_of(REPORT, "a", [model], baseline="base"), export])
    assert found.insights[-1].words == "not decided, q8 is of another model of a: dvc repro evaluate@a evaluate@q8"


def test_trainings_under_one_seed_alone_cannot_be_compared() -> None:
    plan: Any = SimpleNamespace(seed=42)
    runs = [replace(run_of("a", scores_around(mean, 1)), plan=plan) for mean in (0.5, 0.6)]
    with pytest.raises(UserError, match="nothing can be compared: a was trained under one seed only"):
        compare(REPORT, [contender_of(REPORT, "a", runs, baseline="base")])


def test_recipes_that_all_take_no_part_say_nothing_of_seeds() -> None:
    """They have a seed of their own, and bases of other seeds."""
    comparison = compared({"a": [0.5, 0.6], "base": [0.1]})
    out = [replace(each, left_out="x") if each.baseline else each for each in comparison.contenders]
    assert not any("seed" in line for line in design_words(replace(comparison, contenders=tuple(out), best=out[1])))


RESTORED = replace(LOSS, key="restored", heading="Restored", optional=True, evidence=())


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"score": 0.9}, r"metrics\.json of a has score 0\.9000, its predictions.* 0\.5000"),
        ({"score": float("nan")}, "score nan"),
        ({"score": "high"}, "no number score"),
        ({"restored": "high"}, "no number restored"),
    ],
)
def test_metrics_that_do_not_match_the_predictions_are_refused(metrics: dict[str, Any], problem: str) -> None:
    report = replace(REPORT, metrics=(*REPORT.metrics, RESTORED))
    with pytest.raises(UserError, match=problem):
        contender_of(report, "a", [run_of("a", np.full(10, 0.5), metrics)], baseline=None)


def test_the_lowest_is_best_if_lower_is_better() -> None:
    report = replace(REPORT, metrics=(LOSS,), primary_words="loss")
    comparison = compared({"b": 2.0, "a": 2.5, "base": 3.0}, report)
    assert comparison.best.name == "b"
    assert comparison.headline.startswith("The model of b is best: loss 2.0")
    assert comparison.insights[0].words.startswith("the model of b is better than that of a by -0.4")
    drawing = _difference_drawing(LOSS, comparison)
    assert drawing is not None
    assert "Left of the dashed line" in drawing.caption
    comparison = compared({"b": 2.0, "a": 2.001}, report)
    assert f"The model of {comparison.best.name} scores lowest, loss 2." in comparison.headline
    marks = {row.cells[0]: row.cells[-1] for row in comparison_table(comparison).rows}
    assert marks[comparison.best.name] == "lowest"


def test_models_of_one_score_tie() -> None:
    scores = {"a": scores_around(0.5, 1), "b": scores_around(0.5, 1)[::-1], "base": scores_around(0.1, 2)}
    runs = [run_of(name, each) for name, each in scores.items()]
    comparison = compare(REPORT, [contender_of(REPORT, run.name, [run], baseline=None) for run in runs])
    assert re.fullmatch(r"The models of a and b tie for the highest score 0\.\d+ \[.*\]\.", comparison.headline)
    rows = comparison_table(comparison).rows
    assert [(row.cells[-1], row.emphasised) for row in rows] == [("tie", True), ("tie", True), ("baseline", False)]


def test_a_metric_of_some_samples_has_an_interval_and_verdicts_of_its_own() -> None:
    own = replace(LOSS, key="own", heading="Own", optional=True, evidence=("own",), among="ours")
    report = replace(REPORT, metrics=(*REPORT.metrics, own), questions=(Question("Of some", "b", "a", metric="own"),))
    assert report.columns == ("ours", "own", "score")

    def contenders(among: Floats) -> list[Contender]:
        found = []
        for seed, (name, mean) in enumerate((("a", 0.3), ("b", 0.7))):
            scores = scores_around(mean, seed)
            run = run_of(name, scores, {"own": float(scores[among == 1].mean())} if among.any() else {})
            run = replace(run, columns={"score": scores, "own": scores * among, "ours": among})
            found.append(contender_of(report, name, [run], baseline=None))
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
    (undecided,) = compare(report, contenders(np.zeros(60))).insights
    assert undecided.words == "not decided, no sample is about Own"


def test_what_another_batch_changes_is_said_where_it_was_measured() -> None:
    again = {"batch_size": 32, "rebatched_score": 0.512, "rebatched_changed": 0.0625}
    words = []
    for base, recipe in (({}, {}), (again, {"batch_size": 32}), (again, {"batch_size": 64})):
        runs = [run_of("base", np.full(60, 0.5), base), run_of("a", scores_around(0.6, 1), recipe)]
        comparison = compare(REPORT, [contender_of(REPORT, run.name, [run], baseline=None) for run in runs])
        words.append(" ".join(design_words(comparison)))
    noise = "In batches of half the size, 6.2% of base's completions are others, and score changes by up to 0.012: "
    assert [noise in each for each in words] == [False, True, True]
    assert ["several sizes (32: base; 64: a)" in each for each in words] == [False, False, True]


@pytest.mark.parametrize(("matters", "warned"), [(0.01, True), (0.02, False), (None, False)])
def test_what_matters_is_not_less_than_another_batch_changes(matters: float | None, warned: bool) -> None:
    again = {"rebatched_score": 0.512, "rebatched_changed": 0.0625}
    trained = [run_of("a", scores_around(0.6, seed)) for seed in range(3)]
    base = contender_of(REPORT, "base", [run_of("base", np.full(60, 0.5), again)], baseline=None)
    contenders = [base, contender_of(REPORT, "a", trained, baseline="base")]
    comparison = compare(replace(REPORT, matters=matters), contenders)
    assert ("compare.matters, 0.01, is less than that." in design_words(comparison)) == warned


def test_an_interval_of_samples_that_score_alike_comes_with_a_caution() -> None:
    scores = {"base": np.zeros(20), "a": np.full(20, 0.1), "b": np.linspace(0, 1, 20)}
    runs = [run_of(name, each) for name, each in scores.items()]
    bases = {"a": "base", "b": "base"}
    contenders = [contender_of(REPORT, run.name, [run], baseline=bases.get(run.name)) for run in runs]
    said = [line for line in design_words(compare(REPORT, contenders)) if "alike" in line]
    assert said == ["All samples of base, a score alike: an interval without width is no evidence about other samples."]


def test_a_report_says_which_bases_have_no_entry_of_families() -> None:
    plan = resolve_plan(project_params(), "r1-llm-only", train_samples=16)
    runs = [run_of(name, scores_around(0.5, 1)) for name in "abc"]
    for number, model_type in enumerate(("granite", "qwen2")):
        runs[number] = replace(runs[number], plan=replace(plan, model_type=model_type))
    contenders = [contender_of(REPORT, run.name, [run], baseline="c") for run in runs]
    said = [line for line in design_words(compare(REPORT, contenders)) if "is not among the families" in line]
    assert [line.split()[0] for line in said] == ["granite"]


def test_another_engine_is_named() -> None:
    def words(*engines: str) -> str:
        runs = [
            run_of(name, scores_around(0.5, 1), {"engine": engine}) for name, engine in zip("ab", engines, strict=True)
        ]
        contenders = [contender_of(REPORT, run.name, [run], baseline=None) for run in runs]
        return " ".join(design_words(compare(REPORT, contenders)))

    assert "engine" not in words("transformers", "transformers")
    assert "Completions are from vLLM 0, which was checked" in words("vLLM 0", "vLLM 0")
    assert "(transformers: a; vLLM 0: b)" in words("transformers", "vLLM 0")
