import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.kit.training.trace import HEADER, StepBits, read_trace, write_trace

FLOATS = st.floats(width=32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.csv"


@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=5))
def test_a_trace_comes_back_bit_for_bit(path: Path, steps: list[tuple[float, float]]) -> None:
    """Every NaN is one: which it was is not told."""
    write_trace([StepBits.of(*step) for step in steps], path)
    read = [tuple(float.fromhex(text) for text in bits) for bits in read_trace(path)]
    assert [[struct.pack("d", math.copysign(x, 1) if math.isnan(x) else x) for x in step] for step in read] == [
        [struct.pack("d", math.nan if math.isnan(x) else x) for x in step] for step in steps
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step,loss\n1,0x1p+0\n",
        f"{HEADER}\n2,0x1p+0,0x1p+0\n",
        f"{HEADER}\n1,0x1p+0,0x1p+0\n1,0x1p+0,0x1p+0\n",
        f"{HEADER}\n1,0x1p+0\n",
        f"{HEADER}\n1,0x1p+0,zero\n",
        f"{HEADER}\n1,0x1p+9999,0x1p+0\n",
        "\xff\xfe",
    ],
)
def test_a_damaged_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"trace\.csv is"):
        read_trace(tmp_path / "trace.csv")
    with pytest.raises(UserError, match=r"nothing\.csv is missing"):
        read_trace(tmp_path / "nothing.csv")
