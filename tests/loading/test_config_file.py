"""Configuration files: what is refused, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from adafuse_llm import InvalidInputError, InvalidOptionError
from adafuse_llm.loading.config_file import MAX_ALIASES, MAX_DEPTH, read_config

pytestmark = pytest.mark.quick


def written(folder: Path, text: str) -> Path:
    file = folder / "ensemble.yaml"
    file.write_text(text)
    return file


def bomb(levels: int, width: int) -> str:
    """Return YAML whose value has `width` to the power of `levels` parts."""
    lines = ["max_words: &a0 [lol]"]
    names = ["stop", "weights", "use", "models", "dtype", "strategy", "revision", "max_new_tokens"]
    for level, name in enumerate(names[:levels], start=1):
        lines.append(f"{name}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def test_e8_a_file_with_nested_aliases_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, bomb(8, 9))
    with pytest.raises(InvalidInputError, match=f"more than {MAX_ALIASES} YAML aliases") as caught:
        read_config(file)
    assert len(str(caught.value)) < 400


def test_e8_the_error_for_allowed_aliases_is_short(tmp_path: Path) -> None:
    file = written(tmp_path, bomb(6, 3))
    with pytest.raises(InvalidOptionError) as caught:
        read_config(file)
    assert len(str(caught.value)) < 800


def test_aliases_can_be_used(tmp_path: Path) -> None:
    file = written(tmp_path, "models: [&one a/one, *one]\nmax_words: 2")
    assert read_config(file).models == ("a/one", "a/one")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_words: [" + "[" * 50_000, f"nested more than {MAX_DEPTH} levels"),
        ("revision: 2024-13-45", "is not YAML: month must be in 1..12"),
        ("max_words: {", "is not YAML"),
        ("5", "must contain names and values"),
        (f"? {'x' * 10_000}\n: 1", "unknown option 'xxx"),
    ],
)
def test_e8_a_file_that_cannot_be_used_has_a_short_error(
    tmp_path: Path, text: str, says: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(InvalidInputError, match=says) as caught:
        read_config(file)
    assert len(str(caught.value)) < 800
