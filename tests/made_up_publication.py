"""A workspace with one finished run of detection, made up: all that publish reads of r4-joint, and no training."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from stages.core.lineage import Lineage, content_digest, file_digest, write_lineage
from stages.core.params import load_params
from stages.core.params.schema import LimitParams
from stages.core.provenance import records_dir
from stages.models.certificate import QuantizationCost
from stages.publish import publish_run
from stages.publishing.signing import KEY_FILE, SIGNATURE_FILE, STATEMENT_FILE, sign, signing_key, statement
from stages.reporting.runs import copy_to_report, report_runs_dir
from tests.made_up_records import CERTIFICATE, PROVENANCE
from tests.made_up_runs import made_up_ious, project_params, write_made_up_run
from tests.stage_runs import few_photographs
from tests.tasks import prepare

RUN = "r4-joint"


def made_up_workspace(folder: Path, *, base_source: dict[str, str] | None = None) -> Path:
    """A workspace of r4-joint and its baseline, evaluated on 40 samples.

    base_source: of the base's lineage; not given: the tiny base's.
    """
    data_dir, params = folder / "data", project_params()
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent.parent / "params.yaml", folder)
    prepared_dir = data_dir / "prepared/nutrition-tables"
    source = f"folder:{few_photographs().name}"
    prepare("detection", source, out_dir=prepared_dir, limit=LimitParams(train=2, val=2))
    base = _model(data_dir / "bases/vlm", "base", "vlm", source=base_source or {"folder": "data/tiny/qwen2-vl"})
    run_dir = write_made_up_run(data_dir / "runs", RUN, made_up_ious(0.6, 40, seed=1), params=params, num_examples=2)
    for path in run_dir.glob("model_lineage.json"):  # that of a card
        path.unlink()
    trained_dir, merged_dir = run_dir / "trained", run_dir / "merged"
    trained = _model(trained_dir, "trained", RUN, parents={"base": (data_dir / "bases/vlm", base)})
    parents = {"base": (data_dir / "bases/vlm", base), "trained": (trained_dir, trained)}
    merged = _model(merged_dir, "merged", RUN, parents=parents)
    scores = {"mean_iou": 0.6}
    cost = QuantizationCost(
        logit_deviation=0.1, samples=2, batch_size=2, same_completions=2, trained=dict(scores), merged=dict(scores)
    )
    quantized = replace(CERTIFICATE, trained_quantization="nf4", quantization_cost=cost)
    replace(quantized, recipe=RUN, merged_digest=merged.digest).write(run_dir / "merge.json")
    copy_to_report(run_dir, report_runs_dir(data_dir, "detection") / RUN, lineage=merged)
    write_made_up_run(report_runs_dir(data_dir, "detection"), "base-vlm", made_up_ious(0.2, 40, seed=2))
    write_records(folder)
    return folder


def made_up_publication(root: Path) -> Path:
    """The published folder, away from its workspace."""
    with contextlib.chdir(made_up_workspace(root / "workspace")), pytest.MonkeyPatch.context() as patch:
        patch.delenv("DVC_ROOT", raising=False)
        publish_run(load_params(), RUN, root / "workspace/published")
    return Path(shutil.copytree(root / "workspace/published", root / "elsewhere" / RUN))


def sign_again(folder: Path, *, statement_follows: bool = True) -> None:
    """Sign with another key. statement_follows: first write the statement of the files as they are now."""
    path = folder / STATEMENT_FILE
    if statement_follows:
        records = records_in(json.loads(path.read_text()))
        unnamed = (STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE)
        found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        files = {name: file_digest(file) for name, file in found.items() if name not in unnamed}
        path.write_text(json.dumps(statement(files, records)))
    sign(folder, signing_key(folder.parent / "their key"))


def records_in(content: Any) -> list[dict[str, Any]]:
    """The records in a statement."""
    found: list[dict[str, Any]] = content["predicate"]["buildDefinition"]["internalParameters"]["records"]
    return found


def write_records(folder: Path) -> None:
    """Write the launcher's records of train, merge and evaluate."""
    run_dir = Path("data/runs") / RUN
    plan = YAML(typ="safe").load(folder / run_dir / "plan.yaml")
    base, read, trained = Path("data/bases/vlm"), run_dir / "plan.yaml", run_dir / "trained"
    inputs_of = {
        "train": [base, read],
        "merge": [base, read, trained],
        "evaluate": [read, run_dir / "merged", run_dir / "merge.json"],
    }
    for hour, (stage, inputs) in enumerate(inputs_of.items(), start=10):
        record = replace(
            PROVENANCE,
            stage=f"{stage}@{RUN}",
            started=f"2026-11-21T{hour}:00:00+00:00",
            ended=f"2026-11-21T{hour}:01:00+00:00",
            plan=plan,
            params={"profiles.tiny.evaluation": {"max_new_tokens": 16}},
            inputs={path.as_posix(): content_digest(folder / path) for path in inputs},
        )
        record.write(records_dir(folder / "data", "detection") / f"{record.stage}.json")


def _model(
    folder: Path,
    kind: str,
    name: str,
    *,
    source: dict[str, str] | None = None,
    parents: dict[str, tuple[Path, Lineage]] | None = None,
) -> Lineage:
    weights_dir = folder / "adapter" if kind == "trained" else folder
    weights_dir.mkdir(parents=True)
    if kind == "trained":
        (weights_dir / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file({"lora": np.full(64, 0.5, dtype=np.float32)}, weights_dir / "adapter_model.safetensors")
    else:
        config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
        (weights_dir / "config.json").write_text(json.dumps(config))
        save_file({"weight": np.full(64, len(kind), dtype=np.float32)}, weights_dir / "model.safetensors")
    return write_lineage(folder, kind=kind, name=name, source=source, parents=parents)
