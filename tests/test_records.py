"""Damage to what stages write for each other: said on one line with the command that makes it again, or of no harm."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.core.lineage import Lineage, read_lineage, true_base
from stages.core.params.schema import made_by
from stages.core.provenance import provenance_of_run
from stages.data.prepared import read_origin
from stages.mixture.certificate import BuildCertificate
from stages.models.certificate import require_certificate
from stages.planning.plan import read_plan
from stages.planning.prediction import MemoryRecord, prediction_metrics
from stages.training.records import TrainingRecord
from tests.damage import damaged_bytes, damaged_tree, quick
from tests.made_up_records import BUILD_CERTIFICATE, CERTIFICATE, PROVENANCE, TRAINING
from tests.memory.test_fit import start
from tests.planning.test_plan import PLAN


@dataclass(frozen=True)
class Written:
    """A record at its path in `data`; who reads it there and uses what it says; and the command that makes it again."""

    path: str
    content: Any
    use: Callable[[Path], object]
    fix: str


LINEAGE = {
    "kind": "trained",
    "name": "r1",
    "digest": "0" * 64,
    "source": {},
    "parents": {
        "base": {
            "path": "../../../bases/vlm",
            "lineage": {"kind": "base", "name": "vlm", "digest": "1" * 64, "source": {"folder": "a"}, "parents": {}},
        }
    },
}


def use_plan(path: Path) -> None:
    plan = read_plan("r1-llm-only", runs_dir=path.parents[1])
    assert plan.recipe == "r1-llm-only"
    assert min(plan.schedule.micro_batch, plan.schedule.grad_accumulation, plan.schedule.num_steps, plan.max_length) > 0
    assert made_by(plan.base_dir.removeprefix("data/"))


def use_memory(path: Path) -> None:
    record = MemoryRecord.read(path, fix="dvc repro plan@r1")
    assert prediction_metrics(record.prediction, 2**30, on_cpu=True)


def use_lineage(path: Path) -> None:
    lineage = read_lineage(path.parent, fix="dvc repro train@r1")
    assert lineage.root().name
    if "base" in lineage.parents:
        assert true_base(path.parent).is_relative_to(path.parents[3])


MERGED = Lineage(kind="merged", name="r1", digest=CERTIFICATE.merged_digest)
RECORDS = [
    Written("runs/r1-llm-only/plan.yaml", asdict(PLAN), use_plan, "dvc repro -f -s plan@r1-llm-only"),
    Written("runs/r1-llm-only/memory.json", asdict(start(12).record(start(12), 64)), use_memory,
            "dvc repro plan@r1"),
    Written("runs/r1/trained/lineage.json", LINEAGE, use_lineage, "dvc repro train@r1"),
    Written("runs/r1/training/training.json", asdict(TRAINING),
            lambda path: TrainingRecord.read(path, fix="dvc repro train@r1").summary(), "dvc repro train@r1"),
    Written("runs/r1/merge.json", asdict(CERTIFICATE), lambda path: require_certificate(path, MERGED),
            "dvc repro -f -s merge@r1"),
    Written("records/train@r1.json", asdict(PROVENANCE), lambda path: list(provenance_of_run(path.parent, "r1")),
            r"rm -f \S+r1\.json && dvc checkout \S+r1\.json"),
    Written("builds/moe.json", asdict(BUILD_CERTIFICATE),
            lambda path: BuildCertificate.read(path, fix="dvc repro build@moe").problems(), "dvc repro build@moe"),
    Written("prepared/tables/stats.json", {"source": "mix", "parts": {"a": {"source": "folder:a", "asked": 1}}},
            lambda path: read_origin(path.parent), "dvc repro -f -s prepare@tables"),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: Path(record.path).stem)
@given(data=st.data())
@quick(60)
def test_any_damage_to_a_record_is_refused_on_one_line_with_the_command_or_it_can_be_used(
    record: Written, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "data" / record.path
    path.parent.mkdir(parents=True, exist_ok=True)
    good = json.dumps(record.content)
    path.write_text(good)
    record.use(path)
    tree = damaged_tree(json.loads(good)).map(lambda tree: json.dumps(tree).encode())
    path.write_bytes(data.draw(tree | damaged_bytes(good.encode())))
    try:
        record.use(path)
    except UserError as error:
        why = "is damaged: |certifies |records a failed merge: "
        assert re.fullmatch(rf".*{path.name} ({why}).* it with: {record.fix}", error.message)
