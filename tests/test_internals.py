"""Private parts of libraries stand in stages/internals alone, for the versions that are pinned.

Ruff finds those that are used elsewhere (SLF001, PLC2701), and this those that are overridden.
"""

import ast
import re

from torch import nn
from trl import SFTTrainer

from tests import ROOT
from tests.closure import parsed
from tests.test_locks import PROJECT

INTERNALS = sorted((ROOT / "stages/internals").glob("*_internals.py"))
THEIRS = {name for kind in (SFTTrainer, nn.Conv3d) for each in kind.__mro__ for name in vars(each)}


def test_private_methods_of_libraries_are_overridden_in_internals_alone() -> None:
    found = {
        path
        for path in (ROOT / "stages").rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name) and node.name in THEIRS
    }
    assert {path.name for path in found} == {"torch_internals.py", "transformers_internals.py"}
    assert found <= {*INTERNALS}


def test_the_modules_are_for_the_pinned_versions() -> None:
    pins = dict(each.partition(";")[0].split("==") for each in PROJECT["dependencies"])
    for path in INTERNALS:
        library = path.stem.removesuffix("_internals")
        found = re.search(rf"for {library} ([0-9.]+)\.$", ast.get_docstring(parsed(path)) or "", re.MULTILINE)
        assert found, path
        assert found[1] == pins[library], f"read {path} again, then change its docstring"
