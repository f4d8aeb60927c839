import json

import pytest

from stages.data.texts import markup_problem
from tests import ROOT


@pytest.mark.parametrize("text", ["", "a <|> b", "f <| x |> g", "x < |y| > z", "<|im_\nend|>", "<im_end>"])
def test_plain_text_is_left_alone(text: str) -> None:
    assert markup_problem(text) is None


def test_every_special_token_of_the_models_here_is_one() -> None:
    for name in ("qwen2", "qwen2-vl", "qwen2-folklore"):
        tokens = json.loads((ROOT / "data/tiny" / name / "tokenizer.json").read_text())["added_tokens"]
        assert tokens
        for token in tokens:
            assert markup_problem(token["content"]), token
