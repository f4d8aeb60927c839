"""Check of a published folder: its signature, and whether everything in it agrees.

It needs neither DVC nor the workspace that the folder comes from, so that it checks a copy or a download too. Every
file may be hostile: whoever changes the folder can sign it again with a key of their own. So each file that a loader
reads has to have the content that lineage, records and statement say, and no other file may be there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stages.core.errors import UserError, bytes_text, join_truncated
from stages.core.families import family_of
from stages.core.given_files import read_plain, stays_inside
from stages.core.lineage import Lineage, combined_digest, file_digests, read_lineage, short
from stages.core.provenance import Provenance
from stages.core.records import dotted, parse, parse_json, parse_yaml, shown, yaml_text
from stages.core.tasks import load_task
from stages.models.certificate import TOLERANCE, MergeCertificate
from stages.models.folders import MODEL_FILES, check_model_folder, read_config
from stages.planning.ladder import lowered
from stages.planning.plan import Plan
from stages.publishing.signing import (
    BUILD_TYPE,
    KEY_FILE,
    SIGNATURE_FILE,
    STATEMENT_FILE,
    UNSIGNED,
    fingerprint,
    require_signature,
    statement,
)
from stages.reporting.runs import EXAMPLES_DIR, MODEL_LINEAGE_FILE

CARD_FILE = "README.md"
EVIDENCE_DIR = "evidence"
LINEAGE, CERTIFICATE, METRICS, PLAN = (
    f"{EVIDENCE_DIR}/{name}" for name in (MODEL_LINEAGE_FILE, "merge.json", "metrics.json", "plan.yaml")
)
TRAINED_DIR = "trained"
MAX_PROOF_BYTES = 4 * 2**20
"""Limit of a file that is not a model's: a statement has some 100 KB, and its values may take fifty times its size."""
MODEL = "the model"
AGAIN = "make publish RUN=NAME"
"""The command that writes the folder again, where the run is."""
MAKERS = {"trained": "train", "merged": "merge"}
"""The stage that makes a model folder, by the kind of its lineage."""
PARENTS = {"base": set(), "trained": {"base"}, "merged": {"base", "trained"}, "built": {"base", "expert"}}
"""Roles of the parents that a lineage has, by its kind; a build has an expert/NAME for each of its experts."""
KINDS = {"base": ("base", "built", "merged"), "trained": ("trained",), "expert": ("merged",)}
"""Kinds of a parent, by its role."""

Problem = tuple[str, str]
"""A file of a published folder, and the problem with it."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    problems: tuple[str, ...]
    """A line for each file: its name, and the problems with it."""
    key: str
    """Fingerprint of the key in the folder; "" if it cannot be read."""
    model: Lineage | None
    records: tuple[Provenance, ...]
    """Records of the stages that made the model, in the order in which they ended."""


def check_published(folder: Path, public_key: Path | None = None) -> Checked:
    """Compare signature, digests, statement, lineage, records, plan, certificate and card with each other.

    public_key: of the publisher, from elsewhere; by default the one in the folder, which proves that nothing was
    changed by accident, and not who signed.
    Raises UserError for a folder that another version of Bakeoff wrote.
    """
    own_key, key = folder / KEY_FILE, ""
    problems: list[Problem] = []
    model: Lineage | None = None
    records: dict[str, Provenance] = {}
    with _explained("the folder", problems):
        paths = _signed_files(folder)
        problems += _unusual(folder, paths)
        digests = {} if problems else dict(zip(paths, file_digests(paths.values()).values(), strict=True))
    if not problems:
        _refuse_another_version(paths[STATEMENT_FILE])
        with _explained(KEY_FILE, problems):
            key = fingerprint(own_key)
        with _explained(SIGNATURE_FILE, problems):
            require_signature(folder, public_key or own_key)
        with _explained(STATEMENT_FILE, problems):
            content = parse_json(read_plain(paths[STATEMENT_FILE]))
            said = content["predicate"]["buildDefinition"]["internalParameters"]["records"]
            records = {record.stage: record for record in parse(list[Provenance], said)}
            problems += _statement_problems(content, said, digests)
        with _explained(LINEAGE, problems):
            model = read_lineage(folder / EVIDENCE_DIR, name=MODEL_LINEAGE_FILE, fix=AGAIN)
            problems += _lineage_problems(model, records)
        with _explained(STATEMENT_FILE, problems):
            problems += _record_problems(records)
    if model is not None:
        with _explained(MODEL, problems):
            check_model_folder(folder)
            problems += _content_problems(model, records, digests)
        with _explained(CERTIFICATE, problems):
            problems += _certificate_problems(MergeCertificate.read(folder / CERTIFICATE, fix=AGAIN), model, records)
        with _explained(CARD_FILE, problems):
            problems += _card_problems(folder, model, records[f"merge@{model.name}"].plan or {})
    by_file: dict[str, list[str]] = {}
    for file, problem in problems:
        by_file.setdefault(file, []).append(problem)
    return Checked(
        problems=tuple(f"{file}: {'; '.join(dict.fromkeys(found))}" for file, found in by_file.items()),
        key=key,
        model=model,
        records=tuple(records.values()),
    )


def _refuse_another_version(statement_path: Path) -> None:
    form = None
    with suppress(Exception):  # whatever else is wrong with the statement is found below
        form = parse_json(read_plain(statement_path))["predicate"]["buildDefinition"]["buildType"]
    if form != BUILD_TYPE and re.fullmatch(r"urn:bakeoff:stages:v\d{1,9}", str(form)):
        raise UserError(
            f"{statement_path} has the form {form}, and this version of Bakeoff checks {BUILD_TYPE}; check the folder "
            "with the version that wrote it, such as the commit that its records name"
        )


@contextmanager
def _explained(file: str, problems: list[Problem]) -> Iterator[None]:
    """Turns whatever fails within into a problem of the file: a hostile one may make any library raise anything."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        why = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        problems.append((file, f"cannot be verified: {' '.join(why.split())[:300]}"))


def _signed_files(folder: Path) -> dict[str, Path]:
    """Everything in the folder by name, except folders and what may be unsigned. The signature is included."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: path
        for name, path in found.items()
        if path.is_symlink() or not (path.is_dir() or name.partition("/")[0] in UNSIGNED[1:])
    }


def _unusual(folder: Path, paths: Mapping[str, Path]) -> Iterator[Problem]:
    """Files that are missing, and pipes, broken links, links to folders and links out of the folder, which a loader
    would follow."""
    for name, path in paths.items():
        if not path.is_file():
            yield name, "is no plain file"
        elif path.is_symlink() and not stays_inside(path, folder):
            yield name, "is a link that leads out of the folder"
    for name in (CARD_FILE, LINEAGE, CERTIFICATE, METRICS, PLAN, STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE):
        if name in paths and paths[name].is_file() and paths[name].stat().st_size > MAX_PROOF_BYTES:
            yield name, f"is larger than {bytes_text(MAX_PROOF_BYTES)}"
        elif name not in paths:
            yield name, "is no plain file" if (folder / name).exists() else "is missing"


def _statement_problems(content: Any, records: Any, digests: Mapping[str, str]) -> Iterator[Problem]:
    """Files that the statement does not name, or names with another content; anything else that it should not say."""
    files = {name: found for name, found in digests.items() if name not in (STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE)}
    subjects = {each["name"]: each["digest"]["sha256"] for each in content["subject"]}
    for name in sorted(files.keys() | subjects.keys()):
        if name not in subjects:
            yield name, f"is not in {STATEMENT_FILE}"
        elif name not in files:
            yield name, f"is missing, although {STATEMENT_FILE} has it"
        elif files[name] != subjects[name]:
            yield name, f"has content {short(files[name])}, but {STATEMENT_FILE} says {short(str(subjects[name]))}"
    if len({each["stage"] for each in records}) < len(records):
        yield STATEMENT_FILE, "has several records of one stage"
    if [*records] != sorted(records, key=lambda each: str(each["ended"])):
        yield STATEMENT_FILE, "does not have its records in the order in which they ended"
    if files == subjects and content != statement(files, records):
        yield STATEMENT_FILE, "is not the statement that follows from its records and these files"


def _lineage_problems(model: Lineage, records: Mapping[str, Provenance]) -> Iterator[Problem]:
    """A lineage without the parents of its kind, and records that do not have the models of the lineage."""
    if model.kind != "merged":
        yield LINEAGE, f"is of a {model.kind} model, expected a merged one"
    for each in model.tree():
        roles = {role.partition("/")[0] for role in each.parents}
        if roles != PARENTS.get(each.kind):
            yield (
                LINEAGE,
                f"says {join_truncated(sorted(roles)) or 'nothing'} of what the {each.kind} {each.name} is of",
            )
        for role, parent in each.parents.items():
            base = each.parents["base"].lineage if each.kind == "merged" and role == "trained" else None
            if (
                parent.lineage.kind not in KINDS.get(role.partition("/")[0], ())
                or os.path.normpath(f"{_place(each)}/{parent.path}") != _place(parent.lineage)
                or (base is not None and base != parent.lineage.parents["base"].lineage)
            ):
                yield LINEAGE, f"says another {role} of the {each.kind} {each.name} than it can have"
    facts = list(_facts(model))
    for stage in dict.fromkeys(fact[0] for fact in facts if fact[0] not in records):
        yield STATEMENT_FILE, f"has no record of {stage}"
    for stage, kind, path, digest in facts:
        if stage in records and getattr(records[stage], kind).get(path) != digest:
            yield STATEMENT_FILE, f"{stage} has no {path} with content {short(digest)} among its {kind}"
    if others := sorted(records.keys() - {fact[0] for fact in facts}):
        yield STATEMENT_FILE, f"has records of {', '.join(others)}, which made nothing of this"


def _facts(model: Lineage) -> Iterator[tuple[str, str, str, str]]:
    """(stage, "inputs" or "outputs", path, digest): what records say of the models of a lineage, and its evaluation."""
    yield f"evaluate@{model.name}", "inputs", f"data/runs/{model.name}/merged", model.digest
    for each in model.tree():
        if each.kind in MAKERS:
            stage = f"{MAKERS[each.kind]}@{each.name}"
            yield stage, "outputs", _place(each), each.digest
            for parent in each.parents.values():
                yield stage, "inputs", _place(parent.lineage), parent.lineage.digest


def _place(model: Lineage) -> str:
    """The folder of a model in the workspace that it was made in."""
    folders = {"base": "data/bases", "built": "data/builds"}
    runs = f"data/runs/{model.name}/{model.kind}"
    return f"{folders[model.kind]}/{model.name}" if model.kind in folders else runs


def _record_problems(records: Mapping[str, Provenance]) -> Iterator[Problem]:
    """Records whose plan is not the file that their stage read, or for a training what the memory ladder made of it, or
    whose seed is not the plan's."""
    for stage, record in records.items():
        kind, _, run = stage.partition("@")
        plan, read = record.plan or {}, record.inputs.get(f"data/runs/{run}/plan.yaml")
        if kind == "train" and record.attempt > 0:
            plan = records[f"merge@{run}"].plan or {}
            lower = lowered(parse(Plan, plan), record.attempt)
            if lower is None or json.dumps(asdict(lower)) != json.dumps(record.plan):
                yield STATEMENT_FILE, f"{stage} followed another plan than attempt {record.attempt} of {run}'s"
        if hashlib.sha256(yaml_text(plan).encode()).hexdigest() != read or plan["seed"] != record.seed:
            yield STATEMENT_FILE, f"the plan and seed of {stage} are not those of the plan.yaml that it read"


def _content_problems(
    model: Lineage, records: Mapping[str, Provenance], digests: Mapping[str, str]
) -> Iterator[Problem]:
    """Files that are not those that the run's stages left, by their places in the folder; and any other file."""
    run = f"data/runs/{model.name}"
    train, merge, evaluate = (records[f"{stage}@{model.name}"] for stage in ("train", "merge", "evaluate"))
    has_adapter = "lora" in (train.plan or {})["parts"].values()
    expected = {
        MODEL: model.digest,
        TRAINED_DIR: model.parents["trained"].lineage.digest if has_adapter else None,
        EXAMPLES_DIR: evaluate.outputs.get(f"{run}/{EXAMPLES_DIR}"),
        CERTIFICATE: merge.outputs[f"{run}/merge.json"],
        METRICS: evaluate.outputs[f"{run}/metrics.json"],
        PLAN: train.inputs[f"{run}/plan.yaml"],
    }
    found: dict[str, dict[str, str]] = {group: {} for group in expected}
    for name, digest in digests.items():
        top, _, below = name.partition("/")
        group = (name if top == EVIDENCE_DIR else top) if below else MODEL
        if name in (CARD_FILE, LINEAGE, STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE):
            continue  # each is compared with the others
        loadable = any(fnmatch(name.rpartition("/")[2], pattern) for pattern in MODEL_FILES)  # no code, no pickle
        if group not in expected or (group in (MODEL, TRAINED_DIR) and not loadable):
            yield name, "is no file of a published model"
        else:
            found[group][name if group == MODEL else below] = digest
    for group, files in found.items():
        content = combined_digest(files) if group in (MODEL, TRAINED_DIR, EXAMPLES_DIR) else "".join(files.values())
        if (content if files else None) != expected[group]:
            yield group, f"has other files than those that the stages of {model.name} left"


def _certificate_problems(
    certificate: MergeCertificate, model: Lineage, records: Mapping[str, Provenance]
) -> Iterator[Problem]:
    merge, train = (records[f"{stage}@{model.name}"].plan or {} for stage in ("merge", "train"))
    precision, quantization = merge["precision"], train["quantization"]
    subject = certificate.recipe, certificate.merged_digest, certificate.precision, certificate.tolerance
    quantized = certificate.trained_quantization, certificate.quantization_cost is not None
    if (
        subject != (model.name, model.digest, precision, TOLERANCE[precision])
        or quantized != (quantization, quantization != "none")
        or certificate.problems()
    ):
        yield CERTIFICATE, f"does not certify the model with content {short(model.digest)}"


def pipeline_tag(config: Mapping[str, Any]) -> str:
    """The hub's word for what a model with this config.json does."""
    return "text-generation" if family_of(config["model_type"]).vision is None else "image-text-to-text"


def _card_problems(folder: Path, model: Lineage, plan: Mapping[str, Any]) -> Iterator[Problem]:
    """Metadata of the card that do not follow from lineage, plan and figures. The licence and the sources of data are
    in none of them; nothing is known of the text."""
    front = re.match(r"---\n(.*?)\n---\n", read_plain(folder / CARD_FILE).decode(), re.DOTALL)
    facts, figures = parse_yaml(front[1] if front else ""), parse_json(read_plain(folder / METRICS))
    facts["base_model"] = sorted(set(facts.get("base_model", [])))
    (entry,) = facts["model-index"]
    (result,) = entry["results"]
    headings = {metric["type"]: metric["name"] for metric in result["metrics"]}
    # The figures of chat depend on params.yaml, which is not published.
    if report := getattr(load_task(plan["task"], "report"), "REPORT", None):
        reported = [each for each in report.metrics if isinstance(figures.get(each.key), int | float)]
        headings = {each.key: each.heading for each in reported}
    tag, split, data = pipeline_tag(read_config(folder)), figures.get("split", "val"), Path(plan["data_dir"]).name
    source = {key: result["dataset"][key] for key in ("type", "revision") if key in result["dataset"]}
    metrics = [{"type": key, "value": figures[key], "name": heading} for key, heading in headings.items()]
    expected_result = {
        "task": {"type": tag, "name": report.title if report else result["task"]["name"]},
        "dataset": {"name": data, "split": split, **source},
        "metrics": metrics,
    }
    expected = {
        **{key: facts[key] for key in ("license", "datasets") if key in facts},
        "base_model": sorted({root.source["hub"] for root in model.tree() if "hub" in root.source}),
        "library_name": "transformers",
        "pipeline_tag": tag,
        "tags": ["bakeoff", plan["task"]],
        "model-index": [{"name": model.name, "results": [expected_result]}],
    }
    for where, said, known in _differences(facts, expected):
        yield CARD_FILE, f"says {dotted(where)} {shown(said)}, expected {shown(known)}"
    if not metrics:
        yield CARD_FILE, "has figures of nothing"


def _differences(found: Any, expected: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The values of one tree that are not those of another: path, value there and here; None for a lacking one."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(found.get(key), expected.get(key), (*where, key))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            yield from _differences(*pair, (*where, str(number)))
    elif found != expected or isinstance(found, bool) != isinstance(expected, bool):
        yield where, found, expected
