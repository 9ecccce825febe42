"""Runs the cookbooks offline.

``python -m tests.support.notebooks`` stores what they print. Cookbooks that can use real members do
so then, and are left as they are if ``make real`` has not fetched the members. In tests, all of
them use the embedded members.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from benchmarks.real.members import FOLDER_VARIABLE, MEMBERS, real_files

COOKBOOKS = Path(__file__).parents[2] / "cookbooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
NOWHERE = "http://0.0.0.0:9"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "http_proxy": NOWHERE,
    "https_proxy": NOWHERE,
    "no_proxy": "127.0.0.1",  # for servers that a notebook starts
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, which would like ipywidgets
}
"""Offline, and without what would only clutter stored outputs."""

SMALL = {
    FOLDER_VARIABLE: str(COOKBOOKS / "no real members"),
    "OMP_NUM_THREADS": "1",  # tiny models are faster with one thread
}
"""Embedded members, also where a cookbook could use real ones."""


def paths() -> list[Path]:
    return sorted(COOKBOOKS.glob("*.ipynb"))


def stored(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(path: Path, *, real: bool = False) -> NotebookNode:
    """A cookbook with the outputs of a run in a new kernel.

    With `real`, it finds the real members, and a cell may take an hour instead of five minutes.
    """
    notebook = stored(path)
    client = NotebookClient(
        notebook,
        timeout=3600 if real else 300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = ENVIRONMENT if real else {**ENVIRONMENT, **SMALL}
    client.execute(env={**os.environ, **settings, "PATH": commands})
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main() -> None:
    fetched = len(real_files()) == len(MEMBERS)
    for path in [Path(name).resolve() for name in sys.argv[1:]] or paths():
        real = real_files.__name__ in path.read_text(encoding="utf-8")
        if real and not fetched:
            print(f"{path.name}: its outputs are those of real members; first run: make real")
        else:
            nbformat.write(executed(path, real=real), path)


if __name__ == "__main__":
    main()
