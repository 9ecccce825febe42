"""Errors: their types, and pickling."""

from __future__ import annotations

import pickle

import pytest

import adafuse_llm
from adafuse_llm import (
    AdaFuseError,
    MemberError,
    MemberOutOfMemoryError,
)
from adafuse_llm.errors import MAX_SHOWN, short_repr

pytestmark = pytest.mark.quick


def test_every_error_is_one_of_ours_and_of_the_fitting_standard_type() -> None:
    standard = {
        "InvalidInputError": ValueError,
        "LoadError": OSError,
        "MemberError": RuntimeError,
        "MemberOutOfMemoryError": MemoryError,
        "DecodingError": RuntimeError,
        "EngineClosedError": RuntimeError,
        "MissingDependencyError": ImportError,
        "ContextWindowError": ValueError,
        "CacheMemoryError": ValueError,
        "UnsupportedModelError": OSError,
        "InvalidOptionError": ValueError,
        "ServerNotReadyError": ConnectionError,
    }
    for name, kind in standard.items():
        error = getattr(adafuse_llm, name)
        assert issubclass(error, AdaFuseError)
        assert issubclass(error, kind)


def test_member_errors_survive_pickling() -> None:
    for kind in (MemberError, MemberOutOfMemoryError):
        error = pickle.loads(pickle.dumps(kind("wren", "it rained")))
        assert type(error) is kind
        assert (error.member, str(error)) == ("wren", "member 'wren' failed: it rained")


@pytest.mark.parametrize("value", ["text", 5, -1.5, None, [1, "a"], {"b": (1, 2)}, 10**20])
def test_e8_short_values_are_shown_as_they_are(value: object) -> None:
    assert short_repr(value) == repr(value)


def test_e8_long_values_are_shortened() -> None:
    endless: list[object] = []
    endless.append(endless)
    for value in ("x" * 10**6, list(range(10**6)), b"x" * 10**6, 10**5000, -(10**5000), endless):
        assert len(short_repr(value)) <= MAX_SHOWN
    assert short_repr("x" * 1000).startswith("'xxx")
    assert short_repr(10**5000) == "an integer of 16,610 bits"
