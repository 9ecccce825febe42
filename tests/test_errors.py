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
