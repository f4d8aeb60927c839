"""Logits by a model's own forward, and the check of TRL's loss, over architectures with heads of several kinds."""

import pytest
import torch
from transformers import AutoConfig

from stages.core.errors import UserError
from stages.models.forward import forward_from, require_own_loss
from stages.models.load import meta_model, new_model
from tests.architectures import ARCHITECTURES, config_of
from tests.tiny_families import config_for

SCALED = ["cohere2", "falcon_h1", "gemma2", "gemma3", "granite", "qwen3_5", "recurrent_gemma"]


@pytest.mark.parametrize("model_type", SCALED)
def test_logits_of_hidden_states_are_the_models_own(model_type: str) -> None:
    torch.manual_seed(0)
    model = new_model(config_of(model_type), precision="fp32").eval()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # so that scales and soft caps show
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        own = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(forward_from(model, hidden).logits, own)
    assert not torch.allclose(model.get_output_embeddings()(hidden), own) or model_type in ("gemma3", "qwen3_5")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_loss_that_is_not_of_the_models_own_logits_is_refused(model_type: str) -> None:
    model = meta_model(config_of(model_type))
    before = {name: (parameter.shape, parameter.device) for name, parameter in model.named_parameters()}
    if refused := ARCHITECTURES[model_type].refused:
        with pytest.raises(UserError, match=refused):
            require_own_loss(model)
    else:
        require_own_loss(model)
    assert before == {name: (parameter.shape, parameter.device) for name, parameter in model.named_parameters()}
    assert "forward" not in vars(model)


def test_a_scale_that_trl_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model(config_of("granite"))
    monkeypatch.setattr(type(model.config), "logits_scaling", 4.0, raising=False)
    require_own_loss(model)
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *args, **options: _halved(forward(*args, **options)))
    with pytest.raises(UserError, match=r"TRL's loss of a granite is .*% off"):
        require_own_loss(model)


def _halved(output: object) -> object:
    output.logits = output.logits / 2  # type: ignore[attr-defined]
    return output


def test_a_class_without_sdpa_attends_by_its_own_and_no_language_model_is_refused() -> None:
    with torch.device("meta"):
        configs = config_of("gpt_oss"), config_of("mamba2"), config_for("qwen2")
        models = [new_model(config, precision="fp32") for config in configs]
    assert [model.config._attn_implementation for model in models] == ["eager", "eager", "sdpa"]
    with pytest.raises(UserError, match=r"be loaded: Unrecognized configuration class .*T5Config") as refused:
        meta_model(AutoConfig.for_model("t5"))
    assert len(str(refused.value)) < 1_200, "transformers lists all classes"


@pytest.mark.parametrize("model_type", ["opt", "bert"])
def test_logits_that_are_not_a_heads_on_a_backbone_are_refused(model_type: str) -> None:
    model = meta_model(AutoConfig.for_model(model_type, num_hidden_layers=1))
    with pytest.raises(UserError, match=f"{model_type} computes its logits otherwise than by a head on its backbone"):
        require_own_loss(model)
