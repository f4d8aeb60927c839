"""Which files of the project a module runs: its imports, and theirs, read from the source without running it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import ROOT


@cache
def import_closure(module: str) -> frozenset[str]:
    """Paths, relative to the repository, of the project's files that importing `module` can lead to.

    Imports inside functions count, those under TYPE_CHECKING do not, and files without code are left out. Files of
    other kinds that a module names in a string, next to itself or in every folder next to itself (`*/NAME`), count too.
    """
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _path(name)
        if path is None or str(path.relative_to(ROOT)) in seen:
            continue
        seen.add(str(path.relative_to(ROOT)))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        waiting += _imports(tree, package=name if path.name == "__init__.py" else name.rpartition(".")[0])
        waiting += _parents(name)
        seen |= {str(file.relative_to(ROOT)) for file in _named_files(tree, path.parent)}
    return frozenset(path for path in seen if has_code(ROOT / path))


def has_code(path: Path) -> bool:
    """Whether a file holds anything: a Python file more than its docstring."""
    text = path.read_text(encoding="utf-8").strip()
    if path.suffix != ".py" or not text:
        return bool(text)
    tree = ast.parse(text)
    return len(tree.body) > (ast.get_docstring(tree) is not None)


def task_modules(module: str) -> set[str]:
    """The modules of a task that a stage loads: the literals in its calls of `load_task`."""
    path = _path(module)
    assert path is not None, module
    return {
        str(node.args[1].value)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "load_task"
        and isinstance(node.args[1], ast.Constant)
    }


def _path(module: str) -> Path | None:
    """The file of one of the project's modules; None for a name inside a module and for other packages."""
    plain = ROOT / Path(*module.split("."))
    return next((path for path in (plain.with_suffix(".py"), plain / "__init__.py") if path.is_file()), None)


def _parents(module: str) -> list[str]:
    steps = module.split(".")
    return [".".join(steps[:count]) for count in range(1, len(steps))]


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    only_for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {package}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named_files(tree: ast.Module, folder: Path) -> Iterator[Path]:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for text in texts:
        if re.fullmatch(r"(\*/)?[\w.-]+\.(html|css|js|json|yaml)", text):
            yield from folder.glob(text)
