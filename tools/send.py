"""Sends a published folder to the hub, into a new, private repository.

Reads   FOLDER, e.g. data/published/r4-joint; HF_TOKEN, or what `hf auth login` left
Run     make publish RUN=r4-joint TO=OWNER/NAME SEND=1
"""

from __future__ import annotations

from pathlib import Path

import click
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from stages.core.errors import UserError
from stages.publishing.check import MODEL_CARD_FILE, check_published
from stages.publishing.signing import SIGNATURE_FILE, UNSIGNED


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("repository")
def main(folder: Path, repository: str) -> None:
    try:
        check_published(folder)
    except UserError as error:
        raise UserError(f"{folder} is not as it was signed; publish it again: {error.message}") from None
    if ModelCard.load(folder / MODEL_CARD_FILE).data.license is None:
        raise UserError(
            f"the licence of what {folder.name} was made from is not known, or its bases have several: write it into "
            f"`licenses` of params.yaml and publish again ({folder / MODEL_CARD_FILE} names each source)"
        )
    api, again = HfApi(), ""
    try:
        click.echo(api.create_repo(repository, private=True))
        again = f"; send the rest with: .venv/bin/hf upload {repository} {folder}"
        left_out = [pattern for name in UNSIGNED if name != SIGNATURE_FILE for pattern in (name, f"{name}/*")]
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=left_out,
            commit_message=f"Publish {folder.name}",
        )
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{folder} was not sent to {repository}: {error}{again}") from error


if __name__ == "__main__":
    main()
