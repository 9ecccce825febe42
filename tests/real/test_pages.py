"""Examples with real models print what their pages show."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.members import FOLDER_VARIABLE, real_folder
from tests.support.paths import ROOT
from tests.support.real_pages import SHOWN, needs_real_models

pytestmark = pytest.mark.real

PAGES = {
    "README.md": 3,
    "docs/guides/langchain.md": 2,
    "docs/guides/llamaindex.md": 2,
    "docs/guides/real-models.md": 1,
}
"""Pages with examples that load real models, and the number of these examples."""


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").symlink_to(real_folder(), target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    blocks = SHOWN.findall((ROOT / page).read_text(encoding="utf-8"))
    examples = [(code, shown) for code, shown in blocks if needs_real_models(code)]
    assert len(examples) == PAGES[page]
    names: dict[str, Any] = {}
    printed = []
    for code, _ in examples:
        exec(code, names)
        printed.append(capsys.readouterr().out.strip())
    assert printed == [shown.strip() for _, shown in examples]


def test_make_demo_real_prints_what_the_readme_shows() -> None:
    shown = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    files = [
        f"{FOLDER_VARIABLE}={real_folder()}",
        "VENV=none",
        "GGUF=",
        f"BIN={Path(sys.executable).parent}",
    ]
    done = subprocess.run(
        ["make", "demo-real", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(shown[0].split()) in " ".join(done.stdout.split())  # the width may differ
