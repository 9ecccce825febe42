"""Runs the cookbooks offline. ``python -m tests.support.notebooks`` stores what they print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

COOKBOOKS = Path(__file__).parents[2] / "cookbooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
NOWHERE = "http://0.0.0.0:9"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models are faster with one thread
    "http_proxy": NOWHERE,
    "https_proxy": NOWHERE,
    "no_proxy": "127.0.0.1",  # for servers that a notebook starts
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, which would like ipywidgets
}
"""Offline, with one thread, and without what would only clutter stored outputs."""

SECONDS = 300


def paths() -> list[Path]:
    """The cookbooks."""
    return sorted(COOKBOOKS.glob("*.ipynb"))


def stored(path: Path) -> NotebookNode:
    """A cookbook as it lies there."""
    return nbformat.read(path, as_version=4)


def executed(path: Path) -> NotebookNode:
    """A cookbook with the outputs of a run in a new kernel.

    Raises:
        CellExecutionError: a cell raised.
        CellTimeoutError: a cell took more than `SECONDS`.
    """
    notebook = stored(path)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client.execute(env={**os.environ, **ENVIRONMENT, "PATH": commands})
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or paths():
        nbformat.write(executed(Path(name).resolve()), name)
