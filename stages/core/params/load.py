"""params.yaml: the only way a stage learns what a person asked for.

Read with YAML 1.2 rules, because `dvc exp run -S recipes.x.learning_rate=1e-5` writes `1e-05`, which YAML 1.1 readers
take for a string.
"""

from __future__ import annotations

import os
from pathlib import Path

from stages.core.documents import read_settings, refusal
from stages.core.given_files import require_own
from stages.core.params.cross_checks import cross_checks
from stages.core.params.schema import Params


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check the whole file: each value alone, and where those are right, the values together.

    Raises UserError with every problem found, each under its dotted path, and where it is no file of its folder.
    """
    if os.path.lexists(path):
        require_own(path, path.parent)  # a link would have parts of another file shown, and a pipe never ends
    params = read_settings(Params, path, hint="run from the top of the repository")
    if found := list(cross_checks(params)):
        raise refusal(path, found)
    return params
