"""Write a finished run as a folder to hand on: the model, its card, and the proof of both. Or send what was written.

Reads   data/runs/RUN/: merged/, trained/, merge.json, plan.yaml, metrics.json
        data/report/TASK/, data/provenance/TASK/: what the comparison reads; data/prepared/DATA/
Writes  data/published/RUN/: the merged model and its configuration
            trained/          the adapter, where there is one
            README.md         the model card; examples/; .eval_results/ where the data are on the hub
            attestations/     a statement of each stage: in-toto, SLSA provenance
            evidence/         lineage, certificate, plan, metrics
            ro-crate-metadata.json, model.sig, signing-key.pub.pem
Run     docker/run publish r4-joint
        docker/run publish r4-joint --to OWNER/NAME    sends data/published/r4-joint/ to the hub, which HF_TOKEN opens

The key is .bakeoff/signing/key.pem, made where there is none.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import click

from stages.core.errors import UserError, bytes_text, counted, listed
from stages.core.lineage import LINEAGE_FILE, Lineage, digested_files, file_digests, verified_lineage
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.core.provenance import Provenance, read_provenance, records_dir
from stages.core.publish import published
from stages.kit.models.certificate import certified_model
from stages.kit.models.folders import read_config, require_weights
from stages.kit.publishing.card import PICTURES_DIR, Publication, write_card, write_eval_results
from stages.kit.publishing.check import EVIDENCE_DIR, MADE_BY, check_published
from stages.kit.publishing.crate import write_crate
from stages.kit.publishing.origins import evaluated_on, lineage_tree, sources_of
from stages.kit.publishing.signature import sign, signing_key
from stages.kit.publishing.statements import PublishedFile, write_statement
from stages.kit.reporting.compare import chosen_report, compare, read_contenders
from stages.kit.reporting.runs import MODEL_LINEAGE_FILE
from stages.tasks import load_task

log = logging.getLogger("stages")

DATA_DIR = Path("data")


@click.command(help=__doc__)
@click.argument("run")
@click.option("--to", metavar="OWNER/NAME", help="Send what was written to this new repository on the hub.")
def main(run: str, to: str | None) -> None:
    configure_logging(f"publish {run}")
    params, folder = load_params(), DATA_DIR / "published" / run
    params.recipe(run)
    if to is None:
        publish_run(params, run, folder)
        return
    from stages.kit.publishing.upload import upload

    log.info("published as a private repository, to be looked at and made public there: %s", upload(folder, to))


def publish_run(params: Params, run: str, published_dir: Path) -> None:
    """Raises UserError where the run is not complete, or its files are not those that were made."""
    run_dir = DATA_DIR / "runs" / run
    merged_dir, model = certified_model(params, run)
    require_weights(merged_dir)
    verified_lineage(run_dir / "trained", fix=f"dvc repro -f -s train@{run}")
    adapter = (run_dir / "trained" / "adapter").is_dir()
    copies = {
        **{path: path.name for path in digested_files(merged_dir)},
        **(_below(run_dir / "trained", "trained") if adapter else {}),
        **_below(run_dir / "examples", PICTURES_DIR),
        **{run_dir / name: f"{EVIDENCE_DIR}/{name}" for name in ("merge.json", "plan.yaml", "metrics.json")},
        merged_dir / LINEAGE_FILE: f"{EVIDENCE_DIR}/{MODEL_LINEAGE_FILE}",
    }
    publication = gather(params, run, model, merged_dir, adapter="trained/adapter" if adapter else None)
    with published(published_dir) as folder:
        for source, name in copies.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        digests = file_digests(folder / name for name in copies.values())
        files = [
            PublishedFile(name=name, source=source.as_posix(), sha256=digests[folder / name])
            for source, name in copies.items()
        ]
        for record in publication.records:
            write_statement(record, folder, files)
        write_card(publication, folder)
        write_eval_results(publication, folder)
        write_crate(publication, folder)
        sign(folder, signing_key(Path(os.environ.get("DVC_ROOT") or Path.cwd()) / ".bakeoff/signing"))
        checked = check_published(folder)
        if checked.problems:
            raise UserError(
                f"{run} cannot be published, as its files and records do not agree:\n{listed(checked.problems)}\n"
                f"run dvc repro evaluate@{run}; if nothing is out of date there, make verify says what to run again"
            )
    sizes = [path.stat().st_size for path in published_dir.rglob("*") if path.is_file()]
    size = f"{counted(len(sizes), 'file')}, {bytes_text(sum(sizes))}"
    log.info("%s: %s, signed by the key %s", published_dir, size, checked.key)


def gather(params: Params, run: str, model: Lineage, merged_dir: Path, *, adapter: str | None) -> Publication:
    """All that is known of a run. Raises UserError where it has not been evaluated, or lacks a record."""
    recipe = params.recipe(run)
    samples = load_task(recipe.task, "samples")
    report = chosen_report(load_task(recipe.task, "report"), params, recipe.task)
    contenders = read_contenders(params, recipe.task, report, [DATA_DIR])
    contender = next(each for each in contenders if each.name == run)
    if contender.run is None:
        raise UserError(f"{run} has not been evaluated; run: dvc repro {contender.stage}")
    prepared_dir = DATA_DIR / "prepared" / recipe.data
    asked = samples.read_split(prepared_dir, "val")
    questions = [samples.conversation(record, answered=False, answer_format=recipe.answer_format) for record in asked]
    records = records_of(model, contender.stage, records_dir(DATA_DIR, recipe.task))
    plans = [record.plan for record in records if record.stage.startswith("train@") and record.plan]
    trained_on = [Path(plan["data_dir"]).name for plan in plans]
    return Publication(
        comparison=compare(report, contenders),
        contender=contender,
        model=model,
        sources=sources_of(model, trained_on, prepared_dir, params),
        evaluated_on=evaluated_on(prepared_dir, params),
        config=read_config(merged_dir),
        question=next((question for question in questions if question.images), questions[0]),
        adapter=adapter,
        records=records,
    )


def records_of(model: Lineage, evaluation: str, folder: Path) -> tuple[Provenance, ...]:
    """The records of all stages that trained and merged what the model comes from, and of its evaluation."""
    made = [f"{MADE_BY[each.kind]}@{each.name}" for each in lineage_tree(model) if each.kind in MADE_BY]
    records = [read_provenance(folder / f"{stage}.json") for stage in dict.fromkeys((*made, evaluation))]
    return tuple(sorted(records, key=lambda record: record.ended))


def _below(folder: Path, name: str) -> dict[Path, str]:
    """Where the files below a folder are published."""
    return {path: f"{name}/{path.relative_to(folder).as_posix()}" for path in digested_files(folder)}


if __name__ == "__main__":
    main()
