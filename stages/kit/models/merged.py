"""Models as evaluation takes them: from their folder, or merged anew where merging left no weights there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import combined_digest, read_lineage, require_base, short
from stages.core.params.schema import DeviceParams
from stages.kit.models.certificate import read_certificate
from stages.kit.models.folders import has_weights
from stages.kit.models.load import load_model
from stages.kit.models.probes import weight_digests
from stages.kit.models.trained import load_trained, merge_trained

log = logging.getLogger(__name__)


def load_certified(folder: Path, *, device: DeviceParams, precision: str, attn: str) -> PreTrainedModel:
    """The model of a folder that `certified_model` found good.

    Without weights in it (models.keep_merged), what was trained is merged into its base again, in memory.
    Raises UserError where base, trained weights or result are not those that the merge was certified with.
    """
    if has_weights(folder):
        return load_model(folder, device=device, precision=precision, attn=attn)
    lineage = read_lineage(folder)
    rebuild = f"dvc repro -f -s merge@{lineage.name}"
    base_dir, trained_dir = (
        Path(os.path.normpath(folder / lineage.parents[role].path)) for role in ("base", "trained")
    )
    trained, _ = require_base(trained_dir, base_dir, fix=rebuild)
    if trained != lineage.parents["trained"].lineage:
        raise UserError(
            f"{folder} was merged from {short(lineage.parents['trained'].lineage.digest)}, but {trained_dir} holds "
            f"{short(trained.digest)}; rebuild it with: {rebuild}"
        )
    log.info("%s has no weights: merging %s into %s again, in memory", folder, trained_dir, base_dir)
    base = load_model(base_dir, device=device, precision=precision, attn=attn)
    model = merge_trained(load_trained(base, trained_dir))
    found = combined_digest(weight_digests(model))
    wanted = read_certificate(folder.with_name("merge.json"), lineage.name).weights_digest
    if found != wanted:
        raise UserError(
            f"merging {trained_dir} into {base_dir} again gave weights {short(found)}, but {short(wanted)} were "
            f"certified, perhaps on another kind of device; certify them here with: {rebuild}"
        )
    return model
