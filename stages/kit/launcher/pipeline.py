"""What dvc.yaml declares of each stage, as DVC reads it: the launcher shows a stage nothing else of the data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.provenance import PROVENANCE_DIR


@dataclass(frozen=True, kw_only=True)
class DeclaredStage:
    """One stage of dvc.yaml, its foreach item put in."""

    name: str
    """DVC's name for it, e.g. "train@r1-llm-only"."""
    command: str
    """The call of the launcher that runs it, e.g. "docker/run train r1-llm-only".

    dvc.yaml has all of it but the name: no name may reach a shell.
    """
    params: tuple[str, ...]
    """Dotted paths into params.yaml; `${profile}` is left as it is."""
    deps: tuple[str, ...]
    """Paths relative to the workspace."""
    outs: tuple[str, ...]
    """Likewise; metrics and plots are outputs too."""

    @property
    def provenance(self) -> str | None:
        """The output that the launcher writes, and not the stage itself."""
        return next((out for out in self.outs if out.startswith(f"{PROVENANCE_DIR}/")), None)

    @property
    def written(self) -> tuple[str, ...]:
        """The outputs that the stage itself writes."""
        return tuple(out for out in self.outs if out != self.provenance)

    def inputs(self, folder: str) -> tuple[str, ...]:
        """What it depends on below a folder of the workspace, itself included."""
        return tuple(dep for dep in self.deps if f"{dep}/".startswith(f"{folder}/"))


def stage_of_command(
    stages: Sequence[DeclaredStage], stage: str, args: Sequence[str], *, required: bool = True
) -> DeclaredStage | None:
    """The stage that this call of the launcher runs. Where dvc.yaml has none: None, or a UserError if required."""
    sends = sends_what_it_wrote(stage, args)
    command = " ".join(("docker/run", stage, *(args[:1] if sends else args)))
    found = next((each for each in stages if each.command == command), None)
    if sends and found is not None:
        code = (dep for dep in found.deps if dep not in found.inputs("data"))
        return replace(found, deps=(*code, *found.written), outs=())
    if found is None and required:
        alike = [each.command for each in stages if each.command.split()[1] == stage]
        raise UserError(f"no stage of dvc.yaml runs `{command}`; there are: {', '.join(alike) or 'none like it'}")
    return found


def sends_what_it_wrote(stage: str, args: Sequence[str]) -> bool:
    """Whether a call sends what the stage has written before: `publish NAME --to REPOSITORY`.

    It then reads that and no other data, and writes nothing.
    """
    return stage == "publish" and len(args) > 1


def item_of(addressing: str) -> tuple[str, ...]:
    """The foreach item of a stage as DVC addresses it: r1 of `train@r1` or `../dvc.yaml:train@r1`, none of `check`."""
    _, at, item = addressing.rpartition(":")[2].partition("@")
    return (item,) if at else ()


def declared_stages(workspace_dir: Path) -> list[DeclaredStage]:
    """Every stage of dvc.yaml, foreach items put in; none where the file is missing.

    Of DVC's templates it knows what dvc.yaml uses: a foreach over a list, a dict, or `${a key of params.yaml}`, and
    `${item}`, `${key}`, `${item.name}`, `${item.name[0].inner}` within. DVC's own resolver takes a second to import.
    """
    if not (workspace_dir / "dvc.yaml").exists():
        return []
    yaml = YAML(typ="safe")
    entries = yaml.load(workspace_dir / "dvc.yaml")["stages"]
    params = yaml.load(workspace_dir / "params.yaml")
    return [stage for name, entry in entries.items() for stage in _instances(name, entry, params)]


def _instances(name: str, entry: dict[str, Any], params: dict[str, Any]) -> Iterator[DeclaredStage]:
    if "foreach" not in entry:
        yield _declared(name, entry)
        return
    items = entry["foreach"]
    if isinstance(items, str):
        items = params[items.removeprefix("${").removesuffix("}")]
    for key in items:
        known = {"key": key, "item": items[key] if isinstance(items, dict) else key}
        yield _declared(f"{name}@{key}", _filled(entry["do"], known))


def _filled(entry: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The entry with every `${path}` put in that leads to something known; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        here: Any = known
        try:
            for step in re.findall(r"[\w-]+", match[1]):
                here = here[int(step) if isinstance(here, list) else step]
        except (LookupError, TypeError, ValueError):
            return match[0]
        return json.dumps(str(here))[1:-1]

    filled: dict[str, Any] = json.loads(re.sub(r"\$\{([^}]+)\}", value, json.dumps(entry)))
    return filled


def _declared(name: str, entry: dict[str, Any]) -> DeclaredStage:
    outs = [out for group in ("outs", "metrics", "plots") for out in entry.get(group, [])]
    return DeclaredStage(
        name=name,
        command=" ".join((entry["cmd"].removeprefix("exec "), *item_of(name))),
        params=tuple(entry.get("params", [])),
        deps=tuple(entry.get("deps", [])),
        # An output with options is a mapping of one key.
        outs=tuple(next(iter(out)) if isinstance(out, dict) else out for out in outs),
    )
