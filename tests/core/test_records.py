"""Files of stages and people: read as dataclasses or refused in a line."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.core.errors import UserError
from stages.core.records import StageFile, Unreadable, parse, parse_json, parse_yaml, problems, read_record
from tests.damage import TEXTS, quick


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "file"


def read(content: str | bytes) -> Any:
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return parse(cast("type[Any]", Any), parse_yaml(content))


YAML_PIECES = [
    *("a", "b: ", "- ", "? ", ": ", "\n", "\n  ", " ", "\t", "[", "]", "{", "}", ",", "#", "|", ">"),
    *("&a ", "*a", "<<: ", "!x ", "!!int ", "!!set ", "!!binary ", "%YAML 1.2\n", "%YAML 1.9999999999\n", "---\n"),
    *("...\n", "'", '"', "\\", "\\UFFFFFFFF", "\\0", "\\ud800", "~", "1e5", "0x", "1_", "+.inf", ".nan", "2020-99-01"),
    *("\0", "\x85", "é", "@", "=", "true", "\r\n", "\N{BYTE ORDER MARK}", "9" * 5000, "0x" + "f" * 5000),
]


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    text = '{"a": [{"b": 1, "b": 2}]}'
    with pytest.raises(Unreadable, match="the key 'b' is there twice"):
        parse_json(text.encode())
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="the key 'b' is there twice"):
        read_record(dict, tmp_path / "x.json", fix="make it")


@given(content=st.lists(st.sampled_from(YAML_PIECES), max_size=20).map("".join) | st.text() | st.binary())
@example(content="[" * 1000)
@example(content="a: &a [*a, *a]")
@example(content="a: !!bool tiny")
@quick(200)
def test_any_yaml_is_read_or_refused_on_one_line(content: str | bytes) -> None:
    try:
        json.dumps(read(content))
    except Unreadable as error:
        assert "\n" not in str(error)
    except ValidationError as error:
        assert all("\n" not in f"{where}{problem}" for where, problem in problems(error, Any).items())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "line 2, column 1"),
        ("a: b\n\tc: d", "line 2, column 1"),
        ("a: *b", "line 1: the anchor 'b'"),
        ("a: 1\nb: &c [*c]", "line 2: the anchor 'c'"),
        ("a: 1\na: 2", "line 2, column 1: found duplicate key"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: !x y", "line 1, column 4"),
        ("[" * 1000 + "]" * 1000, "nested too deep"),
        ("#" * 2**19, "more than 256 KiB"),
        (b"a: \xe9", "at position 3"),
    ],
)
def test_a_refused_yaml_names_the_place(text: str | bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read(text)


@pytest.mark.parametrize(
    "text", ["", "[1,]", "NaN", "[1e999]", '{"a": -Infinity}', b'"\xff"', "[" * 300 + "]" * 300, "9" * 5000]
)
def test_json_without_a_plain_value_or_too_deep_is_refused(text: str | bytes) -> None:
    with pytest.raises(Unreadable):
        parse_json(text.encode() if isinstance(text, str) else text)


def test_merges_dates_and_numbers_are_those_of_yaml_1_2_and_json() -> None:
    assert read("{<<: [{x: 1, y: 1}, {x: 2, z: 2}], y: 3}") == {"x": 1, "y": 3, "z": 2}
    value = read("[2020-99-01, 1e-05, 1e5, 0x10, 0o10, yes, 1_000, .5, 'x']")
    assert value == ["2020-99-01", 1e-5, 1e5, 16, 8, "yes", 1000, 0.5, "x"]


@dataclass(frozen=True)
class Written(StageFile):
    number: int
    inner: dict[str, float]
    words: tuple[str, ...] = ()


@given(
    record=st.builds(
        Written,
        number=st.integers(),
        inner=st.dictionaries(TEXTS, st.floats(allow_nan=False, allow_infinity=False)),
        words=st.lists(TEXTS).map(tuple),
    ),
    suffix=st.sampled_from([".json", ".yaml"]),
)
@example(record=Written(1, {}, ("\x85", "a\u2028b")), suffix=".yaml")
@example(record=Written(1, {}, (30 * "Hãy trả lời bằng tiếng Việt. ",)), suffix=".yaml")
@quick(60)
def test_a_written_record_is_read_back_equal(record: Written, suffix: str, path: Path) -> None:
    record.write(path.with_suffix(suffix))
    assert Written.read(path.with_suffix(suffix), fix="make it") == record


@pytest.mark.parametrize("content", [b"[" * 10_000, b'{"number": ' + b"9" * 5000 + b"}"])
def test_a_damaged_record_is_refused_on_one_line_with_the_command(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))} is damaged: .*; rebuild it with: make it$"):
        Written.read(path, fix="make it")


def test_a_missing_record_or_a_folder_gives_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.json is missing; rebuild it with: make it"):
        Written.read(tmp_path / "x.json", fix="make it")
    with pytest.raises(UserError, match=r"cannot be read: Is a directory; rebuild it with: make it"):
        Written.read(tmp_path, fix="make it")
