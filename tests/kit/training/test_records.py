from dataclasses import replace
from pathlib import Path

from stages.kit.training.records import TrainingRecord, write_trace
from tests.made_up_records import TRAINING


def test_a_record_is_read_as_it_was_written_a_loss_that_is_no_number_included(tmp_path: Path) -> None:
    path = tmp_path / "r1/training/training.json"
    TRAINING.write(path)
    assert TrainingRecord.read(path) == TRAINING
    replace(TRAINING, final_loss=float("nan")).write(path)
    assert "loss nan" in TrainingRecord.read(path).summary()


def test_a_trace_has_a_row_a_step(tmp_path: Path) -> None:
    write_trace([("0x1.8000000000000p+1", "nan"), ("inf", "0x0.0p+0")], tmp_path / "trace.csv")
    rows = ["step,loss,grad_norm", "1,0x1.8000000000000p+1,nan", "2,inf,0x0.0p+0"]
    assert (tmp_path / "trace.csv").read_text().splitlines() == rows
