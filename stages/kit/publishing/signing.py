"""The proof in a published folder: a signature of every file, and one statement of how the model was made.

The signature is OpenSSF's model-signing with a key on disk. The statement is in-toto's (https://in-toto.io/Statement/v1)
with SLSA's provenance as its predicate (https://slsa.dev/provenance/v1): its subjects are the published files, and it
has the launcher's record of every stage that trained, merged and evaluated the model.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import TypeAdapter

from stages.core.provenance import Provenance

SIGNATURE_FILE = "model.sig"
KEY_FILE = "signing-key.pub.pem"
"""The public key, in the published folder. Anyone who changes the folder can replace it by a key of their own: a reader
who must know who signed compares its fingerprint with the publisher's, or verifies with a copy from elsewhere."""
STATEMENT_FILE = "provenance.intoto.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
FOLDER_DIGEST = "bakeoffFolder"
"""Digest algorithm of a folder: SHA-256 over its files' names and SHA-256 (stages/core/lineage.py)."""
UNSIGNED = (SIGNATURE_FILE, ".cache", ".git", ".gitattributes")
"""Names that may be in the folder without being signed: the signature, and those that the hub and its client add."""

Problem: TypeAlias = tuple[str, str]
"""A file of a published folder, and the problem with it."""


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file of a published folder that was copied from the workspace."""

    name: str
    """Its path in the published folder."""
    source: str
    """Its path in the workspace."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    files: tuple[PublishedFile, ...]
    records: tuple[Provenance, ...]
    """Records of the stages that made the model, in the order in which they ended."""


def write_statement(folder: Path, statement: Statement) -> None:
    records = statement.records
    made = {path for record in records for path in record.outputs}
    read = {path: digest for record in records for path, digest in record.inputs.items() if path not in made}
    content = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": file.name, "digest": {"sha256": file.sha256}, "annotations": {"source": file.source}}
            for file in statement.files
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:bakeoff:stages:v1",
                "externalParameters": {"commands": [record.command for record in records]},
                "internalParameters": {"records": [asdict(record) for record in records]},
                "resolvedDependencies": [
                    *({"name": path, "digest": {_algorithm(path): digest}} for path, digest in read.items()),
                    *({"name": "git", "digest": {"gitCommit": commit}} for commit in _distinct(records, "commit")),
                    *({"name": "packages", "digest": {"sha256": lock}} for lock in _distinct(records, "lock")),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:bakeoff:launcher:v1"},
                "metadata": {"startedOn": min(each.started for each in records), "finishedOn": records[-1].ended},
            },
        },
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (folder / STATEMENT_FILE).write_text(text, encoding="utf-8")


def read_statement(folder: Path) -> Statement:
    """Raises ValueError if it is missing or damaged."""
    try:
        content = json.loads((folder / STATEMENT_FILE).read_text(encoding="utf-8"))
        types = content["_type"], content["predicateType"]
        if types != (STATEMENT_TYPE, PREDICATE_TYPE):
            raise ValueError(f"its types are {types}, expected {(STATEMENT_TYPE, PREDICATE_TYPE)}")
        files = [
            PublishedFile(name=each["name"], source=each["annotations"]["source"], sha256=each["digest"]["sha256"])
            for each in content["subject"]
        ]
        records = content["predicate"]["buildDefinition"]["internalParameters"]["records"]
        return Statement(
            files=tuple(files), records=tuple(TypeAdapter(list[Provenance]).validate_json(json.dumps(records)))
        )
    except (OSError, LookupError, TypeError) as error:
        raise ValueError(repr(error)) from None


def signing_key(folder: Path) -> Path:
    """The private key in a folder, of P-256 and readable by its owner alone; made if there is none."""
    path = folder / "key.pem"
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made)
    return path


def fingerprint(public_key: Path) -> str:
    """SHA-256 of the public key as PEM, which is also how the signature names its key."""
    return hashlib.sha256(public_key.read_bytes()).hexdigest()


def sign(folder: Path, key_path: Path) -> None:
    """Sign every file of the folder but UNSIGNED ones, and leave the public key in it."""
    from model_signing import hashing, signing  # a second to import

    key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / KEY_FILE).write_bytes(pem)
    hashed = hashing.Config().set_ignored_paths(paths=UNSIGNED)
    signer = signing.Config().use_elliptic_key_signer(private_key=key_path).set_hashing_config(hashed)
    signer.sign(folder, folder / SIGNATURE_FILE)


def signature_problems(folder: Path, public_key: Path) -> Iterator[Problem]:
    """The files that the signature does not agree with."""
    from model_signing import hashing, verifying

    # DVC and the hub's cache may link to files elsewhere: the content counts.
    hashed = hashing.Config().use_file_serialization(allow_symlinks=True).set_allow_symlinks(True)
    hashed.set_ignored_paths(paths=UNSIGNED)
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except FileNotFoundError:
        yield public_key.name, "is missing"
        return
    except (OSError, ValueError):
        yield public_key.name, "is no public key of an elliptic curve in PEM"
        return
    try:
        verifier.set_hashing_config(hashed).verify(folder, folder / SIGNATURE_FILE)
    except FileNotFoundError as error:
        yield SIGNATURE_FILE, f"{error.filename} is missing"
    except InvalidSignature:
        yield SIGNATURE_FILE, f"is not by the key {public_key}, or was changed"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a damaged signature raises any of these
        marker, message = "Signature mismatch: ", str(error)
        if message.startswith("Key mismatch"):
            yield SIGNATURE_FILE, f"is not by the key {public_key}"
        elif message.startswith(marker):
            for difference in ast.literal_eval(message.removeprefix(marker)):  # the message has model-signing's list
                yield from _named(difference)
        else:
            yield SIGNATURE_FILE, f"cannot be verified: {message.partition(chr(10))[0]}"


def _named(difference: str) -> Iterator[Problem]:
    """The problems in a difference as model-signing words it (verifying.py), by file."""
    if mismatch := re.match("Hash mismatch for '(.*)': Expected ", difference):
        yield mismatch[1], "is not as it was signed"
        return
    kind, _, names = difference.partition("': ")
    for name in names.split(", "):
        yield name, "was not signed" if kind.startswith("Extra") else "is missing, although it was signed"


def _algorithm(path: str) -> str:
    """Names of stages have no dots, so that a path without a suffix is a folder's."""
    return "sha256" if Path(path).suffix else FOLDER_DIGEST


def _distinct(records: Sequence[Provenance], name: str) -> list[Any]:
    return list(dict.fromkeys(value for record in records if (value := getattr(record, name))))
