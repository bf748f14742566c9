"""The lowest versions that pyproject.toml allows, one a line, for pip.

python -m tests.launch.minimum plot test > requirements.txt    # what the package needs, and these extras
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def project() -> dict[str, Any]:
    """Return the table [project] of pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    found: dict[str, Any] = tomllib.loads(PROJECT.read_text())["project"]
    return found


def lowest(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the package and of some extras, each at the lowest version that is allowed.

    Raises:
        KeyError: there is no such extra.
        ValueError: a requirement has no lowest version.

    Example:
        >>> lowest(["hash"])[-1].split("==")[0]
        'xxhash'
    """
    table = project()
    stated = [*table["dependencies"], *(each for extra in extras for each in table["optional-dependencies"][extra])]
    pinned = []
    for requirement in dict.fromkeys(stated):
        found = re.fullmatch(r"([\w.-]+)>=([\w.]+)( *;.*)?", requirement)
        if found is None:
            raise ValueError(f"{requirement}: expected a lowest version, as in name>=1.2")
        pinned.append(f"{found[1]}=={found[2]}{found[3] or ''}")
    return pinned


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1:])))
