"""Write a recipe's merged model in the form in which it is deployed, and certify it by reading it back.

Reads   data/runs/RECIPE/merged/ and its certificate
Writes  data/exports/NAME/       model.gguf, for llama.cpp, or a model folder quantized by bitsandbytes; lineage.json
        data/exports/NAME.json   the certificate
        data/report/TASK/memory/NAME/export.json  the process memory
Run     docker/run export chat-lora-q8
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from stages.core.atomic import atomic_folder
from stages.core.errors import UserError, configure_logging
from stages.core.lineage import short, write_lineage
from stages.core.params import load_params
from stages.core.params.schema import ExportParams
from stages.exporting.certificate import TOLERANCE, ExportCertificate, require_llama_cpp
from stages.models.certificate import certified_model
from stages.models.folders import GGUF_FILE, require_weights
from stages.planning.memory_use import MemoryLog

WEIGHTS = (".gguf", ".safetensors")

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name")
def main(name: str) -> None:
    configure_logging(f"export {name}")
    params = load_params()
    export = params.export(name)
    merged_dir, model = certified_model(params, export.recipe)
    require_weights(merged_dir)
    exported_dir, memory = Path("data/exports") / name, MemoryLog(())
    memory.loaded()
    with atomic_folder(exported_dir) as folder:
        deviations = written(export, merged_dir, folder, name)
        tolerance = TOLERANCE[export.quantization]
        lineage = write_lineage(folder, kind="exported", name=name, parents={"merged": (merged_dir, model)})
        certificate = ExportCertificate(
            export=export,
            exported_digest=lineage.digest,
            size_bytes=sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHTS),
            tensors=len(deviations),
            deviation=max(deviations.values()),
            tolerance=tolerance,
            wrong=sorted(tensor for tensor, off in deviations.items() if not off <= tolerance),
        )
        if problems := certificate.problems():
            found = f"{'; '.join(problems)} (docs/deployment.md#limits)"
            raise UserError(f"the export {name} is not the model of {export.recipe}: {found}")
    certificate.write(exported_dir.with_name(f"{name}.json"))
    memory.write("export", name, task=export.task)
    log.info("exported %s, content %s: %s", name, short(lineage.digest), certificate)


def written(export: ExportParams, merged_dir: Path, folder: Path, name: str) -> dict[str, float]:
    """Write the export into a folder, and read it back; returns the largest deviation of each tensor, in steps."""
    if export.format == "bitsandbytes":
        from stages.exporting import quantized_folder

        quantized_folder.write_quantized(merged_dir, folder, export.quantization)
        return quantized_folder.largest_deviations(merged_dir, folder)
    require_llama_cpp()
    from stages.exporting.gguf_check import largest_deviations
    from stages.exporting.gguf_file import write_gguf

    entries = write_gguf(merged_dir, folder / GGUF_FILE, export.quantization, name=name)
    return largest_deviations(merged_dir, folder / GGUF_FILE, entries)


if __name__ == "__main__":
    main()
