"""Private parts of libraries stand in stages/kit/internals alone, for the versions that are pinned."""

import ast
import re
from collections.abc import Iterator

from torch import nn
from trl import SFTTrainer

from tests import ROOT
from tests.test_locks import PROJECT

INTERNALS = ROOT / "stages/kit/internals"
MODULES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("stages", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PYTHONS = {"_exit", "_replace"}
"""Public in Python's own library, whatever they begin with."""
THEIRS = {name for kind in (SFTTrainer, nn.Conv3d) for each in kind.__mro__ for name in vars(each)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_of(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def privates_of(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private part of a library that a module uses or overrides."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours | PYTHONS:
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] not in ("stages", "tools")
        ):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if is_private(name))
        elif isinstance(node, ast.FunctionDef) and is_private(node.name) and node.name in THEIRS:
            yield node.lineno, node.name


def test_private_parts_of_libraries_stand_in_one_module_a_library() -> None:
    outside = {path: tree for path, tree in MODULES.items() if path.parent != INTERNALS}
    ours = {name for tree in outside.values() for name in names_of(tree)}
    found = [(str(path), *each) for path, tree in outside.items() for each in privates_of(tree, ours)]
    assert found == []
    assert all(list(privates_of(MODULES[path], set())) for path in INTERNALS.glob("*_internals.py")), "none are found"


def test_the_modules_are_for_the_pinned_versions() -> None:
    pins = dict(each.partition(";")[0].split("==") for each in PROJECT["dependencies"])
    for path in INTERNALS.glob("*_internals.py"):
        library = path.stem.removesuffix("_internals")
        found = re.search(rf"for {library} ([0-9.]+)\.$", ast.get_docstring(MODULES[path]) or "", re.MULTILINE)
        assert found, path
        assert found[1] == pins[library], f"read {path} again, then change its docstring"
