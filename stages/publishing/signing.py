"""The proof in a published folder: a signature of every file, and one statement of how the model was made.

The signature is OpenSSF's model-signing with a key on disk. The statement is in-toto's (https://in-toto.io/Statement/v1)
with SLSA's provenance as its predicate (https://slsa.dev/provenance/v1): its subjects are the published files, and it
has the launcher's record of every stage that trained, merged and evaluated the model.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stages.core.errors import UserError
from stages.core.given_files import read_plain

SIGNATURE_FILE = "model.sig"
KEY_FILE = "signing-key.pub.pem"
"""The public key, in the published folder. Anyone who changes the folder can replace it by a key of their own: a reader
who must know who signed compares its fingerprint with the publisher's, or verifies with a copy from elsewhere."""
STATEMENT_FILE = "provenance.intoto.json"
FOLDER_DIGEST = "bakeoffFolder"
"""Digest algorithm of a folder: SHA-256 over its files' names and SHA-256 (stages/core/lineage.py)."""
BUILD_TYPE = "urn:bakeoff:stages:v4"
"""Form of the statement's records and of evidence/. Its number rises when a field of one of them comes or goes."""
UNSIGNED = (SIGNATURE_FILE, ".cache", ".git", ".gitattributes")
"""Names that may be in the folder without being signed: the signature, and those that the hub and its client add."""


def statement(files: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the statement.

    files: SHA-256 of each published file by name, excluding statement, key and signature. records: the fields of the
    records of the stages that made the model, in the order in which they ended.
    """
    inputs = {path: digest for record in records for path, digest in record["inputs"].items()}
    made_of = {path: digest for path, digest in inputs.items() if path.startswith(("data/bases/", "data/prepared/"))}

    def distinct(field: str) -> list[Any]:
        return list(dict.fromkeys(record[field] for record in records if record[field]))

    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": files[name]}} for name in sorted(files)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"stages": [record["stage"] for record in records]},
                "internalParameters": {"records": list(records)},
                "resolvedDependencies": [
                    *({"name": path, "digest": {_algorithm(path): digest}} for path, digest in made_of.items()),
                    *({"name": "git", "digest": {"gitCommit": commit}} for commit in distinct("commit")),
                    *({"name": "packages", "digest": {"sha256": lock}} for lock in distinct("lock")),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:bakeoff:launcher:v1"},
                "metadata": {
                    "startedOn": min(record["started"] for record in records),
                    "finishedOn": records[-1]["ended"],
                },
            },
        },
    }


def _algorithm(path: str) -> str:
    """Names of stages have no dots, so that a path without a suffix is a folder's."""
    return "sha256" if Path(path).suffix else FOLDER_DIGEST


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


def public_key(path: Path) -> bytes:
    """The public key of a file in PEM, or the public half of a private one, as PEM. Raises ValueError without one."""
    content, form = read_plain(path), (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    if b"PRIVATE KEY" in content:
        return serialization.load_pem_private_key(content, password=None).public_key().public_bytes(*form)
    return serialization.load_pem_public_key(content).public_bytes(*form)


def fingerprint(path: Path) -> str:
    """SHA-256 of the public key as PEM, which is also how the signature names its key."""
    return hashlib.sha256(public_key(path)).hexdigest()


def sign(folder: Path, key_path: Path) -> None:
    """Sign every file of the folder but UNSIGNED ones, and leave the public key in it."""
    from model_signing import hashing, signing  # a second to import

    (folder / KEY_FILE).write_bytes(public_key(key_path))
    hashed = hashing.Config().set_ignored_paths(paths=UNSIGNED)
    signer = signing.Config().use_elliptic_key_signer(private_key=key_path).set_hashing_config(hashed)
    signer.sign(folder, folder / SIGNATURE_FILE)


def require_signature(folder: Path, key_path: Path) -> None:
    """Raises UserError unless the key signed exactly these files. A damaged signature or key may raise anything."""
    from model_signing import hashing, verifying

    # DVC and the hub's cache may link to files elsewhere: the content counts.
    hashed = hashing.Config().use_file_serialization(allow_symlinks=True).set_allow_symlinks(True)
    hashed.set_ignored_paths(paths=UNSIGNED)
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=key_path).set_hashing_config(hashed)
    try:
        verifier.verify(folder, folder / SIGNATURE_FILE)
    except InvalidSignature:
        raise UserError(f"{SIGNATURE_FILE} is not by the key {key_path}, or was changed") from None
    except ValueError as error:
        if str(error).startswith("Key mismatch"):
            raise UserError(f"{SIGNATURE_FILE} is not by the key {key_path}") from None
        names = re.findall(r"mismatch for \W*([^'\\]+)", str(error))
        raise UserError(f"{SIGNATURE_FILE} does not match {', '.join(names) or 'the files'}") from None
