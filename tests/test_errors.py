"""Errors: their types, and pickling."""

import pickle
import queue

import pytest

import adafuse_llm
from adafuse_llm import errors
from adafuse_llm.errors import MAX_SHOWN, short_repr

pytestmark = pytest.mark.quick


def test_every_error_is_one_of_ours_and_of_the_fitting_standard_type() -> None:
    standard = {"MalformedReply": ValueError, "Load": OSError, "UnsupportedModel": OSError}
    standard |= {"MemberOutOfMemory": MemoryError, "MemberUnavailable": ConnectionError}
    standard |= {"QueueFull": queue.Full, "RequestTimeout": TimeoutError}
    standard |= {"MissingDependency": ImportError, "Server": ConnectionError}
    standard |= {"ServerNotReady": ConnectionError, "AdaFuse": Exception, "Member": Exception}
    for name in errors.__all__:
        kind, short = getattr(errors, name), name.removeprefix("Invalid").removesuffix("Error")
        assert issubclass(kind, standard.get(short, LookupError)), name
        assert issubclass(kind, errors.AdaFuseError)
        assert getattr(adafuse_llm, name) is kind


def test_member_errors_survive_pickling() -> None:
    for kind in (errors.MemberError, errors.MemberOutOfMemoryError, errors.MemberUnavailableError):
        error = pickle.loads(pickle.dumps(kind("wren", "it rained")))
        assert type(error) is kind
        assert (error.member, str(error)) == ("wren", "member 'wren' failed: it rained")


def test_long_values_are_shortened() -> None:
    endless: list[object] = []
    endless.append(endless)
    for value in ("x" * 10**6, list(range(10**6)), b"x" * 10**6, endless):
        assert len(short_repr(value)) <= MAX_SHOWN
    assert short_repr("x" * 1000).startswith("'xxx")
