import json

import pytest

from stages.data.texts import UnreadableText, json_objects, markup_problem
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


ROWS = [{"a": 1}, {"b": "\u2028"}, {"a": 3}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


@pytest.mark.parametrize(
    ("text", "unit", "numbers"),
    [
        *((end.join(LINES) + end, "line", [1, 2, 3]) for end in ("\n", "\r\n", "\r")),
        ("\n" + "\n\n".join(LINES), "line", [2, 4, 6]),
        (json.dumps(ROWS), "entry", [1, 2, 3]),
        (json.dumps(ROWS, indent=2), "entry", [1, 2, 3]),
    ],
)
def test_objects_are_read_whatever_ends_a_line_and_out_of_an_array(text: str, unit: str, numbers: list[int]) -> None:
    found, objects = json_objects(text)
    assert (found, list(objects)) == (unit, list(zip(numbers, ROWS, strict=True)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps(ROWS, indent=2)[:-4], "a JSON array, but not JSON: "),
        (json.dumps({"data": ROWS}, indent=2), "a single JSON object; expected an object in each line"),
        ('[\n{"a": 1, "a": 2}\n]', "a JSON array, but the key 'a' is there twice"),
    ],
)
def test_a_file_that_is_one_other_document_has_one_problem(text: str, problem: str) -> None:
    with pytest.raises(UnreadableText, match=problem):
        json_objects(text)


def test_a_line_that_is_no_object_or_has_a_key_twice_is_named() -> None:
    _, objects = json_objects('[1]\n{"a": 1}\n{"a": {"b": 1, "b": 2}}\n{"a":')
    expected = ["a JSON object is expected, found [1]", "{'a': 1}", "the key 'b' is there twice", "not JSON: Expecting"]
    assert all(str(each).startswith(begin) for (_, each), begin in zip(objects, expected, strict=True))
