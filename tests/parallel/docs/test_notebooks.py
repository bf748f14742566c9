"""The notebooks of docs/notebooks run, and print what is saved in them."""

import json
import re

import pytest

from tests.launch.launcher import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = [pytest.param(path, id=f"notebook {path.stem}") for path in sorted(FOLDER.glob("*.ipynb"))]
WIDTH = 76  # columns of a page that show without wrapping


def test_notebooks_are_found():
    assert len(NOTEBOOKS) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_is_saved_after_a_whole_run(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)
    for cell in cells:
        assert max(map(len, "".join(cell["source"]).splitlines())) <= WIDTH
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_pages_link_to_the_notebook(path):
    for page in ("index.md", "notebooks.md"):
        assert f"(notebooks/{path.name})" in (ROOT / "docs" / page).read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_prints_what_is_saved(path, tmp_path):
    for needed in ("nbclient", "ipykernel", "cloudpickle"):
        pytest.importorskip(needed, reason=f"running a notebook needs {needed}")
    import nbclient
    import nbformat

    saved = nbformat.read(path, as_version=4)
    if re.search(r"^import torch$", "\n".join(cell.source for cell in saved.cells), re.MULTILINE):
        pytest.importorskip("torch", reason="the notebook needs torch")
    shown = [printed(cell) for cell in saved.cells]
    client = nbclient.NotebookClient(
        saved, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert [printed(cell) for cell in saved.cells] == shown


def printed(cell):
    """The standard output of a cell, or nothing where its metadata say that it has process numbers and times."""
    if "output-varies" in cell.metadata.get("tags", []):
        return ""
    outputs = [output for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return "".join(output.text for output in outputs)
