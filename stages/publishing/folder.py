"""A published folder: the run's files, its card, and the proof of both."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path

from stages.core.atomic import atomic_folder, atomic_write
from stages.core.errors import bytes_text, pluralize
from stages.core.lineage import Lineage, digested_files, file_digests
from stages.core.provenance import Provenance, read_provenance
from stages.publishing.check import METRICS, MODEL_CARD_FILE, TRAINED_DIR, check_published
from stages.publishing.model_card import Publication, write_card
from stages.publishing.signing import STATEMENT_FILE, sign, signing_key, statement
from stages.reporting.runs import EXAMPLES_DIR

log = logging.getLogger("stages")


def write_folder(publication: Publication, published_dir: Path, *, key_dir: Path) -> None:
    """Copy a run's model and evidence, and write its card, statement and signature.

    Raises UserError if the folder would not pass its own check.
    """
    copies = {
        **{path: path.name for path in digested_files(publication.model_dir)},
        **(_below(publication.trained_dir, TRAINED_DIR) if publication.trained_dir else {}),
        **_below(publication.evidence[METRICS].with_name(EXAMPLES_DIR), EXAMPLES_DIR),
        **{path: name for name, path in publication.evidence.items()},
    }
    with atomic_folder(published_dir) as folder:
        for source, name in copies.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        write_card(publication, folder)
        digests = file_digests(folder / name for name in (*copies.values(), MODEL_CARD_FILE))
        files = {path.relative_to(folder).as_posix(): digest for path, digest in digests.items()}
        content = statement(files, [asdict(record) for record in publication.records])
        atomic_write(json.dumps(content, indent=2, ensure_ascii=False) + "\n", folder / STATEMENT_FILE)
        sign(folder, signing_key(key_dir))
        checked = check_published(folder)
    sizes = [path.stat().st_size for path in published_dir.rglob("*") if path.is_file()]
    size = f"{pluralize(len(sizes), 'file')}, {bytes_text(sum(sizes))}"
    log.info("%s: %s, signed by the key %s", published_dir, size, checked.key)
    if publication.licence is None:
        log.warning(
            "the licence of what %s was made from is not known, or its bases have several: write it into `licenses` of "
            "params.yaml and publish again before you send it (%s names each source)",
            *(publication.run.name, published_dir / MODEL_CARD_FILE),
        )


def records_of(model: Lineage, evaluation: str, records_dir: Path) -> tuple[Provenance, ...]:
    """The records of all stages that trained and merged what the model comes from, and of its evaluation."""
    makers = {"trained": "train", "merged": "merge", "exported": "export"}
    made = [f"{makers[each.kind]}@{each.name}" for each in model.tree() if each.kind in makers]
    records = [read_provenance(records_dir / f"{stage}.json") for stage in dict.fromkeys((*made, evaluation))]
    return tuple(sorted(records, key=lambda record: record.ended))


def _below(folder: Path, name: str) -> dict[Path, str]:
    """The files below a folder, each with its path in the published folder."""
    return {path: f"{name}/{path.relative_to(folder).as_posix()}" for path in digested_files(folder)}
