"""The documentation site: ``make docs``."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import llama_index.llms.adafuse  # noqa: F401  autodoc would set TYPE_CHECKING, and then pydantic fails

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # generated.py; benchmarks/

from generated import copy_cookbooks, for_site  # noqa: E402

project = "adafuse-llm"
author = "The adafuse-llm developers"
copyright = author  # noqa: A001  # Sphinx requires this name
release = metadata.version("adafuse-llm")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make cookbooks` runs the notebooks
nb_merge_streams = True
exclude_patterns = ["figures"]
html_theme = "furo"
html_title = f"adafuse-llm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
autodoc_default_options = {"exclude-members": "model_config, model_post_init, __new__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """Copy the cookbooks, and adjust the links to them."""

    def read(_: Any, name: str, source: list[str]) -> None:
        source[0] = for_site(name, source[0])

    copy_cookbooks(HERE.parent / "cookbooks", HERE / "cookbooks")
    app.connect("source-read", read)
