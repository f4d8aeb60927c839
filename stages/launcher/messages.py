"""Lines that the launcher prints between those of a stage."""

import click


def say(line: str) -> None:
    click.echo(f"launcher: {line}", err=True)
