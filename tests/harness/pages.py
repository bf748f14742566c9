"""The pages of the documentation, as what can be run in them. docs/developing.md has the conventions, under Pages."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"bash", "c", "console", "diff", "ini", "json", "python", "text", "toml", "yaml"}
FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})(.*)$")
COMMENT = re.compile(r"^ *<!-- *(ranks: *\d+|needs \w+|not run:.*?|raises \w+|exit status \d+) *-->$")
FILE = re.compile(r"# (\w+\.py)(?: {2,}.*)?\n")  # the first line of a program that is a file


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the number of the line before the text, and the comment before it."""

    language: str
    text: str
    line: int
    mark: str = ""
    behind: bool = False  # only blank lines lie between this block and the one before

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("not run")

    @property
    def file(self) -> str:
        """The name of the file that a program is, or nothing."""
        match = FILE.match(self.text) if self.language == "python" else None
        return match[1] if match else ""

    @property
    def program(self) -> bool:
        """Whether it is run in the namespace of the page."""
        return self.language == "python" and self.runs and not self.file

    @property
    def raises(self) -> str:
        return self.mark.removeprefix("raises ") if self.mark.startswith("raises ") else ""

    @property
    def status(self) -> int:
        """The exit status expected of the last command."""
        return int(self.mark.split()[-1]) if self.mark.startswith("exit status") else 0

    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console block, each with what it shows."""
        found: list[tuple[str, str]] = []
        continued = False
        for line in self.text.splitlines():
            if continued or line.startswith("$ "):
                words = line.removesuffix("\\") if continued else line[2:].removesuffix("\\")
                found.append((found.pop()[0] + words if continued else words, ""))
                continued = line.endswith("\\")
            elif found:
                found.append((found[-1][0], found.pop()[1] + line + "\n"))
        return found


@dataclass
class Page:
    """A page: its path in the repository, the ranks that its programs run on, the library that they need, its blocks."""

    path: str
    ranks: int = 1
    needs: str = ""
    blocks: list[Block] = field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return any(block.program or (block.language == "console" and block.runs) for block in self.blocks)


@functools.cache
def read(path: str) -> Page:
    """Read a page of the repository."""
    page = Page(path)
    mark, opened, behind = "", None, False
    lines = page.text.splitlines()
    for number, line in enumerate(lines, 1):
        if opened is not None:
            closing, indent, language, start = opened
            if line.strip() != closing:
                continue
            text = "".join(row[len(indent) :] + "\n" for row in lines[start : number - 1])
            if language is not None:
                page.blocks.append(Block(language, text, start, mark, behind))
            mark, opened, behind = "", None, True
        elif match := FENCE.match(line):
            indent, fence, info = match.groups()
            directive = info.startswith("{") or fence[0] == ":"
            opened = (fence, indent, None if directive else info.strip(), number)
        elif line.strip() == "<!-- setup":
            opened = ("-->", "", "python", number)
        elif match := COMMENT.match(line):
            mark = match[1]
            if mark.startswith("ranks"):
                page.ranks, mark = int(mark.split(":")[1]), ""
            elif mark.startswith("needs"):
                page.needs, mark = mark.split()[1], ""
        elif line.strip():
            mark, behind = "", False
    return page


def paths() -> list[str]:
    """The pages of the repository that are run; the reference has the doctests, decisions have no programs."""
    found = [ROOT / "README.md", ROOT / "jobscripts" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found if path.exists()]
    return [name for name in names if not name.startswith(("docs/_build/", "docs/decisions/", "docs/reference/"))]
