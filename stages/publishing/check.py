"""Check of a published folder: its signature, its statement, and that no other files are there.

It needs neither DVC nor the workspace that the folder comes from, so that it checks a copy or a download too. Whoever
changes the folder can sign it again with another key: what the files say is worth as much as the key that signed them.
Without a known key a folder still holds nothing that runs: no code, no pickle, no link to elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stages.core.errors import UserError
from stages.core.given_files import read_plain, require_own
from stages.core.lineage import Lineage, file_digests, read_lineage
from stages.core.provenance import Provenance
from stages.core.records import Unreadable, parse, parse_json
from stages.models.folders import GGUF_FILE, MODEL_FILES, check_model_folder
from stages.publishing.signing import (
    BUILD_TYPE,
    KEY_FILE,
    SIGNATURE_FILE,
    STATEMENT_FILE,
    UNSIGNED,
    fingerprint,
    require_signature,
)
from stages.reporting.runs import EXAMPLES_DIR, MODEL_LINEAGE_FILE

MODEL_CARD_FILE = "README.md"
EVIDENCE_DIR = "evidence"
LINEAGE, CERTIFICATE, METRICS, PLAN = (
    f"{EVIDENCE_DIR}/{name}" for name in (MODEL_LINEAGE_FILE, "merge.json", "metrics.json", "plan.yaml")
)
EXPORT_CERTIFICATE = f"{EVIDENCE_DIR}/export.json"
"""Only of an export."""
TRAINED_DIR = "trained"
PROOF = (MODEL_CARD_FILE, LINEAGE, CERTIFICATE, METRICS, PLAN, STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE)
"""The files that every published folder has beside the model's."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    key: str
    """Fingerprint of the key in the folder."""
    model: Lineage
    records: tuple[Provenance, ...]
    """Records of the stages that made the model, in the order in which they ended."""


def check_published(folder: Path, public_key: Path | None = None) -> Checked:
    """Raises UserError, which names the files, unless the folder has exactly the files that were signed and stated.

    public_key: of the publisher, from elsewhere; by default the one in the folder, which proves that nothing was
    changed by accident, and not who signed. A damaged signature or key may raise anything.
    """
    paths = _published_files(folder)
    _refuse([*_unknown(paths), *(f"{name} is missing" for name in PROOF if name not in paths)])
    try:
        content = parse_json(read_plain(paths[STATEMENT_FILE]))
    except Unreadable as error:
        raise UserError(f"{STATEMENT_FILE} is damaged: {error}") from None
    build = content["predicate"]["buildDefinition"]
    if build["buildType"] != BUILD_TYPE:
        raise UserError(
            f"{STATEMENT_FILE} has the form {build['buildType']}, and this version of Bakeoff checks {BUILD_TYPE}; "
            "check the folder with the version that wrote it, such as the commit that its records name"
        )
    _refuse(_not_as_stated(content, paths))
    require_signature(folder, public_key or folder / KEY_FILE)
    if GGUF_FILE not in paths:
        check_model_folder(folder, may_be_quantized=EXPORT_CERTIFICATE in paths)
    return Checked(
        key=fingerprint(folder / KEY_FILE),
        model=read_lineage(folder / EVIDENCE_DIR, name=MODEL_LINEAGE_FILE),
        records=tuple(parse(list[Provenance], build["internalParameters"]["records"])),
    )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))


def _published_files(folder: Path) -> dict[str, Path]:
    """Everything in the folder by name, except folders and what the hub and its client add. Raises UserError for a link
    out of the folder, and for anything else that is no plain file."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    paths = {name: path for name, path in paths.items() if name.partition("/")[0] not in UNSIGNED[1:]}
    paths = {name: path for name, path in paths.items() if path.is_symlink() or not path.is_dir()}
    for path in paths.values():
        require_own(path, folder)
    return paths


def _unknown(names: Mapping[str, Path]) -> Iterator[str]:
    for name in names:
        top, below, _ = name.partition("/")
        loadable = any(fnmatch(name.rpartition("/")[2], pattern) for pattern in MODEL_FILES)
        of_the_model = loadable and (not below or top == TRAINED_DIR)
        if not (name in (*PROOF, EXPORT_CERTIFICATE, GGUF_FILE) or of_the_model or top == EXAMPLES_DIR):
            yield f"{name} is no file of a published model"


def _not_as_stated(statement: Any, paths: Mapping[str, Path]) -> list[str]:
    """Files that the statement does not name, or names with another content."""
    stated = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    files = {name: path for name, path in paths.items() if name not in (STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE)}
    digests = dict(zip(files, file_digests(files.values()).values(), strict=True))
    return [
        f"{name} is missing" if name not in digests else f"{name} has not the content that {STATEMENT_FILE} says"
        for name in sorted(digests.keys() | stated.keys())
        if digests.get(name) != stated.get(name)
    ]
