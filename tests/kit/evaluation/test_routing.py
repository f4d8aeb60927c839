import copy
from typing import Any

import pytest
import torch
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.likelihood import routing


def asked(text: str) -> Conversation:
    return Conversation(sample_id=text, messages=[{"role": "user", "content": [{"type": "text", "text": text}]}])


ASKED = [asked("What?"), asked("What was said about the budget? " * 3), asked("It was agreed.")]


def routers(model: Any) -> list[Qwen2MoeTopKRouter]:
    return [module for module in model.modules() if isinstance(module, Qwen2MoeTopKRouter)]


def test_a_dense_model_routes_nothing(tiny_dense: Any) -> None:
    model, tokenizer = tiny_dense
    assert routing(model, tokenizer, ASKED, batch_size=2) is None


@pytest.mark.parametrize("batch_size", [2, 3])
def test_padding_does_not_count(tiny_mixture: Any, batch_size: int) -> None:
    model, tokenizer = tiny_mixture
    alone = routing(model, tokenizer, ASKED, batch_size=1)
    together = routing(model, tokenizer, ASKED, batch_size=batch_size)
    assert alone is not None
    assert together is not None
    for one, other in zip(alone, together, strict=True):
        assert other.load == pytest.approx(one.load, abs=1e-5)
        assert other.entropy == pytest.approx(one.entropy, abs=1e-5)
        assert sum(one.load) == pytest.approx(1)
        assert 0 < one.entropy < 1
    assert len({each.load for each in alone}) == len(alone)


def test_the_shares_and_entropies_are_the_models_own(tiny_mixture: Any) -> None:
    model, tokenizer = tiny_mixture
    found = routing(model, tokenizer, ASKED[:1], batch_size=1)
    assert found is not None
    ids = tokenizer(tokenizer.apply_chat_template(ASKED[0].messages, tokenize=False, add_generation_prompt=True))
    with torch.inference_mode():
        logits = model(torch.tensor([ids["input_ids"]]), output_router_logits=True).router_logits
    probabilities = torch.stack(logits).double().softmax(-1)  # (layers, T, experts)
    weights = probabilities.where(probabilities >= probabilities.topk(2).values[..., -1:], 0)
    weights /= weights.sum(-1, keepdim=True)
    assert found[0].load == pytest.approx(weights.mean((0, 1)).tolist(), abs=1e-5)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean() / torch.tensor(4.0).log()
    assert found[0].entropy == pytest.approx(entropy.item(), abs=1e-5)


def test_routers_without_weights_are_undecided_and_no_hook_stays(tiny_mixture: Any) -> None:
    model, tokenizer = copy.deepcopy(tiny_mixture[0]), tiny_mixture[1]
    for router in routers(model):
        torch.nn.init.zeros_(router.weight)
    hooks = [len(router._forward_hooks) for router in routers(model)]  # transformers has its own
    found = routing(model, tokenizer, ASKED, batch_size=3)
    assert found is not None
    assert [each.entropy for each in found] == pytest.approx([1, 1, 1])
    assert [len(router._forward_hooks) for router in routers(model)] == hooks
