"""Checks a published folder against itself: signature, digests, statements, and the chain from the model to its base.

Needs neither DVC nor the workspace that it comes from, so that it checks a copy or a download too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard
from yaml import YAMLError

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, combined_digest, file_digest, read_lineage, short
from stages.kit.models.certificate import read_certificate
from stages.kit.publishing.card import CARD_FILE
from stages.kit.publishing.origins import lineage_tree
from stages.kit.publishing.signature import KEY_FILE, Problem, fingerprint, signature_problems
from stages.kit.publishing.statements import STATEMENTS_DIR, Made, read_statement, statement_name
from stages.kit.reporting.runs import MODEL_LINEAGE_FILE

EVIDENCE_DIR = "evidence"
MADE_BY = {"trained": "train", "merged": "merge"}
"""The stage that makes a model folder, by the kind of its lineage."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    problems: tuple[str, ...]
    """A line for each file: its name, and what is wrong with it."""
    key: str
    """Fingerprint of the key that signed; "" where it cannot be read."""
    model: Lineage | None
    statements: tuple[Made, ...]
    """In the order in which the stages ended."""


def check_published(folder: Path, public_key: Path | None = None) -> Checked:
    """Compare all that a published folder says.

    public_key: of the publisher, from elsewhere; not given: the one in the folder, which says that nothing was changed
    by accident, and not by whom it was signed.
    """
    key = public_key or folder / KEY_FILE
    problems = list(signature_problems(folder, key))
    model: Lineage | None = None
    statements: list[Made] = []
    try:
        model = read_lineage(folder / EVIDENCE_DIR, name=MODEL_LINEAGE_FILE)
    except UserError:
        problems.append((f"{EVIDENCE_DIR}/{MODEL_LINEAGE_FILE}", "cannot be read"))
    for path in sorted((folder / STATEMENTS_DIR).glob("*.json")):
        try:
            statements.append(read_statement(path))
        except ValueError as error:
            problems.append((f"{STATEMENTS_DIR}/{path.name}", f"is no statement of a stage: {error}"))
    for made in statements:
        problems += _file_problems(made, folder)
    if model is not None:
        problems += _chain_problems(model, {made.stage: made for made in statements}, folder)
        problems += _evidence_problems(model, folder)
    by_file: dict[str, list[str]] = {}
    for file, problem in problems:
        by_file.setdefault(file, []).append(problem)
    return Checked(
        problems=tuple(f"{file}: {'; '.join(dict.fromkeys(found))}" for file, found in by_file.items()),
        key=fingerprint(key) if key.is_file() else "",
        model=model,
        statements=tuple(sorted(statements, key=lambda made: made.ended)),
    )


def _file_problems(made: Made, folder: Path) -> Iterator[Problem]:
    """Of the published files that a stage made."""
    found = {}
    for file in made.files:
        path = folder / file.name
        if not path.is_file():
            yield file.name, f"is missing, though {made.stage} made it"
            return
        found[file.source] = file_digest(path)
        if found[file.source] != file.sha256:
            yield file.name, f"{made.stage} left {short(file.sha256)}, but it holds {short(found[file.source])}"
            return
    for output, digest in made.outputs.items():
        inside = {
            source.removeprefix(f"{output}/"): content
            for source, content in found.items()
            if source.startswith(f"{output}/") and not source.endswith(f"/{LINEAGE_FILE}")
        }
        if inside and combined_digest(inside) != digest:
            yield statement_name(made.stage), f"what it names of {output} is not what {made.stage} left there"


def _chain_problems(model: Lineage, by_stage: Mapping[str, Made], folder: Path) -> Iterator[Problem]:
    """Every model of the lineage was made by its stage, from those that the lineage names, and the last evaluated."""
    for each in lineage_tree(model):
        if each.kind not in MADE_BY:
            continue
        name = statement_name(f"{MADE_BY[each.kind]}@{each.name}")
        made = by_stage.get(f"{MADE_BY[each.kind]}@{each.name}")
        if made is None:
            if not (folder / name).exists():
                yield name, f"is missing, so nothing says how {each.kind} {each.name} was made"
            continue
        if each.digest not in made.outputs.values():
            yield name, f"made nothing with content {short(each.digest)}, which {each.name} has by the lineage"
        for role, parent in each.parents.items():
            if parent.lineage.digest not in made.inputs.values():
                yield name, f"read nothing with content {short(parent.lineage.digest)}, the {role} by the lineage"
    name = statement_name(evaluation := f"evaluate@{model.name}")
    if evaluation in by_stage and model.digest not in by_stage[evaluation].inputs.values():
        yield name, f"evaluated another model than {model.name} with content {short(model.digest)}"
    elif not (folder / name).exists():
        yield name, f"is missing, so nothing says how {model.name} was evaluated"


def _evidence_problems(model: Lineage, folder: Path) -> Iterator[Problem]:
    """Of the certificate, and of the card's figures."""
    try:
        certificate = read_certificate(folder / EVIDENCE_DIR / "merge.json", model.name)
        if certificate.merged_digest != model.digest or certificate.problems():
            yield f"{EVIDENCE_DIR}/merge.json", f"does not certify the model with content {short(model.digest)}"
    except UserError:
        yield f"{EVIDENCE_DIR}/merge.json", "is no certificate"
    try:
        metrics = json.loads((folder / EVIDENCE_DIR / "metrics.json").read_text(encoding="utf-8"))
        for result in ModelCard.load(folder / CARD_FILE).data.eval_results or []:
            if metrics[result.metric_type] != result.metric_value:
                yield CARD_FILE, f"says {result.metric_type} {result.metric_value}, metrics.json another figure"
    except (OSError, ValueError, LookupError, TypeError, YAMLError) as error:
        yield CARD_FILE, f"its figures cannot be compared with {EVIDENCE_DIR}/metrics.json: {type(error).__name__}"
