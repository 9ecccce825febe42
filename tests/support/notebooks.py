"""Runs the cookbooks offline.

``python -m tests.support.notebooks`` stores what they print. Those whose text says that their
stored outputs come from two real models use these models then, and are left as they are if
``make real`` has not fetched them. In tests, all cookbooks use the embedded members.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from benchmarks.real.members import real_files

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

VARIABLE = "ADAFUSE_MEMBERS"
"""The environment variable that names members, as for `ChatAdaFuse`."""

REAL = ("smollm", "qwen")
TWO_REAL = "The stored outputs come from two real models"
"""The real members of stored outputs, and how the text of a cookbook announces them."""

SMALL = {VARIABLE: "", "OMP_NUM_THREADS": "1"}
"""Embedded members, also where a cookbook could use real ones. One thread is faster for them."""


def paths() -> list[Path]:
    return sorted(COOKBOOKS.glob("*.ipynb"))


def stored(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(path: Path, *, real: bool = False) -> NotebookNode:
    """A cookbook with the outputs of a run in a new kernel.

    With `real`, it uses the real members, and a cell may take an hour instead of five minutes.
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
    members = {VARIABLE: ",".join(str(real_files()[name]) for name in REAL)} if real else SMALL
    client.execute(env={**os.environ, **ENVIRONMENT, **members, "PATH": commands})
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main() -> None:
    fetched = {*REAL} <= real_files().keys()
    for path in [Path(name).resolve() for name in sys.argv[1:]] or paths():
        real = TWO_REAL in path.read_text(encoding="utf-8")
        if real and not fetched:
            print(f"{path.name}: its outputs are those of real members; first run: make real")
        else:
            nbformat.write(executed(path, real=real), path)


if __name__ == "__main__":
    main()
