"""The signature of a published folder: every file's digest, signed by OpenSSF's model-signing with a key on disk."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stages.core.errors import UserError

SIGNATURE_FILE = "model.sig"
KEY_FILE = "signing-key.pub.pem"
"""The public key, in the published folder. Whoever changes the folder can put a key of their own there: a reader who
must know who signed compares its fingerprint with the publisher's, or verifies with a copy from elsewhere."""

Problem: TypeAlias = tuple[str, str]
"""A file of a published folder, and what is wrong with it."""

UNSIGNED = (SIGNATURE_FILE, ".cache", ".git", ".gitattributes")
"""What may lie in the folder without being signed: the signature, and what the hub and its client add."""


def signing_key(folder: Path) -> Path:
    """The private key in a folder, of P-256 and readable by its owner alone; made where there is none.

    Raises UserError where the key cannot be read as one.
    """
    path = folder / "key.pem"
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(".key.pem.partial")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made)
        aside.replace(path)
    return path


def public_pem(key_path: Path) -> bytes:
    """The public half of a private key. Raises UserError where the file is no such key."""
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise UserError(f"{key_path} is no unencrypted private key in PEM: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{key_path} is no key of an elliptic curve; model-signing takes P-256, P-384 and P-521")
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(public_key: Path) -> str:
    """SHA-256 of the public key as PEM, which is also how the signature names its key."""
    return hashlib.sha256(public_key.read_bytes()).hexdigest()


def sign(folder: Path, key_path: Path) -> None:
    """Sign every file of the folder but UNSIGNED ones, and leave the public key in it."""
    from model_signing import hashing, signing  # a second to import

    (folder / KEY_FILE).write_bytes(public_pem(key_path))
    hashed = hashing.Config().set_ignored_paths(paths=UNSIGNED)
    signer = signing.Config().use_elliptic_key_signer(private_key=key_path).set_hashing_config(hashed)
    signer.sign(folder, folder / SIGNATURE_FILE)


def signature_problems(folder: Path, public_key: Path) -> Iterator[Problem]:
    """What the signature does not agree with; nothing where all is as it was signed."""
    from model_signing import hashing, verifying

    # DVC and the hub's cache may link to files that they keep elsewhere: what counts is what is read.
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # of a signature that was changed, anything
        marker, said = "Signature mismatch: ", str(error)
        if said.startswith("Key mismatch"):
            yield SIGNATURE_FILE, f"is not by the key {public_key}"
            return
        if not said.startswith(marker):
            yield SIGNATURE_FILE, f"cannot be verified: {said.partition(chr(10))[0]}"
            return
        for difference in ast.literal_eval(said.removeprefix(marker)):  # model-signing shows its list
            yield from _named(difference)


def _named(difference: str) -> Iterator[Problem]:
    """A difference as model-signing words it (verifying.py), by file."""
    if mismatch := re.match("Hash mismatch for '(.*)': Expected ", difference):
        yield mismatch[1], "is not as it was signed"
        return
    kind, _, names = difference.partition("': ")
    for name in names.split(", "):
        yield name, "was not signed" if kind.startswith("Extra") else "is missing, though it was signed"
