from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tools.verify.differences import compare_outputs, first_difference
from tools.verify.measured import MEASURED


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for side in ("ours", "theirs"):
        (tmp_path / side).mkdir()
    return tmp_path / "ours", tmp_path / "theirs"


def difference(pair: tuple[Path, Path], name: str, one: bytes | str, other: bytes | str) -> str:
    for folder, content in zip(pair, (one, other), strict=True):
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return first_difference(pair[0] / name, pair[1] / name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_the_first_value_that_differs_is_named_with_its_tensor(pair: tuple[Path, Path], dtype: torch.dtype) -> None:
    nan = torch.full((1,), float("nan"))  # equals itself
    tensors = {"b": torch.ones(2, 3).to(dtype), "a": torch.zeros(4, dtype=torch.float16), "nan": nan}
    save_file(tensors, pair[0] / "model.safetensors")
    tensors["b"][1, 1] = tensors["b"][1, 2] = 2
    save_file(tensors, pair[1] / "model.safetensors")
    found = first_difference(pair[0] / "model.safetensors", pair[1] / "model.safetensors")
    assert found == "tensor b: 2 of 6 values, first [1, 1], 1 against 2"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"c": torch.zeros(1)}, "tensor c is only in one of the two"),
        ({"a": torch.zeros(3, 2)}, "tensor a: F32 [2, 3] against F32 [3, 2]"),
        ({"a": torch.zeros(2, 3).half()}, "tensor a: F32 [2, 3] against F16 [2, 3]"),
        ({"b": torch.tensor(2.0)}, "tensor b: 1 of 1 values, first [], 1 against 2"),
    ],
)
def test_tensors_of_other_names_shapes_and_types_differ(
    pair: tuple[Path, Path], changes: dict[str, torch.Tensor], expected: str
) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0), "empty": torch.zeros(0, 4)}
    save_file(tensors, pair[0] / "m.safetensors")
    save_file(tensors | changes, pair[1] / "m.safetensors")
    assert first_difference(pair[0] / "m.safetensors", pair[1] / "m.safetensors") == expected


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_flipped_or_cut_safetensors_file_is_never_called_equal(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, folder / "one.safetensors")
    content = bytearray((folder / "one.safetensors").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    (folder / "other.safetensors").write_bytes(content)
    found = first_difference(folder / "one.safetensors", folder / "other.safetensors")
    assert found.startswith(("tensor ", "byte ", "the header"))


TRACE = "step,loss,grad_norm\n1,0x1.8p+0,0x1p+0\n2,0x1p+0,0x1p+0\n17,0x1p-1,0x1p+0\n"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            TRACE.replace("17,0x1p-1", "17,0x1.0000000000001p-1"),
            "step 17 of 3: loss 0.5 against 0.5 (0x1p-1 against 0x1.0000000000001p-1)",
        ),
        (TRACE.replace("2,0x1p+0,0x1p+0", "2,0x1p+0,nan"), "step 2 of 3: grad_norm 1 against nan (0x1p+0 against nan)"),
        (TRACE.replace("17,", "18,"), "step 17 of 3: step 17 against 18 (17 against 18)"),
        (TRACE.replace("17,0x1p-1,0x1p+0\n", ""), "step 17: only one of the two trainings got there"),
        (TRACE.replace("\n", "\r\n"), "the same steps, written otherwise"),
    ],
)
def test_the_first_step_that_differs_is_named(pair: tuple[Path, Path], other: str, expected: str) -> None:
    assert difference(pair, "trace.csv", TRACE, other) == expected


@pytest.mark.parametrize("damaged", [f"step,loss,grad_norm\n1,{'x' * 200_000},0x1p+0\n", "\0", ""])
def test_a_damaged_trace_is_compared_all_the_same(pair: tuple[Path, Path], damaged: str) -> None:
    for one, other in ((TRACE, damaged), (damaged, TRACE)):
        assert difference(pair, "trace.csv", one, other)


@pytest.mark.parametrize(
    ("name", "one", "other", "expected"),
    [
        ("a.json", '{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 3]}}', "a.b[1]: 2 against 3"),
        ("a.json", '{"a": {}}', '{"a": {"c": 2}}', "a.c is only in one of the two"),
        ("a.json", '{"a": 1}', '{"a": 1.0}', "a: 1 against 1.0"),
        ("a.json", '{"a": [1]}', '{"a": [1, 2]}', "a: [1] against [1, 2]"),
        ("a.json", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "spaces, or the order of keys"),
        ("a.json", "[1]", '{"a": 1}', "all of it: [1] against {'a': 1}"),
        ("a.json", '{"a": NaN, "b": 1}', '{"a": NaN, "b": 2}', "b: 1 against 2"),
        ("a.md", "one\ntwo\n", "one\ntwo\nthree\n", "line 3: None against 'three\\n'"),
        ("a.md", "one\n", "one\r\n", "line 1: 'one\\n' against 'one\\r\\n'"),
        ("a.txt", "x" * 500, "y" * 500, f"line 1: '{'x' * 76}... against '{'y' * 76}..."),
        ("a.png", b"\x89\xff\x00", b"\x89\xff\x01", "byte 2; 3 bytes against 3"),
        ("a.parquet", b"PAR1", b"PAR1 no more", "byte 4; 4 bytes against 12"),
        ("a.bin", b"\xff" * 2_000_000, b"\xff" * 1_999_999 + b"a", "byte 1,999,999; 2,000,000 bytes against 2,000,000"),
    ],
)
def test_json_is_compared_by_keys_text_by_lines_and_anything_else_by_bytes(
    pair: tuple[Path, Path], name: str, one: bytes | str, other: bytes | str, expected: str
) -> None:
    assert difference(pair, name, one, other) == expected


def test_parquet_is_compared_row_by_row(pair: tuple[Path, Path]) -> None:
    for folder, answer in zip(pair, ("một", "hai"), strict=True):
        pq.write_table(pa.table({"score": [float("nan"), 1.0], "answer": ["x", answer]}), folder / "p.parquet")
    assert first_difference(pair[0] / "p.parquet", pair[1] / "p.parquet") == "[1].answer: 'một' against 'hai'"


@pytest.mark.parametrize("name", MEASURED)
def test_only_measured_values_may_differ(pair: tuple[Path, Path], name: str) -> None:
    for key in MEASURED[name]:
        for folder, value in zip(pair, (1, 2), strict=True):
            (folder / name).write_text(json.dumps({key: value, "final_loss": 3}))
        assert compare_outputs(*pair, (name,)).measured == (name,)
    (pair[1] / name).write_text(json.dumps({MEASURED[name][0]: 2, "final_loss": 4}))
    assert compare_outputs(*pair, (name,)).different == {name: "final_loss: 3 against 4"}


def test_files_that_only_one_workspace_has_are_named(pair: tuple[Path, Path]) -> None:
    for folder, name in zip(pair, "ab", strict=True):
        (folder / "out").mkdir()
        (folder / "out" / name).touch()
    assert compare_outputs(*pair, ("out", "absent"), names=("this", "that")).different == {
        "out/a": "only in this",
        "out/b": "only in that",
    }
