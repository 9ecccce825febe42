"""What runs in the Ray actor of a member, on the machine with its files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import ray

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.remote.host import Host
from adafuse_llm.backends.remote.protocol import DONE, encoded_load_error
from adafuse_llm.errors import LoadError
from adafuse_llm.loading.collection import pause_collection, resume_collection
from adafuse_llm.loading.gguf import is_gguf_member
from adafuse_llm.loading.plans import Plan, load_plan, load_text, plan_members
from adafuse_llm.loading.sent_text import sent_text
from adafuse_llm.loading.specs import MemberSpec, absolute_path, as_spec
from adafuse_llm.ray.actors import pack, unpack

PACKAGE: Final = "adafuse-llm"

ELSEWHERE: Final = ("path", "process", "ray", "dtype", "quantization_config")
"""Fields of `MemberSpec` that a task does not hold as they are."""


def task_of(
    spec: MemberSpec, name: str, defaults: Mapping[str, Any], bundle: Mapping[str, float]
) -> dict[str, Any]:
    """Return what the actor of a member needs to know, as plain values.

    Args:
        spec: the member.
        name: the member's name.
        defaults: as for `plan_members`.
        bundle: the resources of the actor, as Ray names them.
    """
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    plain = {key: value for key, value in values.items() if key not in ELSEWHERE}
    quantization = spec.quantization_config
    return {
        "version": version(PACKAGE),
        "name": name,
        "path": absolute_path(spec.path),
        "spec": {
            **plain,
            "dtype": _dtype_name(spec.dtype),
            "quantization_config": quantization.to_dict()
            if hasattr(quantization, "to_dict")
            else quantization,
        },
        "defaults": {**defaults, "dtype": _dtype_name(defaults["dtype"])},
        "cpus": bundle.get("CPU", 0),
        "gpus": bundle.get("GPU", 0),
    }


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


class NodeMember:
    """The class of a member's actor. Ray calls one method at a time, except for two questions.

    Args:
        task: what `task_of` returned, encoded.
    """

    def __init__(self, task: bytes) -> None:
        self._task = unpack(task)
        self._name: str = self._task["name"]
        self._began = time.monotonic()
        self._phase = "checks its files"
        self._bar: Any = None
        self._plan: Plan | None = None
        self._host: Host | None = None

    def where(self) -> tuple[str, int]:
        """Return the address of this machine, and the number of this process. A question."""
        return ray.util.get_node_ip_address(), os.getpid()

    def progress(self) -> str:
        """Return what the member does, and how far it is. A question."""
        bar, seconds = self._bar, time.monotonic() - self._began
        part = f" ({bar.n / bar.total:.0%})" if bar is not None and bar.total else ""
        return f"{self._phase}{part}, {seconds:.0f} s"

    def prepare(self) -> bytes:
        """Check the member's files, and reply with those of its text side (`sent_text`)."""
        try:
            self._plan = self._planned()
            load_text(self._plan)  # so that a tokenizer of the hub is here
            return pack((DONE, sent_text(self._plan)))
        except BaseException as error:
            return self._failure(error)

    def greet(self) -> bytes:
        """Load the member, and reply with the facts about it."""
        try:
            plan = self._plan if self._plan is not None else self._planned()
            self._phase = "loads its weights"
            backend = self._load(plan)
            self._phase = "is loaded"
            self._host = Host(backend, device=f"the device of {self._name}")
            return pack(self._host.greeting())
        except BaseException as error:
            return self._failure(error)

    def handle(self, message: bytes) -> bytes:
        """Return the reply to a message."""
        assert self._host is not None
        return pack(self._host.handle(unpack(message)))

    def answer(self, question: bytes) -> bytes:
        """Return the answer to a question, even during a pass."""
        return self.handle(question)

    def _planned(self) -> Plan:
        task = self._task
        if task["version"] != (own := version(PACKAGE)):
            raise LoadError(
                f"member {self._name!r} cannot be loaded: its machine has {PACKAGE} {own}, and the "
                f"engine's has {task['version']}. Install the same version on both."
            )
        defaults = task["defaults"]
        spec = as_spec(MemberSpec(task["path"], **task["spec"], process=True))
        is_placed = spec.device is not None or (spec.device_map or defaults["device_map"])
        if task["gpus"] and not is_placed and not is_gguf_member(spec, defaults["revision"]):
            one = task["gpus"] <= 1
            spec = replace(spec, device="cuda" if one else None, device_map=None if one else "auto")
        return plan_members([spec], [self._name], defaults)[0]

    def _load(self, plan: Plan) -> Backend:
        import torch
        from transformers.utils import logging

        torch.set_num_threads(plan.spec.threads or max(1, int(self._task["cpus"])))
        with ExitStack() as stack:
            pause_collection()
            stack.callback(resume_collection)
            unseen = stack.enter_context(Path(os.devnull).open("w"))

            def watch(make: Any, arguments: Any, options: Mapping[str, Any]) -> Any:
                """Keep a progress bar of transformers, to read it. Do not print it."""
                self._bar = make(*arguments, **{**options, "file": unseen})
                return self._bar

            stack.callback(logging.set_tqdm_hook, logging.set_tqdm_hook(watch))
            try:
                return load_plan(plan)
            finally:
                self._bar = None

    def _failure(self, error: BaseException) -> bytes:
        """Return the reply if the member cannot be loaded. It names this machine."""
        status, kind, arguments, trace = encoded_load_error(self._name, error)
        *rest, reason = arguments
        return pack(
            (status, kind, (*rest, f"on {ray.util.get_node_ip_address()}: {reason}"), trace)
        )
