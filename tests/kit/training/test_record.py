import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given

from stages.core.errors import UserError
from stages.core.publish import publish_json
from stages.kit.training.record import read_record, write_trace
from tests.damage import damaged_bytes, damaged_tree, quick
from tests.made_up_records import TRAINING


def test_a_record_is_read_as_it_was_written_a_loss_that_is_no_number_included(tmp_path: Path) -> None:
    path = tmp_path / "r1/training/training.json"
    publish_json(TRAINING, path)
    assert read_record(path) == TRAINING
    publish_json(replace(TRAINING, final_loss=float("nan")), path)
    assert "loss nan" in read_record(path).summary()


def test_a_trace_has_a_row_a_step(tmp_path: Path) -> None:
    write_trace([("0x1.8000000000000p+1", "nan"), ("inf", "0x0.0p+0")], tmp_path / "trace.csv")
    rows = ["step,loss,grad_norm", "1,0x1.8000000000000p+1,nan", "2,inf,0x0.0p+0"]
    assert (tmp_path / "trace.csv").read_text().splitlines() == rows


@given(
    content=damaged_tree(asdict(TRAINING)).map(lambda tree: json.dumps(tree).encode())
    | damaged_bytes(json.dumps(asdict(TRAINING)).encode())
)
@quick(80)
def test_any_damage_is_said_on_one_line_with_the_command_or_the_record_can_be_shown(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "r1/training/training.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    try:
        record = read_record(path)
    except UserError as error:
        assert re.fullmatch(r".*g\.json is damaged: .*; rebuild it with: dvc repro -f -s train@r1", error.message)
    else:
        assert record.summary()
