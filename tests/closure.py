"""Which files of the project a module runs: its imports, and theirs, read from the source without running it."""

import ast
import re
from functools import cache
from pathlib import Path

from grimp import ImportGraph, build_graph

from tests import ROOT


@cache
def import_closure(module: str) -> frozenset[str]:
    """Paths, relative to the repository, of the project's files that importing `module` can lead to.

    Imports inside functions count, those under TYPE_CHECKING do not, and files without code are left out. Files of
    other kinds that a module names in a string, next to itself or in every folder next to itself (`*/NAME`), count too.
    """
    seen: set[str] = set()
    waiting = {module}
    while waiting:
        seen.add(name := waiting.pop())
        waiting |= {*imports().find_modules_directly_imported_by(name), name.rpartition(".")[0]} - seen - {""}
    files = {path for name in seen for path in (module_path(name), *_named_files(module_path(name)))}
    return frozenset(str(path.relative_to(ROOT)) for path in files if has_code(path))


@cache
def imports() -> ImportGraph:
    return build_graph("stages", "tools", exclude_type_checking_imports=True, cache_dir=None)


def module_path(module: str) -> Path:
    plain = ROOT / Path(*module.split("."))
    return next(path for path in (plain.with_suffix(".py"), plain / "__init__.py") if path.is_file())


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def has_code(path: Path) -> bool:
    """Whether a file holds anything: a Python file more than its docstring."""
    if path.suffix != ".py":
        return bool(path.read_text(encoding="utf-8").strip())
    return len(parsed(path).body) > (ast.get_docstring(parsed(path)) is not None)


@cache
def task_modules(module: str) -> set[str]:
    """The modules of a task that a stage loads: the literals in calls of `load_task`, its own or of what it imports."""
    return {
        str(node.args[1].value)
        for path in import_closure(module)
        if path.endswith(".py")
        for node in ast.walk(parsed(ROOT / path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "load_task"
        and isinstance(node.args[1], ast.Constant)
    }


@cache
def _named_files(path: Path) -> frozenset[Path]:
    nodes = ast.walk(parsed(path))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    names = [text for text in texts if re.fullmatch(r"(\*/)?[\w.-]+\.(html|css|js|json|yaml)", text)]
    return frozenset(file for name in names for file in path.parent.glob(name))
