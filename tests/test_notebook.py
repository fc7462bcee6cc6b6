"""The notebook runs from its first cell to its last, on a CPU, and its outputs look right."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "notebooks" / "port.ipynb"
missing = [name for name in ("nbclient", "ipykernel", "libtpu") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: pip install -e '.[docs,plan]'"),
    pytest.mark.filterwarnings("default"),  # of Jupyter's own
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, root):
    """What each cell of code shows, by its source."""
    import nbclient
    import nbformat

    notebook = nbformat.read(FILE, 4)
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
        client.execute()
    return {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def texts(outputs, start):
    """What the cell prints that begins so."""
    [found] = [shown for source, shown in outputs.items() if source.startswith(start)]
    return "".join(part["text"] for part in found if part["output_type"] == "stream")


def test_the_notebook_runs_to_its_end(outputs):
    assert texts(outputs, "!torchport doctor").splitlines()[-1].startswith("Ready: torchport run ")
    assert "demo/video.mp4" in texts(outputs, "machine, mesh")
    assert ": fits" in texts(outputs, "!torchport plan")
    [difference] = re.findall(r"on 8 devices of kind cpu: (\S+) from PyTorch", texts(outputs, "mesh = "))
    assert float(difference) < 1e-5


def test_the_picture_and_the_video_are_inline(outputs):
    [shown] = [shown for source, shown in outputs.items() if source.startswith("from IPython")]
    kinds = {kind for part in shown for kind in part["data"]}
    assert "image/png" in kinds and "text/html" in kinds


def test_a_bar_needs_no_cursor_that_moves_up(outputs):
    shown = texts(outputs, "machine, mesh")
    assert re.search(r"\rdenoise: 100%\S+ 8/8 ", shown) and "\x1b[A" not in shown


def test_an_error_is_its_report_without_a_traceback(outputs):
    [error] = [part for shown in outputs.values() for part in shown if part["output_type"] == "error"]
    assert len(error["traceback"]) == 1 and error["traceback"][0].startswith("error[TP106] port: 'wan' has no strategy")
