"""Records of provenance as in-toto statements with SLSA's provenance predicate, and back.

A statement names what a stage made (its subjects) and what it made that from (resolved dependencies), each with a
digest. Formats: https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement

from stages.core.provenance import Provenance

STATEMENTS_DIR = "attestations"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:bakeoff:stage:v1"
BUILDER = "urn:bakeoff:launcher:v1"
FOLDER_DIGEST = "bakeoffFolder"
"""Digest of a folder: SHA-256 over its files' names and SHA-256 (stages/core/lineage.py)."""

SOURCE = "source"
"""The annotation of a published file's subject: its path in the workspace."""


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file of a published folder that is an output of a stage, or of such an output a part."""

    name: str
    """Its path in the published folder."""
    source: str
    """Its path in the workspace that it comes from."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a statement says."""

    stage: str
    outputs: Mapping[str, str]
    """Digests by path in the workspace; a model folder's is that of its lineage."""
    inputs: Mapping[str, str]
    """Likewise."""
    files: tuple[PublishedFile, ...]
    ended: str
    """ISO 8601, UTC."""
    commit: str | None


def write_statement(record: Provenance, folder: Path, files: Iterable[PublishedFile]) -> None:
    """Write the statement of a stage into a published folder.

    files: the published ones; those that are no output of the stage are left out.
    """
    mine = [file for file in files if any(_is_within(file.source, path) for path in record.outputs)]
    subjects = [
        *(_resource(path, digest) for path, digest in record.outputs.items()),
        *(
            ResourceDescriptor(name=file.name, digest={"sha256": file.sha256}, annotations={SOURCE: file.source})
            for file in mine
        ),
    ]
    predicate = json_format.MessageToDict(_predicate(record))
    statement = Statement([each.pb for each in subjects], PREDICATE_TYPE, predicate)
    statement.validate()
    path = folder / statement_name(record.stage)
    path.parent.mkdir(exist_ok=True)
    found = json_format.MessageToDict(statement.pb)
    path.write_text(json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def statement_name(stage: str) -> str:
    """Its path below a published folder."""
    return f"{STATEMENTS_DIR}/{stage}.intoto.json"


def read_statement(path: Path) -> Made:
    """Raises ValueError where it is damaged, or not of a stage."""
    try:
        statement = Statement.copy_from_pb(json_format.Parse(path.read_bytes(), statement_pb2.Statement()))
        content = json_format.MessageToDict(statement.pb)["predicate"]
        predicate = json_format.ParseDict(content, provenance_pb2.Provenance())
        stage = predicate.build_definition.external_parameters["stage"]
    except (json_format.ParseError, LookupError) as error:
        raise ValueError(str(error)) from None
    statement.validate()
    if statement.pb.predicate_type != PREDICATE_TYPE:
        raise ValueError(f"its predicate is {statement.pb.predicate_type}, expected {PREDICATE_TYPE}")
    dependencies = predicate.build_definition.resolved_dependencies
    return Made(
        stage=stage,
        outputs={each.name: _digest(each) for each in statement.pb.subject if not each.annotations},
        inputs={each.name: _digest(each) for each in dependencies},
        files=tuple(
            PublishedFile(name=each.name, source=each.annotations[SOURCE], sha256=each.digest["sha256"])
            for each in statement.pb.subject
            if SOURCE in each.annotations
        ),
        ended=predicate.run_details.metadata.finished_on.ToJsonString(),
        commit=next((each.digest["gitCommit"] for each in dependencies if "gitCommit" in each.digest), None),
    )


def _predicate(record: Provenance) -> Any:
    """All that the record holds, as SLSA's terms have it."""
    everything = asdict(record)
    asked = ("stage", "command", "params", "plan", "seed")
    ran = ("engine", "image", "experiment", "attempt", "seconds", "gpus", "driver", "environment", "machine")
    predicate = provenance_pb2.Provenance()
    definition, details = predicate.build_definition, predicate.run_details
    definition.build_type = BUILD_TYPE
    definition.external_parameters.update({name: everything[name] for name in asked})
    definition.internal_parameters.update({name: everything[name] for name in ran})
    definition.resolved_dependencies.extend(
        each.pb
        for each in (
            *(_resource(path, digest) for path, digest in record.inputs.items()),
            ResourceDescriptor(
                name="code",
                digest={FOLDER_DIGEST: record.code, **({"gitCommit": record.commit} if record.commit else {})},
                annotations={"changed": record.changed} if record.changed else None,
            ),
            *([_file("packages", record.lock)] if record.lock else []),
            *([_file("packages of vLLM", record.vllm_lock)] if record.vllm_lock else []),
            *([_file("image", record.image_digest.removeprefix("sha256:"))] if record.image_digest else []),
        )
    )
    details.builder.id = BUILDER
    for when, said in ((details.metadata.started_on, record.started), (details.metadata.finished_on, record.ended)):
        when.CopyFrom(_timestamp(said))
    return predicate


def _timestamp(said: str) -> Timestamp:
    found = Timestamp()
    found.FromJsonString(said)
    return found


def _resource(path: str, digest: str) -> ResourceDescriptor:
    """A path of the workspace. Names of stages have no dots, so that a path without a suffix is a folder's."""
    return ResourceDescriptor(name=path, digest={"sha256" if PurePosixPath(path).suffix else FOLDER_DIGEST: digest})


def _digest(resource: Any) -> str:
    """By whichever of the two algorithms it is named."""
    return resource.digest.get("sha256") or resource.digest.get(FOLDER_DIGEST, "")


def _is_within(path: str, output: str) -> bool:
    return f"{path}/".startswith(f"{output}/")


def _file(name: str, digest: str) -> ResourceDescriptor:
    return ResourceDescriptor(name=name, digest={"sha256": digest})
