"""Where two outputs differ first, in the terms of their format: a training step, a tensor, a row, a key, a line."""

from __future__ import annotations

import csv
import filecmp
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from stages.core.documents import shown
from tools.verify.measured import MEASURED, without_measured

TRACE_COLUMNS = ("step", "loss", "grad_norm")
"""Columns of a training's trace, one row a step; its numbers are bit for bit as float.hex() writes them."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    equal: tuple[str, ...]
    """Files that are the same, byte for byte."""
    measured: tuple[str, ...]
    """Files that differ only in times and memory."""
    different: Mapping[str, str]
    """The first difference of each other file; a trace of a training comes first."""
    same_trace: bool
    """Whether a training took the same course to its last step, bit for bit; False for another stage."""
    size_bytes: int
    """Of all compared files, on one side."""


def compare_outputs(
    ours: Path, theirs: Path, outputs: tuple[str, ...], *, names: tuple[str, str] = ("the first", "the second")
) -> Comparison:
    """Compare the same outputs in two workspaces. In messages `ours` comes first.

    names: of the two, for files that only one of them has.
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
    return Comparison(
        equal=tuple(equal),
        measured=tuple(measured),
        different=dict(sorted(different.items(), key=lambda item: not is_trace(ours / item[0]))),
        same_trace=any(is_trace(ours / name) for name in equal),
        size_bytes=size_bytes,
    )


def first_difference(one: Path, other: Path) -> str:
    """The first difference of two files that are not equal; by the byte where either is not in its format."""
    try:
        if is_trace(one):
            return _in_trace(one, other)
        if one.suffix == ".safetensors":
            return _in_safetensors(one, other)
        if one.suffix == ".parquet":
            rows, against = (pq.read_table(path).to_pylist() for path in (one, other))
            return next(_in_values(rows, against), "the same rows, written otherwise")
        if one.suffix == ".json" or one.name in MEASURED:
            return next(_in_values(without_measured(one), without_measured(other)), "spaces, or the order of keys")
        return _in_lines(one.read_bytes().decode("utf-8"), other.read_bytes().decode("utf-8"))
    # pyarrow's errors are some of these.
    except (ValueError, KeyError, TypeError, OSError, csv.Error, SafetensorError):
        return _in_bytes(one, other)


def is_trace(path: Path) -> bool:
    if path.suffix != ".csv" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:  # csv may refuse the first line of a damaged file
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
                values = f"{decimal[0]} against {decimal[1]} ({bits[0]} against {bits[1]})"
                return f"step {row['step']} of {len(ours)}: {name} {values}"
    return "the same steps, written otherwise"


def _in_safetensors(one: Path, other: Path) -> str:
    import torch

    with safe_open(one, framework="pt") as ours, safe_open(other, framework="pt") as theirs:
        if alone := sorted({*ours.keys()} ^ {*theirs.keys()}):
            return f"tensor {alone[0]} is only in one of the two"
        for name in ours.offset_keys():
            parts = [file.get_slice(name) for file in (ours, theirs)]
            kinds = [f"{part.get_dtype()} {part.get_shape()}" for part in parts]
            if kinds[0] != kinds[1]:
                return f"tensor {name}: {kinds[0]} against {kinds[1]}"
            values, against = ours.get_tensor(name), theirs.get_tensor(name)
            # By their bytes: a NaN equals itself, and -0.0 is not 0.0.
            bits = [tensor.reshape(-1, 1).view(torch.uint8) for tensor in (values, against)]
            unlike = (bits[0] != bits[1]).any(dim=1)
            if unlike.any():
                first = int(unlike.int().argmax())
                index = ", ".join(str(int(part)) for part in torch.unravel_index(torch.tensor(first), values.shape))
                ours_there, theirs_there = (f"{tensor.flatten()[first].item():.9g}" for tensor in (values, against))
                count = f"{int(unlike.sum()):,} of {values.numel():,} values"
                return f"tensor {name}: {count}, first [{index}], {ours_there} against {theirs_there}"
    return "the header"


def _in_values(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Dotted path and values of each difference; 1 and 1.0 differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            place = f"{path}.{key}" if path else str(key)
            if key in one and key in other:
                yield from _in_values(one[key], other[key], place)
            else:
                yield f"{place} is only in one of the two"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (value, against) in enumerate(zip(one, other, strict=True)):
            yield from _in_values(value, against, f"{path}[{index}]")
    elif repr(one) != repr(other):  # a NaN equals itself
        yield f"{path or 'all of it'}: {shown(one)} against {shown(other)}"


def _in_lines(one: str, other: str) -> str:
    lines = enumerate(zip_longest(one.splitlines(True), other.splitlines(True)), start=1)
    number, (line, against) = next((number, pair) for number, pair in lines if pair[0] != pair[1])
    return f"line {number}: {shown(line)} against {shown(against)}"


def _in_bytes(one: Path, other: Path) -> str:
    sizes = f"{one.stat().st_size:,} bytes against {other.stat().st_size:,}"
    with one.open("rb") as ours, other.open("rb") as theirs:
        position = 0
        while (chunk := ours.read(2**20)) == (against := theirs.read(2**20)) and chunk:
            position += len(chunk)
    pairs = enumerate(zip(chunk, against, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(chunk), len(against)))
    return f"byte {position + place:,}; {sizes}"


def _same_but_for_measured(one: Path, other: Path) -> bool:
    try:
        return json.dumps(without_measured(one)) == json.dumps(without_measured(other))
    except ValueError:
        return False


def _files(workspace_dir: Path, output: str) -> list[str]:
    place = workspace_dir / output
    files = place.rglob("*") if place.is_dir() else [place]
    return [file.relative_to(workspace_dir).as_posix() for file in files if file.is_file()]
