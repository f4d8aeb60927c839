"""Put a base model into data/bases/NAME: a plain Hugging Face folder and where it came from.

Reads   profiles.PROFILE.bases.NAME: `hub:OWNER/NAME@REVISION` or `folder:PATH`
Writes  data/bases/NAME/
Run     docker/run base vlm
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from stages.core.atomic import atomic_folder
from stages.core.errors import UserError, bytes_text, configure_logging
from stages.core.lineage import short, write_lineage
from stages.core.params import load_params
from stages.data.hub import fetch_snapshot
from stages.models.folders import MODEL_FILES, check_model_folder, copy_model_files, read_json
from stages.models.load import load_config, meta_model
from stages.models.prompts import check_chat_template

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name")
def main(name: str) -> None:
    configure_logging(f"base {name}")
    params = load_params()
    kind, _, where = params.base_source(name).partition(":")
    with atomic_folder(Path("data/bases") / name) as folder:
        if kind == "hub":
            repo_id, _, revision = where.partition("@")
            cached, commit = fetch_snapshot("model", repo_id, revision, patterns=MODEL_FILES)
            copy_model_files(cached, folder, link=True)
            source = {"hub": repo_id, "revision": commit}
        else:
            copy_model_files(Path(where), folder)
            source = {"folder": where}
        try:
            drop_unused_code(folder / "config.json")
            check_model_folder(folder)
            config = load_config(folder)
            meta_model(config)
            check_chat_template(folder)
        except UserError as error:  # about the copy, which the user does not know
            raise UserError(error.message.replace(str(folder), where)) from None
        lineage = write_lineage(folder, kind="base", name=name, source=source)
    size = bytes_text(sum(path.stat().st_size for path in (Path("data/bases") / name).rglob("*")))
    made = f"{config.model_type}, {size}, content {short(lineage.digest)}"
    log.info("base %s from %s %s: %s", name, kind, where, made)


def drop_unused_code(path: Path) -> None:
    """Leave out the names of code (`auto_map`) for a model that transformers has itself, such as Phi-3."""
    import transformers

    config = read_json(path) if path.exists() else None
    if not isinstance(config, dict) or str(config.get("model_type")) not in transformers.CONFIG_MAPPING:
        return
    classes, known = config.get("architectures"), {name.lower() for name in dir(transformers)}  # MPT is Mpt there
    if isinstance(classes, list) and {str(name).lower() for name in classes} <= known and config.pop("auto_map", None):
        path.unlink()  # it may be a link to the hub's cache
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        log.warning("its own code (auto_map) is not used: transformers has a %s itself", config["model_type"])


if __name__ == "__main__":
    main()
