"""params.yaml: the only way a stage learns what a person asked for.

Every problem of the file is reported in one go, each with its dotted path. Read with YAML 1.2 rules, because
`dvc exp run -S recipes.x.learning_rate=1e-5` writes `1e-05`, which YAML 1.1 readers take for a string.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from stages.core.documents import problems, read_settings, refusal
from stages.core.given_files import require_own
from stages.core.params.contradictions import contradictions
from stages.core.params.salvage import salvaged, validated
from stages.core.params.schema import Params


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check the whole file.

    Raises UserError with every problem found, each under its dotted path, and where it is no file of its folder.
    """
    if os.path.lexists(path):
        require_own(path, path.parent)  # a link would have parts of another file shown, and a pipe never ends
    raw, found = read_settings(path, mend="run from the top of the repository")
    try:
        params = validated(Params, raw)
    except ValidationError as error:
        found = {**problems(error, Params), **found}
        params = salvaged(Params, raw)
    contradicting = contradictions(params)
    if found or contradicting:
        raise refusal(path, found, *contradicting)
    return params
