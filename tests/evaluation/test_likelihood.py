import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages import evaluate
from stages.core.errors import UserError
from stages.data.conversation import Conversation, message
from stages.evaluation import likelihood
from stages.evaluation.generate import TextGenerator
from stages.evaluation.likelihood import AnswerLikelihood
from stages.models.prompts import encode
from stages.planning.ladder import prefill_batch_size
from tests.tiny import generator_of


def answered(question: str, answer: str, transcript: str = "") -> Conversation:
    parts = [{"type": "text", "text": transcript, "shortenable": True}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": parts}, message("assistant", answer)]
    return Conversation(sample_id=question, messages=messages)


ANSWERED = [
    answered("What?", "It was agreed."),
    answered("What was said about the budget?", "No."),
    answered("And?", "The budget, the budget and the budget, which was agreed.\nAll of it."),
    answered("Nothing?", ""),
    answered("Nó đọc gì?", "Sách – và 书."),
]


def reading(model: PreTrainedModel, tokenizer: Any, at_once: int) -> TextGenerator:
    """It reads so many conversations in a pass."""
    generator = generator_of(model, tokenizer, batch_size=8 * at_once, max_new_tokens=1)
    assert prefill_batch_size(generator.batch_size) == at_once
    return generator


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_mixture"])
@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_batches_score_as_one_by_one(kind: str, batch_size: int, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(kind)
    alone = reading(model, tokenizer, 1).likelihoods(ANSWERED)
    together = reading(model, tokenizer, batch_size).likelihoods(ANSWERED)
    assert [each.num_tokens for each in together] == [each.num_tokens for each in alone]
    assert [each.sum_logprob for each in together] == pytest.approx([each.sum_logprob for each in alone], abs=1e-4)
    assert len({round(each.sum_logprob, 3) for each in alone}) == len(alone)


def test_the_sum_covers_the_answer_and_the_end_of_its_turn(tiny_dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_dense
    monkeypatch.setattr(likelihood, "LOGIT_ROWS", 3)
    scored = reading(model, tokenizer, 2).likelihoods(ANSWERED)
    for conversation, found in zip(ANSWERED, scored, strict=True):
        answer = conversation.messages[-1]["content"][0]["text"]
        expected = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        ids = encode(tokenizer, [conversation], padding_side="right")["input_ids"]
        ids = ids[:, :-1]  # less the newline after the turn
        assert ids[0, -len(expected) :].tolist() == expected
        with torch.inference_mode():
            logprobs = model(ids).logits.double().log_softmax(-1)[0]
        total = sum(logprobs[-len(expected) - 1 + step, token].item() for step, token in enumerate(expected))
        assert found.num_tokens == len(expected)
        assert found.sum_logprob == pytest.approx(total, abs=1e-4)


def test_a_turn_that_is_not_to_be_learnt_does_not_count(tiny_dense: Any) -> None:
    model, tokenizer = tiny_dense
    asked, answer = message("user", "Which?"), message("assistant", "The first.")
    whole = Conversation(sample_id="a", messages=[*ANSWERED[0].messages, asked, answer])
    parts = [whole, replace(whole, unlearnt=(1,)), replace(whole, unlearnt=(3,))]
    both, second, first = reading(model, tokenizer, 3).likelihoods(parts)
    assert both.num_tokens == first.num_tokens + second.num_tokens
    assert both.sum_logprob == pytest.approx(first.sum_logprob + second.sum_logprob, abs=1e-4)
    assert first.num_tokens == reading(model, tokenizer, 1).likelihoods(ANSWERED[:1])[0].num_tokens


def test_a_model_that_diverged_is_refused(tiny_dense: Any) -> None:
    model, tokenizer = copy.deepcopy(tiny_dense)
    with torch.no_grad():
        model.base_model.norm.weight[0] = torch.nan
    with pytest.raises(UserError, match="5 of 5 answers have no likelihood"):
        reading(model, tokenizer, 2).likelihoods(ANSWERED)


QUESTIONS = [
    Conversation(sample_id=text, messages=[message("user", text)])
    for text in ("What?", "What was said about the budget? " * 3, "It was agreed.")
]


def routers(model: Any) -> list[Qwen2MoeTopKRouter]:
    return [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]


@pytest.mark.parametrize("batch_size", [2, 3])
def test_padding_does_not_count_in_routing(tiny_mixture: Any, tiny_dense: Any, batch_size: int) -> None:
    model, tokenizer = tiny_dense
    assert reading(model, tokenizer, batch_size).routing(QUESTIONS) is None
    model, tokenizer = tiny_mixture
    alone = reading(model, tokenizer, 1).routing(QUESTIONS)
    together = reading(model, tokenizer, batch_size).routing(QUESTIONS)
    assert alone is not None
    assert together is not None
    for one, other in zip(alone, together, strict=True):
        assert other.load == pytest.approx(one.load, abs=1e-5)
        assert other.entropy == pytest.approx(one.entropy, abs=1e-5)
        assert sum(one.load) == pytest.approx(1)
        assert 0 < one.entropy < 1
    assert len({each.load for each in alone}) == len(alone)


@pytest.mark.parametrize("normalized", [True, False])
def test_routing_is_the_models_own(tiny_mixture: Any, normalized: bool) -> None:
    """normalized: whether the model's own weights of the top k add up to 1, as they do not in Qwen1.5-MoE."""
    model, tokenizer = copy.deepcopy(tiny_mixture[0]), tiny_mixture[1]
    for router in routers(model):
        router.norm_topk_prob = normalized
    found = reading(model, tokenizer, 1).routing(QUESTIONS[:1])
    assert found is not None
    ids = tokenizer(tokenizer.apply_chat_template(QUESTIONS[0].messages, tokenize=False, add_generation_prompt=True))
    with torch.inference_mode():
        logits = model(torch.tensor([ids["input_ids"]]), output_router_logits=True).router_logits
    probabilities = torch.stack(logits).double().softmax(-1)  # (layers, T, experts)
    weights = probabilities.where(probabilities >= probabilities.topk(2).values[..., -1:], 0)
    weights /= weights.sum(-1, keepdim=True)
    assert found[0].load == pytest.approx(weights.mean((0, 1)).tolist(), abs=1e-5)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean() / torch.tensor(4.0).log()
    assert found[0].entropy == pytest.approx(entropy.item(), abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_generator_scores_its_batch_and_guards_one_by_one(
    tiny_dense: Any, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_dense
    generator = generator_of(model, tokenizer, batch_size=batch_size, max_new_tokens=1)
    rows: list[int] = []
    sums = likelihood._sums

    def counted(model: Any, inputs: Any, in_answer: torch.Tensor) -> list[float]:
        rows.append(len(in_answer))
        return sums(model, inputs, in_answer)

    monkeypatch.setattr(likelihood, "_sums", counted)
    assert len(generator.likelihoods(ANSWERED)) == sum(rows) == len(ANSWERED)
    assert max(rows) == prefill_batch_size(batch_size)
    rows.clear()
    monkeypatch.setattr(evaluate, "read_guard", lambda name: ANSWERED)
    guarded = evaluate.guard_rows(["held"], generator)
    assert rows == [1] * len(ANSWERED)
    assert [row["id"] for row in guarded] == [each.sample_id for each in ANSWERED]
    assert generator.routing(ANSWERED) is None


def test_guards_are_measured_by_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Engine:
        batch_size: int

        def likelihoods(self, rows: list[Conversation]) -> list[AnswerLikelihood]:
            return [AnswerLikelihood(-2.5, 3)] * len(rows)

    engine: Any = Engine(4)
    monkeypatch.setattr(evaluate, "read_guard", lambda name: ANSWERED[:1])
    assert evaluate.guard_rows(["held"], engine) == [{"guard": "held", "id": "What?", "nats": 2.5, "tokens": 3.0}]
    assert evaluate.guard_rows([], engine) == []
