"""Where two outputs differ first, in the terms of what they are: a training step, a tensor, a row, a key, a line."""

from __future__ import annotations

import csv
import filecmp
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tools.verify.measured import MEASURED, without_measured

TRACE_COLUMNS = ("step", "loss", "grad_norm")
"""Of a file that tells of a training step by step, its numbers bit for bit as float.hex() writes them."""

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    equal: tuple[str, ...]
    """Files that are the same, byte for byte."""
    measured: tuple[str, ...]
    """Those that are but for what is measured."""
    different: Mapping[str, str]
    """What is first unlike in each other one; a trace of a training comes first."""
    same_trace: bool
    """Whether a training took the same course to its last step, bit for bit; False for another stage too."""
    size_bytes: int
    """Of all that was compared, on one side."""


def compare_outputs(
    ours: Path, theirs: Path, outputs: tuple[str, ...], *, names: tuple[str, str] = ("the first", "the second")
) -> Comparison:
    """Compare the same outputs in two workspaces. What a message says first is of `ours`.

    names: of the two, for what only one of them has.
    """
    equal, measured, different, size_bytes = [], [], {}, 0
    for name in sorted({file for folder in (ours, theirs) for output in outputs for file in _files(folder, output)}):
        one, other = ours / name, theirs / name
        if not (one.is_file() and other.is_file()):
            different[name] = f"only in {names[0] if one.is_file() else names[1]}"
            continue
        size_bytes += one.stat().st_size
        if filecmp.cmp(one, other, shallow=False):
            equal.append(name)
        elif one.name in MEASURED and _same_but_for_measured(one, other):
            measured.append(name)
        else:
            different[name] = first_difference(one, other)
    traces_first = dict(sorted(different.items(), key=lambda item: not is_trace(ours / item[0])))
    return Comparison(
        equal=tuple(equal),
        measured=tuple(measured),
        different=traces_first,
        same_trace=any(is_trace(ours / name) for name in equal),
        size_bytes=size_bytes,
    )


def first_difference(one: Path, other: Path) -> str:
    """In words, of two files that differ; where either is not what its name says, by the byte."""
    try:
        if is_trace(one):
            return _in_trace(one, other)
        if one.suffix == ".safetensors":
            return _in_safetensors(one, other)
        if one.suffix == ".parquet":
            return _in_parquet(one, other)
        if one.suffix == ".json":
            return next(_in_json(without_measured(one), without_measured(other), ""), "spaces, or the order of keys")
        return _in_lines(one.read_bytes().decode("utf-8"), other.read_bytes().decode("utf-8"))
    except (ValueError, KeyError, TypeError, OSError, csv.Error):  # pyarrow's errors are some of these
        return _in_bytes(one, other)


def is_trace(path: Path) -> bool:
    if path.suffix != ".csv" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:  # of a damaged file, csv may refuse the first line
        return set(TRACE_COLUMNS) <= set(file.readline().rstrip("\n").split(","))


def _in_trace(one: Path, other: Path) -> str:
    ours, theirs = ([*csv.DictReader(path.read_text(encoding="utf-8").splitlines())] for path in (one, other))
    for row, against in zip_longest(ours, theirs):
        if row is None or against is None:
            return f"step {(row or against)['step']}: only one of the two trainings got there"
        for name in TRACE_COLUMNS:
            bits = row[name], against[name]
            if bits[0] != bits[1]:
                decimal = bits if name == "step" else tuple(f"{float.fromhex(text):.9g}" for text in bits)
                said = f"{decimal[0]} against {decimal[1]} ({bits[0]} against {bits[1]})"
                return f"step {row['step']} of {len(ours)}: {name} {said}"
    return "the same steps, written otherwise"


def _in_safetensors(one: Path, other: Path) -> str:
    (ours, our_data), (theirs, their_data) = _tensors(one), _tensors(other)
    if alone := sorted(ours.keys() ^ theirs.keys()):
        return f"tensor {alone[0]} is only in one of the two"
    for name in sorted(ours, key=lambda name: ours[name]["data_offsets"]):
        kinds = [f"{tensor['dtype']} {tensor['shape']}" for tensor in (ours[name], theirs[name])]
        if kinds[0] != kinds[1]:
            return f"tensor {name}: {kinds[0]} against {kinds[1]}"
        values, against = (
            data[slice(*tensors[name]["data_offsets"])] for data, tensors in ((our_data, ours), (their_data, theirs))
        )
        if not np.array_equal(values, against):
            return f"tensor {name}: {_in_tensor(values, against, ours[name])}"
    return "the header"


def _tensors(path: Path) -> tuple[dict[str, dict[str, Any]], NDArray[np.uint8]]:
    """(what the header says of each tensor, the bytes after it), as safetensors' format.md has it."""
    content = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    if header and max(tensor["data_offsets"][1] for tensor in header.values()) != content.size - 8 - length:
        raise ValueError("not a whole file")
    return header, content[8 + length :]


def _in_tensor(values: NDArray[np.uint8], against: NDArray[np.uint8], tensor: dict[str, Any]) -> str:
    count = int(np.prod(tensor["shape"], dtype=np.int64))
    unlike = (values.reshape(count, -1) != against.reshape(count, -1)).any(axis=1)
    first = int(unlike.argmax())
    index = ", ".join(str(int(part)) for part in np.unravel_index(first, tensor["shape"])) if tensor["shape"] else ""
    shown = [_value(side.reshape(count, -1)[first], tensor["dtype"]) for side in (values, against)]
    return f"{int(unlike.sum()):,} of {count:,} values, first [{index}], {shown[0]} against {shown[1]}"


def _value(raw: NDArray[np.uint8], dtype: str) -> str:
    if dtype == "BF16":  # the upper half of a float32
        return f"{np.concatenate([np.zeros(2, np.uint8), raw]).view(np.float32)[0]:.9g}"
    return f"{raw.view(_FLOATS[dtype])[0]:.9g}" if dtype in _FLOATS else f"0x{raw[::-1].tobytes().hex()}"


def _in_parquet(one: Path, other: Path) -> str:
    ours, theirs = (pq.read_table(path) for path in (one, other))
    if ours.schema != theirs.schema or ours.num_rows != theirs.num_rows:
        return f"{ours.num_rows} rows of {ours.column_names} against {theirs.num_rows} of {theirs.column_names}"
    for name in ours.column_names:
        rows = zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=True)
        for number, (value, against) in enumerate(rows):
            if repr(value) != repr(against):  # a NaN is like another
                return f"row {number}, column {name}: {_short(value)} against {_short(against)}"
    return "the same rows, written otherwise"


def _in_json(one: Any, other: Any, path: str) -> Iterator[str]:
    """Dotted path and values of what differs; of two that JSON takes for one, such as 1 and 1.0, too."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            place = f"{path}.{key}" if path else str(key)
            if key in one and key in other:
                yield from _in_json(one[key], other[key], place)
            else:
                yield f"{place} is only in one of the two"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (value, against) in enumerate(zip(one, other, strict=True)):
            yield from _in_json(value, against, f"{path}[{index}]")
    elif json.dumps(one) != json.dumps(other):
        yield f"{path or 'all of it'}: {_short(one)} against {_short(other)}"


def _in_lines(one: str, other: str) -> str:
    for number, (line, against) in enumerate(zip_longest(one.splitlines(True), other.splitlines(True)), start=1):
        if line != against:
            return f"line {number}: {_short(line)} against {_short(against)}"
    raise ValueError("the same lines")


def _in_bytes(one: Path, other: Path) -> str:
    with one.open("rb") as ours, other.open("rb") as theirs:
        position = 0
        while True:
            chunk, against = ours.read(2**20), theirs.read(2**20)
            if chunk != against:
                same = next((at for at, (a, b) in enumerate(zip(chunk, against, strict=False)) if a != b), None)
                at = position + (min(len(chunk), len(against)) if same is None else same)
                return f"byte {at:,}; {one.stat().st_size:,} bytes against {other.stat().st_size:,}"
            position += len(chunk)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _same_but_for_measured(one: Path, other: Path) -> bool:
    try:
        return json.dumps(without_measured(one)) == json.dumps(without_measured(other))
    except ValueError:
        return False


def _files(workspace_dir: Path, output: str) -> list[str]:
    place = workspace_dir / output
    files = place.rglob("*") if place.is_dir() else [place]
    return [file.relative_to(workspace_dir).as_posix() for file in files if file.is_file()]
