"""Errors: their types, and pickling."""

import json
import pickle
import queue
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import adafuse_llm
from adafuse_llm import errors
from adafuse_llm.errors import MAX_SHOWN, install_command, short_repr

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


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "adafuse-llm[cli,serve]"'),
        (
            {"url": "file:///home/me/a%20clone", "dir_info": {"editable": True}},
            'pip install -e "/home/me/a clone[cli,serve]"',
        ),
        (
            {"url": "https://host/clone.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            'pip install "adafuse-llm[cli,serve] @ git+https://host/clone.git"',
        ),
    ],
)
def test_the_command_that_installs_extras_fits_the_installation(
    origin: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: adafuse-llm\nVersion: 1\n")
    if origin is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    found = metadata.PathDistribution(tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda _: found)
    assert install_command("cli,serve") == command
