"""What runs in the Ray actor of a member. These tests need Ray, but no cluster."""

from __future__ import annotations

import time
from typing import Any

import pytest

from adafuse_llm import MemberSpec
from adafuse_llm.backends.remote.protocol import DONE
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading.plans import load_plan

pytestmark = pytest.mark.ray

DEFAULTS = {"dtype": "auto", "device_map": None, "trust_remote_code": False, "revision": None}


def test_progress_shows_how_much_of_the_weights_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils.logging import tqdm

    from adafuse_llm.ray import on_node
    from adafuse_llm.ray.actors import pack, unpack

    shown = []

    def slow(plan: Any) -> Any:
        for _ in tqdm(range(4), desc="Loading weights"):
            shown.append(member.progress().rpartition(",")[0])
            time.sleep(0.15)  # a bar counts at most ten times a second
        return load_plan(plan)

    monkeypatch.setattr(on_node, "load_plan", slow)
    task = on_node.task_of(MemberSpec(str(member_paths()[0])), "wren", DEFAULTS, {"CPU": 1})
    member = on_node.NodeMember(pack(task))
    assert member.progress() == "checks its files, 0 s"
    assert unpack(member.prepare())[0] == DONE
    assert unpack(member.greet())[0] == DONE
    assert shown == [f"loads its weights ({part}%)" for part in (0, 25, 50, 75)]
    assert member.progress().startswith("is loaded, ")
    assert "Loading weights" not in "".join(capfd.readouterr())


def test_errors_name_the_machine() -> None:
    from adafuse_llm.ray import on_node
    from adafuse_llm.ray.actors import pack, unpack

    task = on_node.task_of(MemberSpec("/elsewhere/model"), "m", DEFAULTS, {"CPU": 1})
    for reply in (on_node.NodeMember(pack(task)).prepare(), on_node.NodeMember(pack(task)).greet()):
        _, kind, (reason,), _ = unpack(reply)
        assert kind == "LoadError"
        assert reason.startswith("on ")
        assert ": member 'm' (/elsewhere/model) cannot be loaded: the folder does not" in reason


def test_a_path_on_this_machine_is_sent_as_an_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from adafuse_llm.ray.on_node import task_of

    (tmp_path / "models" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    sent = [
        task_of(MemberSpec(path), "m", DEFAULTS, {})["path"]
        for path in ("models/a", "org/b", "~/c", "/d")
    ]
    assert sent == [str(tmp_path / "models" / "a"), "org/b", "~/c", "/d"]
