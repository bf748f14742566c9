"""What a package index shows of the README: it has neither the files beside it nor names for its headings."""

from __future__ import annotations

import re
import runpy

from tests.launch.launcher import ROOT

described = runpy.run_path(str(ROOT / "setup.py"))["described"]


def test_links_that_lead_nowhere_become_words() -> None:
    assert described("see [the guide](docs/guide.md), [fast](#how-fast)") == "see the guide (docs/guide.md), fast"
    assert described("[docs/a.md](docs/a.md): ![two\nnodes](docs/x.svg)") == "docs/a.md: *two\nnodes: docs/x.svg*"
    assert described("[MPI](https://www.mpi-forum.org)") == "[MPI](https://www.mpi-forum.org)"


def test_the_readme_keeps_its_words_and_has_no_such_link() -> None:
    readme = (ROOT / "README.md").read_text()
    text = described(readme)
    assert not re.findall(r"\]\((?!https?://)", text)
    assert re.findall(r"^#.*|^```.*|^    .*", text, re.MULTILINE) == re.findall(
        r"^#.*|^```.*|^    .*", readme, re.MULTILINE
    )
