"""What a stage is to read: is it what the stages before it made?

DVC takes a file whose time and size it knows for what it was. The launcher's own records have digests.
"""

from collections.abc import Iterable
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import content_digest
from stages.core.provenance import read_provenance
from stages.kit.launcher.pipeline import DeclaredStage, Pipeline


def recorded_inputs(workspace_dir: Path, pipeline: Pipeline, stage: DeclaredStage) -> dict[str, str]:
    """Digests of the data that a stage reads, by path.

    Raises UserError, with the commands that fix it, where one is an output of a stage whose record has another digest.
    """
    inputs = digests(workspace_dir, stage.inputs("data"))
    wrong: dict[str, DeclaredStage] = {}
    for maker in pipeline.stages:
        read = inputs.keys() & set(maker.written)
        if read and maker.provenance is not None and (record := workspace_dir / maker.provenance).exists():
            made = read_provenance(record).outputs
            wrong |= {path: maker for path in sorted(read) if made.get(path) not in (None, inputs[path])}
    if wrong:
        raise UserError(
            "\n".join(
                f"{path} is not what {maker.name} made, by its record in {maker.provenance}; "
                f"rebuild it with: dvc repro -f -s {maker.name}"
                for path, maker in wrong.items()
            )
        )
    return inputs


def digests(workspace_dir: Path, paths: Iterable[str]) -> dict[str, str]:
    """By path. What is missing or cannot be read is left out; the stage, or DVC, names it."""
    found = {}
    for path in paths:
        try:
            found[path] = content_digest(workspace_dir / path)
        except (UserError, OSError):
            continue
    return found
