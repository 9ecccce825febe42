"""Pages whose code loads real models from the folder `models`, with the outputs that they show."""

import re
from pathlib import Path

from adafuse_llm.embedded import member_paths

SHOWN = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""A block of Python, and the output below it, if there is one."""

MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")
"""The real models that pages load."""


def needs_real_models(code: str) -> bool:
    return any(name in code for name in MODELS)


def put_embedded(folder: Path) -> None:
    """Put embedded members where the code looks for real models."""
    (folder / "models").mkdir()
    for name, member in zip(MODELS, member_paths(), strict=False):
        (folder / "models" / name).symlink_to(member, target_is_directory=True)
