from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, EvaluationParams
from stages.kit.data.images import ImageRecord
from stages.kit.data.prepared import PreparedRow
from stages.kit.evaluation.answer import batch_size_for, load_answerer
from stages.kit.memory.answers import Inference
from stages.kit.memory.calibration import load_calibration
from stages.kit.memory.predict import predict_answers
from stages.kit.models.load import load_config
from stages.kit.models.prompts import count_tokens, encode, load_processor
from stages.kit.planning.ladder import read_at_once
from stages.tasks import load_task
from tests import ROOT
from tests.kit.data.pictures import picture
from tests.tiny import table_conversation

DETECTION = load_task("detection", "samples")
TINY = replace(load_params(ROOT / "params.yaml").on("tiny").active, images=None)
QUESTIONS = [table_conversation(index, answered=False) for index in range(5)]


@pytest.mark.parametrize(("attempt", "batches"), [(0, [2, 2, 1]), (1, [1] * 5), (4, [1] * 5)])
def test_each_attempt_asks_half_as_much_at_once(tiny_vlm: Path, attempt: int, batches: list[int]) -> None:
    profile = replace(TINY, evaluation=EvaluationParams(batch_size=16, max_new_tokens=1))
    answerer = load_answerer(tiny_vlm, profile, DETECTION, QUESTIONS, answer_format=None, attempt=attempt)
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
        load_answerer(tmp_path, profile, DETECTION, QUESTIONS, answer_format=None, attempt=2)


def test_a_model_or_a_form_of_answer_that_is_not_the_tasks_is_refused(tiny_vlm: Path) -> None:
    with pytest.raises(UserError, match=r"answer_format: .* found 'mtup'"):
        load_answerer(tiny_vlm, TINY, DETECTION, QUESTIONS, answer_format="mtup", attempt=0)
    with pytest.raises(UserError, match="AMR parsing trains text models"):
        load_answerer(tiny_vlm, TINY, load_task("amr", "samples"), QUESTIONS, answer_format="full", attempt=0)


def test_auto_answers_as_many_at_once_as_the_device_has_room_for(tiny_vlm: Path) -> None:
    def batch_size(memory_gb: float | None, attempt: int = 0) -> int:
        device = DeviceParams(kind="cpu", memory_gb=memory_gb)
        evaluation = EvaluationParams(batch_size="auto", max_new_tokens=200)
        profile = replace(TINY, device=device, evaluation=evaluation)
        return batch_size_for(QUESTIONS, tiny_vlm, profile, attempt=attempt)

    assert batch_size(None) == 8, "the power of two that all five questions go into"
    assert batch_size(None, attempt=2) == 2
    of_four = predicted_bytes(tiny_vlm, 4, max_new_tokens=200)
    usable = load_calibration().usable_bytes(1) / 2**30
    assert batch_size(1.001 * of_four / 2**30 / usable) == 4
    assert batch_size(0.999 * of_four / 2**30 / usable) == 2
    assert batch_size(1e-6) == 1


def predicted_bytes(folder: Path, batch_size: int, *, max_new_tokens: int) -> int:
    """Upper end of what so many answers to the longest question take."""
    inference = Inference(device=DeviceParams(kind="cpu"), precision="fp32", attn="sdpa")
    processor, config, calibration = load_processor(folder, None), load_config(folder), load_calibration()
    longest = max(QUESTIONS, key=partial(count_tokens, processor))
    batch = encode(processor, [longest] * read_at_once(batch_size), padding_side="left")
    limits = {"batch_size": batch_size, "max_new_tokens": max_new_tokens}
    return predict_answers(inference, config, batch, calibration, **limits).high_bytes


def test_a_damaged_picture_ends_the_answers_with_its_sample(tiny_vlm: Path) -> None:
    """Pictures are decoded in a thread, a batch ahead."""
    sound = ImageRecord(image_id="1", image=picture(), width=40, height=30)
    place = PreparedRow(Path("data/prepared/tables/val.parquet"), 3)
    records = [sound, replace(sound, image=sound.image[:60], place=place)]
    asked = [replace(QUESTIONS[0], images=[record]) for record in records]
    profile = replace(TINY, evaluation=EvaluationParams(batch_size=1, max_new_tokens=1))
    answerer = load_answerer(tiny_vlm, profile, DETECTION, asked, answer_format=None, attempt=0)
    assert len(answerer.answers(asked[:1])) == 1
    with pytest.raises(UserError, match=r"val\.parquet row 3"):
        answerer.answers(asked)
