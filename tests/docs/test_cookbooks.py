"""Every cookbook runs, offline, and holds the outputs of a run."""

import json
import re
from pathlib import Path

import pytest
from nbformat import NotebookNode, validate

from tests.support.notebooks import METADATA, executed, paths, stored

PLACES = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|tmp|usr|opt|var|work|mnt|private)/|[A-Z]:\\\\|site-packages"
)
"""Where files lie on the machine that a cookbook was run on."""

VERDICTS = ("True", "False")


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook: NotebookNode) -> list[list[str]]:
    """What the outputs of every cell are: streams by name, data by its types."""
    return [
        [each.get("name") or ", ".join(sorted(each.data)) for each in cell.outputs]
        for cell in code(notebook)
    ]


def verdicts(notebook: NotebookNode) -> list[str]:
    """The lines of streams that end in True or False."""
    outputs = [each for cell in code(notebook) for each in cell.outputs]
    texts = [each.text for each in outputs if each.output_type == "stream"]
    return [line for text in texts for line in text.splitlines() if line.endswith(VERDICTS)]


@pytest.mark.quick
def test_there_are_cookbooks_and_the_readme_names_them() -> None:
    assert paths()
    readme = (paths()[0].parent / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.ipynb)\)", readme)) == {path.name for path in paths()}


@pytest.mark.cookbook
@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_it_runs_and_gives_what_is_stored(path: Path) -> None:
    run = executed(path)
    assert kinds(run) == kinds(stored(path))
    assert verdicts(run) == verdicts(stored(path))


def test_the_outputs_of_every_cookbook_are_those_of_one_clean_run() -> None:
    for path in paths():
        notebook = stored(path)
        validate(notebook)
        assert notebook.metadata == METADATA
        assert not any(cell.metadata for cell in notebook.cells)
        cells = code(notebook)
        assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
        outputs = [output for cell in cells for output in cell.outputs]
        assert outputs
        for output in outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            assert not PLACES.search(json.dumps(output)), "a path of some machine"
