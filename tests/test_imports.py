"""Modules that have to start at once import neither torch nor transformers.

The layers themselves are contracts of import-linter, in pyproject.toml. To it an import inside a function is
one like any other, and those are just what keeps these modules fast.
"""

import ast
import json
import subprocess
import sys

from tests import ROOT
from tests.closure import parsed

TASKS = sorted(path.parent.name for path in (ROOT / "stages/tasks").glob("*/report.py"))
HEAVY = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "matplotlib.pyplot")

FAST = (
    "stages/core",
    "stages/launcher",
    "stages/publishing",
    "stages/reporting",
    *(
        f"stages/{name}"
        for name in (
            "planning",
            "data",
            "evaluation/statistics",
            "mixture/certificate",
            "models/certificate",
            "models/folders",
        )
    ),
    *(f"stages/tasks/{task}/{module}" for task in TASKS for module in ("samples", "sources", "scoring", "report")),
    "stages/tasks/amr/predictions",
    "stages/compare",
    "tools/api",
    "tools/plan",
    "tools/try_run/__main__",
    "tools/verify",
)
"""Modules, or packages with all that is in them."""

# In one process: each module is blamed for what it is the first to bring in.
IMPORT_ALL = """
import importlib, json, sys
brought = {}
seen = set()
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    loaded = set(json.loads(sys.argv[2])) & sys.modules.keys()
    if loaded - seen:
        brought[module] = sorted(loaded - seen)
    seen |= loaded
print(json.dumps(brought))
"""


def modules_below(name: str) -> list[str]:
    path = ROOT / name
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def heavy_imports(modules: list[str]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(modules), json.dumps(HEAVY)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported: dict[str, list[str]] = json.loads(result.stdout)
    return imported


def test_what_must_start_at_once_imports_nothing_heavy() -> None:
    assert heavy_imports([module for name in FAST for module in modules_below(name)]) == {}


def test_a_stage_prepares_its_process_before_it_imports_anything_heavy() -> None:
    """Importing `stages.core` prepares it; imports are sorted, those of other packages first."""
    for path in (ROOT / "stages").glob("*.py"):
        names = [node.module or "" for node in parsed(path).body if isinstance(node, ast.ImportFrom)]
        names += [name.name for node in parsed(path).body if isinstance(node, ast.Import) for name in node.names]
        assert not {name.partition(".")[0] for name in names} & {*HEAVY}, path


def test_the_launcher_imports_little_beside_the_standard_library() -> None:
    """It is on the way of every stage: what checks params.yaml, looks at dvc's process, and nothing like numpy."""
    code = "import sys, stages.launcher.launch; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    installed = {name for name in result.stdout.split() if not name.startswith("_")} - sys.stdlib_module_names
    reads_params = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "ruamel"}
    reads_params |= {"cython_runtime"}  # ruamel's parser in C
    assert installed <= {"click", "psutil", "stages", *reads_params}
