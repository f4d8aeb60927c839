"""Where the runs of a report come from, by the records that the launcher left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stages.core.errors import some
from stages.core.lineage import short
from stages.core.provenance import Provenance
from stages.kit.reporting.runs import Run
from stages.kit.reporting.tables import Column, Row, Table

_DONE = {"train": "trained", "merge": "merged", "evaluate": "evaluated", "baseline": "evaluated"}
"""By stage; a baseline is evaluated by a stage of its own."""

Record = tuple[str, Provenance]
"""Of a run, by its name."""


def origins_table(runs: Sequence[Run]) -> Table:
    """A row a run that has records: of its training, or where it had none of its evaluation."""
    columns = (
        Column("model", "Model"),
        Column("commit", "Commit"),
        Column("ran_in", "Ran in"),
        Column("lock", "Packages"),
        Column("device", "Device"),
        Column("seed", "Seed", "d"),
        Column("base", "Base"),
        Column("data", "Data"),
        Column("started", "Started (UTC)"),
        Column("seconds", "Took", "seconds"),
    )
    records = {name: record for name, record in _records(runs) if _stage(record) in ("train", "baseline")}
    return Table(columns=columns, rows=tuple(_row(name, record) for name, record in records.items()))


def origin_warnings(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before taking a difference between runs for one between recipes."""
    records = _records(runs)
    return [*_changed(records), *_commits(records), *_devices(records), *_packages(records)]


def _changed(records: Sequence[Record]) -> list[str]:
    files: dict[str, set[str]] = {}
    for name, record in records:
        files.setdefault(name, set()).update(record.changed_code)
    return [
        f"{name} was made with changes that no commit has: {some(sorted(changed))}."
        for name, changed in files.items()
        if changed
    ]


def _commits(records: Sequence[Record]) -> list[str]:
    found = _groups(records, _commit)
    if not found:
        return []
    codes: dict[str, set[str]] = {}
    for _, record in records:
        codes.setdefault(_stage(record), set()).add(record.code)
    differs = any(len(of_stage) > 1 for of_stage in codes.values())
    what = "and so does the code that made them" if differs else "though the code that made them is the same"
    return [f"The commits of the runs differ, {what}: {found}."]


def _devices(records: Sequence[Record]) -> list[str]:
    """By stage: a model may well be trained on other devices than it is evaluated on."""
    by_stage = {done: [each for each in records if _DONE.get(_stage(each[1])) == done] for done in _DONE.values()}
    return [
        f"Not all were {done} on the same device: {found}."
        for done, mine in by_stage.items()
        if (found := _groups(mine, lambda record: record.device))
    ]


def _packages(records: Sequence[Record]) -> list[str]:
    found = _groups(records, lambda record: short(record.lock) if record.lock else "not known")
    return [f"The locked packages of the runs differ: {found}."] if found else []


def _row(name: str, record: Provenance) -> Row:
    base = record.plan["base_dir"] if record.plan else ""
    return Row(
        cells=(
            name,
            _commit(record) + (f" + {len(record.changed)} changed" if record.changed else ""),
            record.image or record.engine,
            short(record.lock) if record.lock else None,
            record.device,
            record.seed,
            _digest(record, base or ("data/bases/", "data/builds/")),
            _digest(record, "data/prepared/"),
            record.started.replace("T", " ").removesuffix("+00:00"),
            record.seconds,
        )
    )


def _digest(record: Provenance, begins: str | tuple[str, ...]) -> str | None:
    return next((short(digest) for path, digest in record.inputs.items() if path.startswith(begins)), None)


def _records(runs: Iterable[Run]) -> list[Record]:
    return [(run.name, record) for run in runs for record in run.provenance]


def _stage(record: Provenance) -> str:
    return record.stage.partition("@")[0]


def _commit(record: Provenance) -> str:
    return short(record.commit) if record.commit else "not known"


def _groups(records: Iterable[Record], fact: Callable[[Provenance], str]) -> str:
    """`one (r1, r2), other (r3)` where a fact is not the same for all; "" where it is."""
    runs: dict[str, dict[str, None]] = {}
    for name, record in records:
        runs.setdefault(fact(record), {})[name] = None
    return ", ".join(f"{said} ({', '.join(names)})" for said, names in runs.items()) if len(runs) > 1 else ""
