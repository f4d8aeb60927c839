import json

import pytest

from stages.kit.data.texts import markup_problem
from tests import ROOT


@pytest.mark.parametrize("token", ["<|im_end|>", "<|image_pad|>", "<|endoftext|>", "<|eot_id|>", "<|box_start|>"])
def test_a_special_token_is_found_in_any_text(token: str) -> None:
    assert token in str(markup_problem("plain", f"before {token}after"))


@pytest.mark.parametrize("text", ["", "a <|> b", "f <| x |> g", "x < |y| > z", "<|im_\nend|>", "<im_end>"])
def test_plain_text_is_left_alone(text: str) -> None:
    assert markup_problem(text) is None


def test_every_special_token_of_the_models_here_is_one() -> None:
    for name in ("qwen2", "qwen2-vl", "qwen2-folklore"):
        tokens = json.loads((ROOT / "data/tiny" / name / "tokenizer.json").read_text())["added_tokens"]
        assert tokens
        for token in tokens:
            assert markup_problem(token["content"]), token
