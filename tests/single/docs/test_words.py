"""Public text is plain English: no docstring begins with a question word, no error names nothing, and no private phrases.

CONTRIBUTING.md has the rules. The phrases are those that readers stumbled over; the words alone are fine where NumPy, MPI or
everyday English uses them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.house_rules import files, forget, nodes

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.ipynb"))

#: Phrases, and what to write instead.
PHRASES = {
    r"\b(is|are|was|were) told\b": "gets, is given",
    r"\btells? (the|you|which|what|how|whether|a|an|it|them|users?)\b": "reports, prints, raises",
    r"\bwithout a word\b": "silently",
    r"\bas ever\b": "as usual",
    r"\btakes? note\b": "records",
    r"\bso many-th\b": "every n-th",
    r"\bso many(\b|'th)": "n, the number of",
    r"\bgoes on\b": "continues, resumes",
    r"\b(is|are|was|were|has|have) begun\b": "started",
    r"\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b": "no process, the caller, a user",
    r"\b[Ww]ho (waits|asks|wants)\b": "the waiting rank, the caller",
    r"\bin peace\b": "alone",
    r"\bshall\b": "must",
    r"\b(has|have|is|are) to be\b": "must be",
    r"(?<!there )\bis no (rank|worker|server|process|file|number|error|optimizer|strategy|function|dataset|array)\b": "is not a",
    r"\bexplained error\b": "raises X",
    r"\b[Dd]o(es)? nothing (if|unless)\b": "raises X if",
    r"\bwhat is (kept|dealt|meant|left over)\b": "the noun",
    r"\b(is|are) dealt (to|out)\b": "distributed round-robin",
    r"\bbehind `?(mpiexec|srun|mpirun)\b": "under mpiexec",
}

#: Places where a phrase stays: the file and the phrase, with the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}

_EMPTY = frozenset(
    ("one", "it", "one without", "one with it", "another", "another one", "less", "it twice", "something else")
)


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    yield
    for cached in (_nodes, _texts):
        cached.cache_clear()
    forget()


@functools.cache
def _nodes() -> dict[str, tuple[ast.AST, ...]]:
    """Return the nodes of each file of the package, by its name."""
    return {str(path.relative_to(ROOT)): nodes(path) for path in files()}


def _docstrings(found: tuple[ast.AST, ...]) -> Iterator[tuple[int, str]]:
    for node in found:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@functools.cache
def _texts() -> tuple[tuple[str, int, str], ...]:
    """Return each text of the package that has a space in it, and each line of a page outside of code."""
    return (*_texts_of_files(), *_lines_of_pages())


def _texts_of_files() -> Iterator[tuple[str, int, str]]:
    for name, found in _nodes().items():
        for node in found:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield name, node.lineno, " ".join(node.value.split())


def _lines_of_pages() -> Iterator[tuple[str, int, str]]:
    for page in PAGES:
        prose = re.sub(
            r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"), flags=re.S
        )
        for number, line in enumerate(prose.splitlines(), 1):
            yield str(page.relative_to(ROOT)), number, line


def _found(phrase: str) -> list[str]:
    return [
        f"{name}:{line}: …{text[max(0, match.start() - 40) : match.end() + 40]}…"
        for name, line, text in _texts()
        if (name, phrase) not in EXCEPTIONS
        for match in re.finditer(phrase, text)
    ]


def test_no_docstring_begins_with_a_question_word():
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, found in _nodes().items()
        for line, text in _docstrings(found)
        if re.match(r"(What|Whether|How|Which|Who|Where|That)\b", text)
    ]
    assert not found, "write an imperative verb, or a noun phrase:\n" + "\n".join(found)


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_private_phrase(phrase):
    found = _found(phrase)
    assert not found, f"write {PHRASES[phrase]!r} instead:\n" + "\n".join(found)


def test_exceptions_are_few_and_needed():
    assert len(EXCEPTIONS) <= 60
    assert all(reason for reason in EXCEPTIONS.values())
    needed = {(name, phrase) for phrase in PHRASES for name, _, text in _texts() if re.search(phrase, text)}
    assert not EXCEPTIONS.keys() - needed


def _gots(found: tuple[ast.AST, ...]) -> Iterator[tuple[int, object]]:
    """Return the constants that become `got` of an error: an argument, or an assignment of that name."""
    for node in found:
        if isinstance(node, ast.Call):
            yield from (
                (k.value.lineno, k.value.value)
                for k in node.keywords
                if k.arg == "got" and isinstance(k.value, ast.Constant)
            )
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            for name, each in pairs:
                if isinstance(name, ast.Name) and name.id == "got" and isinstance(each, ast.Constant):
                    yield each.lineno, each.value


def test_errors_say_what_they_got():
    found = [
        f"{name}:{line}: got {got!r}"
        for name, nodes_of in _nodes().items()
        for line, got in _gots(nodes_of)
        if got in _EMPTY
    ]
    assert not found, "name the value:\n" + "\n".join(found)
