"""Check params.yaml as a whole, before DVC removes or writes anything at a path that a name from it is part of.

Reads   params.yaml
Writes  data/checked.txt, which is always the same
Run     docker/run check
"""

from __future__ import annotations

from pathlib import Path

import click

from stages.core.params.load import load_params
from stages.core.publish import publish_text


@click.command(help=__doc__)
def main() -> None:
    load_params()
    publish_text("params.yaml is without mistakes.\n", Path("data/checked.txt"))


if __name__ == "__main__":
    main()
