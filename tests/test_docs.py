"""README.md, CONTRIBUTING.md and docs/: what they link to and name exists."""

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dvc.utils.serialize import parse_yaml
from ruamel.yaml import YAML

from tests import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CHECKED_DIRS = ("stages/", "tools/", "tests/", "docker/", "docs/", ".ci/", "data/tiny")
"""Paths of other folders are those of results."""
WRITTEN_LATER: set[str] = set()
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z]+\b")

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def code(text: str) -> Iterator[str]:
    """The lines of fenced blocks, comments left out, and the code spans outside them."""
    for block in FENCED.findall(text):
        yield from (line.partition("#")[0] for line in block.splitlines()[1:-1])
    yield from re.findall(r"`([^`\n]+)`", FENCED.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_every_relative_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@every_document
def test_every_path_that_is_named_exists(path: Path) -> None:
    """NAME, TASK and the like stand for any name."""
    words = {each.split()[0] for each in code(path.read_text(encoding="utf-8")) if each.strip()}
    named = {word for word in words if word.startswith(CHECKED_DIRS)} - WRITTEN_LATER
    assert [name for name in sorted(named) if not any(ROOT.glob(PLACEHOLDER.sub("*", name)))] == []


@every_document
def test_every_make_target_and_module_that_is_named_exists(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = list(code(path.read_text(encoding="utf-8")))
    called = [
        name for each in commands for names in re.findall(r"\bmake((?: [a-z-]+\b)+)", each) for name in names.split()
    ]
    assert [name for name in called if name not in targets] == []
    modules = [
        name.replace(".", "/") for each in commands for name in re.findall(r"-m ((?:stages|tests|tools)[\w.]*)", each)
    ]
    assert [name for name in modules if not (ROOT / f"{name}.py").exists() and not (ROOT / name).is_dir()] == []


@every_document
def test_dvc_reads_every_setting_that_is_shown_and_what_it_writes_of_it(path: Path) -> None:
    """`-S` rewrites params.yaml without the quotes that a colon needs between braces: `{source: "folder:..."}`."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        written = io.StringIO()
        YAML().dump(YAML().load(block), written)
        for text in (block, written.getvalue()):
            assert parse_yaml(text, path), block


def selectable() -> Iterator[str]:
    """Names that pytest's -k selects tests by, in lower case: folders, modules and functions, without parameters."""
    for file in ROOT.glob("tests/**/test_*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        tests = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        yield from (name.lower() for name in (*file.relative_to(ROOT).parts, *tests))


def test_every_selection_of_tests_that_is_named_selects_some() -> None:
    text = "\n".join(line for path in DOCUMENTS for line in code(path.read_text(encoding="utf-8")))
    expressions = [quoted or word for quoted, word in re.findall(r"-k (?:'([^']+)'|(\w+))", text)]
    assert expressions
    words = {word.lower() for each in expressions for word in each.split()} - {"or", "and", "not"}
    names = set(selectable())
    assert [word for word in sorted(words) if not any(word in name for name in names)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def test_the_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCUMENTS[2:] if f"(docs/{page.name})" not in readme] == []


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in ROOT.glob("stages/*/[a-z]*.py")}),
    ids=lambda path: path.name,
)
def test_architecture_names_every_module_in_its_folders_row(folder: Path) -> None:
    rows = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    row = next(row for row in rows if row.startswith(f"| `{folder.relative_to(ROOT)}/` |")).lower()
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert [module for module in sorted(modules) if not re.search(rf"\b{module}\b", row)] == []
