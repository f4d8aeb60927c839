from dataclasses import replace
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import EvaluationParams
from stages.kit.evaluation.answering import load_answerer
from stages.tasks import load_task
from tests import ROOT
from tests.tiny import table_conversation

DETECTION = load_task("detection", "samples")
TINY = replace(load_params(ROOT / "params.yaml").on("tiny").active, images=None)
QUESTIONS = [table_conversation(index, answered=False) for index in range(5)]


@pytest.mark.parametrize(("attempt", "batches"), [(0, [4, 1]), (1, [2, 2, 1]), (2, [1] * 5)])
def test_each_attempt_asks_half_as_much_at_once(tiny_vlm: Path, attempt: int, batches: list[int]) -> None:
    profile = replace(TINY, evaluation=EvaluationParams(batch_size=4, max_new_tokens=1))
    answerer = load_answerer(tiny_vlm, profile, DETECTION, QUESTIONS, target=None, attempt=attempt)
    seen = []
    answerer.model.model.visual.register_forward_pre_hook(
        lambda _module, _args, inputs: seen.append(len(inputs["grid_thw"])), with_kwargs=True
    )
    answers = answerer.answers(QUESTIONS)
    assert (len(answers), seen) == (5, batches)


def test_a_batch_of_one_cannot_be_halved(tmp_path: Path) -> None:
    """Said before anything is loaded: the folder is empty."""
    profile = replace(TINY, evaluation=EvaluationParams(batch_size=3, max_new_tokens=5))
    with pytest.raises(UserError, match="a batch of 3 cannot be halved 2 times"):
        load_answerer(tmp_path, profile, DETECTION, QUESTIONS, target=None, attempt=2)


def test_a_model_or_a_form_of_answer_that_is_not_the_tasks_is_refused(tiny_vlm: Path) -> None:
    with pytest.raises(UserError, match="it knows no target 'mtup'"):
        load_answerer(tiny_vlm, TINY, DETECTION, QUESTIONS, target="mtup", attempt=0)
    with pytest.raises(UserError, match="AMR parsing trains text models"):
        load_answerer(tiny_vlm, TINY, load_task("amr", "samples"), QUESTIONS, target="full", attempt=0)
