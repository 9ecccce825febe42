"""Pages whose code loads real models from the folder `models`, with the outputs that they show."""

import re

SHOWN = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""A block of Python, and the output below it, if there is one."""


def needs_real_models(code: str) -> bool:
    return "qwen2.5-coder-0.5b-instruct" in code
