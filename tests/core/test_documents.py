import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.core.documents import MAX_DEPTH, MAX_VALUES, Unreadable, dotted, read_json, read_yaml
from stages.core.errors import UserError
from tests.damage import TEXTS, VALUES, damaged_bytes, quick


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents") / "file"


def read(content: str | bytes, path: Path) -> tuple[Any, dict[str, str]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return read_yaml(path)


YAML_PIECES = [
    *(
        "a",
        "b: ",
        "- ",
        "? ",
        ": ",
        "\n",
        "\n  ",
        " ",
        "\t",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&a ",
        "*a",
        "!x ",
        "!!int ",
        "!!set ",
    ),
    *(
        "!!binary ",
        "%YAML 1.2\n",
        "%YAML 1.9999999999\n",
        "---\n",
        "...\n",
        "|",
        ">",
        "'",
        '"',
        "\\",
        "\\UFFFFFFFF",
        "\\0",
    ),
    *(
        "\\ud800",
        "#",
        "<<: ",
        "~",
        "1e5",
        "0x",
        "1_",
        "+.inf",
        ".nan",
        "2020-99-01",
        "\0",
        "\x85",
        "\N{BYTE ORDER MARK}",
    ),
    *("é", "@", "=", "true", "\r\n", "9" * 5000, "0x" + "f" * 5000),
]


@given(content=st.lists(st.sampled_from(YAML_PIECES), max_size=20).map("".join) | st.text() | st.binary())
@example(content="[" * 400)
@example(content="a: &a [*a, *a]")
@example(content="a: !!bool tiny")
@quick(400)
def test_whatever_a_file_holds_gives_values_and_faults_on_one_line_each(content: str | bytes, path: Path) -> None:
    try:
        value, faults = read(content, path)
    except Unreadable as error:
        assert "\n" not in str(error)
        return
    json.dumps(value).encode()
    assert all("\n" not in f"{where}{fault}" for where, fault in faults.items())


@given(
    tree=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63) + 1, 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
@quick(100)
def test_what_json_writes_is_read_as_it_was(tree: Any, path: Path) -> None:
    """JSON is YAML, but for NaN; keys of ours hold no NUL."""
    text = json.dumps(tree)
    if "\\u0000" not in text and "\x7f" not in text:
        assert read(text, path) == (tree, {})


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a: 1\na: 2\nb: {c: 1, c: 1}", {"a": "set twice, in lines 1 and 2", "b.c": "set twice, in lines 3 and 3"}),
        (
            "a: {1: x, null: y}",
            {"a.1": "a key has to be text; put it in quotes", "a.null": "a key has to be text; put it in quotes"},
        ),
        ("a: {[1]: x}", {"a": "a key that is a list or a mapping, in line 1"}),
        ("a: [!x y, !!int z]", {"a.0": "unknown tag '!x'", "a.1": "'z' is no int"}),
        ("a: !!set {b}", {"a": "unknown tag 'tag:yaml.org,2002:set'"}),
        ("a: 9223372036854775808", {"a": "a number of more than 64 bits"}),
        (
            '"a\\nb": {"c.d": "\\ud800", e: "\\0"}',
            {
                "'a\\nb'.'c.d'": "half of a surrogate pair, which is no character",
                "'a\\nb'.e": "the character of number 0, which no name and no path has",
            },
        ),
        ("a: {<<: 3}", {"a.'<<'": "expected a mapping to merge, or a list of them"}),
    ],
)
def test_every_fault_is_said_under_its_path(text: str, faults: dict[str, str], path: Path) -> None:
    assert read(text, path)[1] == faults


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", r"line 1, column 5: .*expected"),
        ("a: b\n\tc: d", r"line 2, column 1: found character '\\t'"),
        ("a: *b", "line 1, column 4: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("[" * 400 + "]" * 400, "nested more than"),
        ("{a: " * (MAX_DEPTH + 2) + "}" * (MAX_DEPTH + 2), r"a\.a\.a\.a: lists and mappings are nested more than"),
        ("a: &a\n  b: *a", r"a\.b\.b\.b: lists and mappings are nested more than"),
        (
            "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]),
            f"more than {MAX_VALUES:,} values",
        ),
        (b"a: \xe9", "at position 3"),
    ],
)
def test_what_is_no_document_says_why(text: str | bytes, reason: str, path: Path) -> None:
    with pytest.raises(Unreadable, match=reason):
        read(text, path)


def test_merges_are_what_yaml_says_they_are(path: Path) -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: *a, x: 3}\nd: {<<: [*a, *b], w: 4}\n"
    value, faults = read(text, path)
    assert faults == {}
    assert value["c"] == {"x": 3, "y": 1}
    assert value["d"] == {"x": 1, "y": 1, "z": 2, "w": 4}


def test_a_date_stays_text_and_a_number_is_one(path: Path) -> None:
    value, faults = read("[2020-99-01, 1e-05, 1e5, 0x10, 0o10, yes, 1_000, .5, 'x']", path)
    assert (value, faults) == (["2020-99-01", 1e-5, 1e5, 16, 8, "yes", 1000, 0.5, "x"], {})


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
        found = read_json(Written, path, mend="dvc repro x")
    except UserError as error:
        assert re.fullmatch(rf"{re.escape(str(path))} is damaged: .*; rebuild it with: dvc repro x", error.message)
    else:
        assert isinstance(found, Written)


def test_a_record_that_is_missing_or_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.json is missing; rebuild it with: dvc repro x"):
        read_json(Written, tmp_path / "x.json", mend="dvc repro x")
    with pytest.raises(UserError, match="cannot be read: Is a directory; rebuild it with: dvc repro x"):
        read_json(Written, tmp_path, mend="dvc repro x")


@given(steps=st.lists(TEXTS | st.text() | st.integers(), max_size=4))
@quick(60)
def test_a_path_is_on_one_line(steps: list[str | int]) -> None:
    assert dotted(steps).isprintable()
