"""Docstrings, comments, messages and documents are plain English: subject first, standard terms."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

CODE = sorted(path for folder in ("stages", "tools", "tests") for path in ROOT.glob(f"{folder}/**/*.py"))
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "dvc.yaml", "params.yaml")),
    *sorted(ROOT.glob("docs/*.md")),
]
OPENINGS = re.compile(r"(Of|What|Who|Whose|Where|How|As|Likewise|Those|To be|The same|By|Nor|Not|Asked|Said)\b")
"""First words of a docstring or comment that continue the name above it instead of naming their subject."""
WORDS = re.compile(
    r"\b(mend(s|ed|ing)?|astray|heed(s|ed)?|testif\w+|at hand|weigh(s|ed|ing)?|pictures?|anew|likewise|foresee\w*|told"
    r"|thereof|beforehand|goes round|by which|whose|lack of memory|nobody knows|too little in it)\b",
    re.IGNORECASE,
)
"""Words for which the field has a standard term, such as image, score, again, fix."""
GLOSSARY = [
    [cell.strip() for cell in line.split("|")[1:4]]
    for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| term ")
]
"""Term, meaning and synonyms of each row."""
SYNONYMS = [synonym for *_, words in GLOSSARY for synonym in filter(None, words.split(", "))]
NAMES = re.compile(
    r"answerer|load_answerer|answering|(generate|score|read|draw|json|own|same)_answers?|answered_tokens"
    r"|(Memory|Training|Merge)Record|possible_sets|card_file",
    re.IGNORECASE,
)
"""Names that gave a thing another word than the glossary does: a completion, a stage's file, a model card."""
REFUSED = re.compile(rf"{WORDS.pattern}|\b({'|'.join(map(re.escape, SYNONYMS))})s?\b", re.IGNORECASE)


def comments(text: str) -> Iterator[str]:
    """Each block of comments; lines that follow one another are one block."""
    block: list[str] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and block:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(block)


def faults(text: str) -> list[str]:
    """Openings and words to avoid in a module."""
    nodes = list(ast.walk(ast.parse(text)))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    statements = [node.value for node in nodes if isinstance(node, ast.Expr)]
    docstrings = [
        node.value.strip() for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    said = list(comments(text))
    found = [passage.partition("\n")[0] for passage in (*docstrings, *said) if OPENINGS.match(passage)]
    return found + [match[0] for passage in (*strings, *said) for match in REFUSED.finditer(passage)]


def names(text: str) -> list[str]:
    """Names in a module that were replaced."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.NAME and NAMES.fullmatch(token.string)]


def test_code_is_in_plain_english() -> None:
    found = {path: faults(path.read_text(encoding="utf-8")) for path in CODE if path != Path(__file__)}
    assert {str(path.relative_to(ROOT)): words for path, words in found.items() if words} == {}


def test_names_in_code_are_those_of_the_glossary() -> None:
    found = {path: set(names(path.read_text(encoding="utf-8"))) for path in CODE if path != Path(__file__)}
    assert {str(path.relative_to(ROOT)): words for path, words in found.items() if words} == {}
    assert names("def score_answers(answers, same_answers): ...") == ["score_answers", "same_answers"]


def test_documents_are_in_plain_english() -> None:
    found = {path.name: [match[0] for match in REFUSED.finditer(path.read_text(encoding="utf-8"))] for path in TEXTS}
    assert {name: words for name, words in found.items() if words and name != "glossary.md"} == {}


def test_the_glossary_has_each_term_once() -> None:
    terms = [term for term, *_ in GLOSSARY]
    assert terms == sorted(set(terms), key=str.lower)
    assert {"datapoint", "mini-batch"} <= set(SYNONYMS)


def test_faults_are_found_in_docstrings_comments_and_messages() -> None:
    module = '"""Of a model."""\n# What it holds,\n# and why.\n\nMESSAGE = "mend it"  # a mini-batch\n'
    assert faults(module) == ["Of a model.", "What it holds, and why.", "mend", "mini-batch"]
