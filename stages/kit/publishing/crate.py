"""A published folder as an RO-Crate: https://w3id.org/ro/crate."""

from __future__ import annotations

from pathlib import Path

from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from stages.core.lineage import file_digests
from stages.kit.publishing.card import Publication

CRATE_FILE = "ro-crate-metadata.json"


def write_crate(publication: Publication, folder: Path) -> None:
    """Write ro-crate-metadata.json about all files that the folder has."""
    digests = file_digests(path for path in folder.rglob("*") if path.is_file())
    run, ended = publication.run, max(record.ended for record in publication.records)
    crate = ROCrate()
    files = {
        (name := path.relative_to(folder).as_posix()): crate.add_file(
            path, name, properties={"sha256": digests[path], "contentSize": str(path.stat().st_size)}
        )
        for path in sorted(digests)
    }
    # rocrate would write the time of now.
    crate.datePublished = ended
    crate.name = run.name
    crate.description = f"{publication.comparison.report.title}: {publication.comparison.headline}"
    if licence := publication.licence("base"):
        crate.license = licence
    crate.isBasedOn = [
        crate.add(
            ContextEntity(
                crate,
                f"https://huggingface.co/{'datasets/' * (each.kind == 'data')}{each.hub[0]}/tree/{each.hub[1]}"
                if each.hub
                else f"#{each.kind}-{each.name}",
                properties={
                    "@type": "CreativeWork",
                    "name": each.name,
                    "description": f"{each.kind}, {each.words}",
                    **({"license": each.licence} if each.licence else {}),
                },
            )
        )
        for each in publication.sources
    ]
    crate.root_dataset["mentions"] = [
        crate.add(
            ContextEntity(
                crate,
                f"#{record.stage}",
                properties={
                    "@type": "CreateAction",
                    "name": record.stage,
                    "startTime": record.started,
                    "endTime": record.ended,
                    "description": record.command,
                },
            )
        )
        for record in publication.records
    ]
    for record in publication.records:
        statement = files.get(f"attestations/{record.stage}.intoto.json")
        if statement is not None:
            crate.get(f"#{record.stage}")["result"] = statement
    crate.metadata.write(folder)
