"""What the harness reads: the same words as our own evaluation, in the columns that the tasks' YAML files name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.models.processors import rendered
from stages.tasks.moe.scoring import PREDICTIONS, candidates
from tests.tasks.moe.made_up import fact, meeting
from tools.lm_eval.moe import FIGURES, TASKS_DIR, documents

ODD = replace(
    fact(2), best='Nó "đọc" gì?\u2028{{1}}', correct=("Không.", 'Nó "đọc" gì?\u2028{{1}}'), incorrect=("'", "\\")
)
RECORDS = [fact(1), meeting(2), ODD, meeting(4)]


@pytest.fixture
def render(tiny_dense: Any) -> Callable[[Conversation], str]:
    _, tokenizer = tiny_dense
    return lambda conversation: rendered(tokenizer, conversation)


def configurations() -> dict[str, dict[str, Any]]:
    """By task, its YAML file with what that includes."""

    def read(path: Path) -> dict[str, Any]:
        config = dict(YAML(typ="rt").load(path))  # safe reading knows no !function
        included = read(path.parent / config.pop("include")) if "include" in config else {}
        return {**included, **config}

    return {config["task"]: config for config in map(read, sorted(TASKS_DIR.glob("*.yaml")))}


def test_the_harness_reads_what_our_evaluation_weighs(render: Callable[[Conversation], str]) -> None:
    found = documents(RECORDS, render)
    assert {kind: [document["id"] for document in made] for kind, made in found.items()} == {
        "truthfulqa": [fact(1).id, ODD.id],
        "qmsum": [meeting(2).id, meeting(4).id],
    }
    for record, document in zip([fact(1), ODD], json.loads(json.dumps(found["truthfulqa"])), strict=True):
        best, *others = (render(candidate).removesuffix("\n") for candidate in candidates([record]))
        false = others[len(record.correct) :]
        assert [document["prompt"] + turn for turn in document["mc1_turns"]] == [best, *false]
        assert [document["prompt"] + turn for turn in document["mc2_turns"]] == others
        assert document["mc1_targets"] == {"choices": [record.best, *record.incorrect], "labels": [1, 0, 0]}
        assert document["mc2_targets"] == {
            "choices": [*record.correct, *record.incorrect],
            "labels": [1, 1, 0, 0],
        }
    asked = found["qmsum"][0]
    assert asked["prompt"] in render(candidates([meeting(2)])[0])
    assert asked["prompt"].endswith("assistant\n")
    assert asked["answers"] == [meeting(2).best]


def test_a_template_that_changes_answers_is_refused_by_the_sample(tiny_dense: Any) -> None:
    _, tokenizer = tiny_dense
    with pytest.raises(UserError, match=r"sample facts/1: the model's chat template does not end an answer"):
        documents([fact(1)], lambda conversation: rendered(tokenizer, conversation).upper())


def test_every_figure_has_a_task_and_every_task_its_documents(render: Callable[[Conversation], str]) -> None:
    tasks, made = configurations(), documents(RECORDS, render)
    assert {figure.task for figure in FIGURES} == tasks.keys()
    for figure in FIGURES:
        config, (document, *_) = tasks[figure.task], made[figure.documents]
        assert config["dataset_path"] == "json", "anything else would be fetched"
        assert dict(config["dataset_kwargs"]["data_files"]) == {config["validation_split"]: f"{figure.documents}.jsonl"}
        assert config["doc_to_text"] in document
        assert figure.metric in {metric["metric"] for metric in config["metric_list"]}
        assert figure.ours in {"", *PREDICTIONS.names}
        for key in ("doc_to_choice", "doc_to_target"):
            column = str(config.get(key, "prompt")).strip("{}").partition(".")[0]
            assert column in document or column == "0", key


@pytest.mark.parametrize("name", ["mc1", "mc2"])
def test_bare_answers_are_scored_by_the_rules_of_the_harness_own_tasks(name: str) -> None:
    tasks = configurations()
    turns, bare = tasks[f"bakeoff_{name}"], tasks[f"bakeoff_{name}_bare"]
    assert {key for key in turns if str(turns[key]) != str(bare[key])} == {"task", "doc_to_choice"}
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks._yaml_loader import load_yaml

    theirs = load_yaml(Path(lm_eval.__file__).parent / f"tasks/truthfulqa/truthfulqa_{name}.yaml")
    ours = load_yaml(TASKS_DIR / f"{name}_bare.yaml")
    for key in ("output_type", "num_fewshot", "doc_to_choice", "doc_to_target", "metric_list", "metadata"):
        assert ours[key] == theirs[key], key
    rules = [getattr(config.get("process_results"), "__qualname__", None) for config in (ours, theirs)]
    assert rules == [{"mc1": None, "mc2": "process_results_mc2"}[name]] * 2
