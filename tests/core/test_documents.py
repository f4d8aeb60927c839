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
from stages.core.records import Unreadable, dotted, problems, read_record, read_yaml
from tests.damage import TEXTS, VALUES, damaged_bytes, quick


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents") / "file"


def read(content: str | bytes, path: Path) -> Any:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return read_yaml(cast("type[Any]", Any), path)


YAML_PIECES = [
    *("a", "b: ", "- ", "? ", ": ", "\n", "\n  ", " ", "\t", "[", "]", "{", "}", ",", "#", "|", ">"),
    *("&a ", "*a", "<<: ", "!x ", "!!int ", "!!set ", "!!binary ", "%YAML 1.2\n", "%YAML 1.9999999999\n", "---\n"),
    *("...\n", "'", '"', "\\", "\\UFFFFFFFF", "\\0", "\\ud800", "~", "1e5", "0x", "1_", "+.inf", ".nan", "2020-99-01"),
    *("\0", "\x85", "é", "@", "=", "true", "\r\n", "\N{BYTE ORDER MARK}", "9" * 5000, "0x" + "f" * 5000),
]


@given(content=st.lists(st.sampled_from(YAML_PIECES), max_size=20).map("".join) | st.text() | st.binary())
@example(content="[" * 1000)
@example(content="a: &a [*a, *a]")
@example(content="a: !!bool tiny")
@quick(400)
def test_any_content_is_read_or_refused_on_one_line(content: str | bytes, path: Path) -> None:
    try:
        json.dumps(read(content, path))
    except Unreadable as error:
        assert "\n" not in str(error)
    except ValidationError as error:
        assert all("\n" not in f"{where}{problem}" for where, problem in problems(error, Any).items())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "line 2, column 1: did not find expected node content"),
        ("a: b\n\tc: d", "line 2, column 1: found a tab character"),
        ("a: *b", "line 1: the anchor 'b' is refused"),
        ("a: 1\nb: &c [*c]", "line 2: the anchor 'c' is refused; write out the value in each place"),
        ("a: 1\na: 2", "line 2, column 1: found duplicate key .a."),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: !x y", "line 1, column 4: could not determine a constructor for the tag '!x'"),
        ("[" * 1000 + "]" * 1000, "nested too deep"),
        (b"a: \xe9", "at position 3"),
    ],
)
def test_what_is_no_yaml_says_why(text: str | bytes, reason: str, path: Path) -> None:
    with pytest.raises(Unreadable, match=reason):
        read(text, path)


def test_merges_dates_and_numbers_are_those_of_yaml_1_2_and_json(path: Path) -> None:
    assert read("{<<: [{x: 1, y: 1}, {x: 2, z: 2}], y: 3}", path) == {"x": 1, "y": 3, "z": 2}
    value = read("[2020-99-01, 1e-05, 1e5, 0x10, 0o10, yes, 1_000, .5, 'x']", path)
    assert value == ["2020-99-01", 1e-5, 1e5, 16, 8, "yes", 1000, 0.5, "x"]


@dataclass
class Written:
    number: int
    inner: dict[str, float]


@given(
    content=VALUES.map(lambda value: json.dumps(value).encode()) | damaged_bytes(b'{"number": 3, "inner": {"a": 0.5}}')
)
@example(content=b"[" * 10_000)
@example(content=b'{"number": ' + b"9" * 5000 + b"}")
@quick(150)
def test_a_damaged_record_is_refused_on_one_line_with_the_command(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    try:
        found = read_record(Written, path, fix="dvc repro x")
    except UserError as error:
        assert re.fullmatch(rf"{re.escape(str(path))} is damaged: .*; rebuild it with: dvc repro x", error.message)
    else:
        assert isinstance(found, Written)


def test_a_record_that_is_missing_or_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.json is missing; rebuild it with: dvc repro x"):
        read_record(Written, tmp_path / "x.json", fix="dvc repro x")
    with pytest.raises(UserError, match="cannot be read: Is a directory; rebuild it with: dvc repro x"):
        read_record(Written, tmp_path, fix="dvc repro x")


@given(steps=st.lists(TEXTS | st.text() | st.integers(), max_size=4))
@quick(60)
def test_a_path_is_on_one_line(steps: list[str | int]) -> None:
    assert dotted(steps).isprintable()
