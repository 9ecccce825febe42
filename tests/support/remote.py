"""Hosts of members for tests: in this process, and functions that load members in others."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adafuse_llm.backends import (
    Backend,
    FakeBackend,
    NodeQuery,
    NodeResult,
    TextCodec,
    TokenTree,
)
from adafuse_llm.backends.fake import END
from adafuse_llm.backends.remote import HostDied, MemberText, RemoteBackend, join_host
from adafuse_llm.backends.remote.host import Host
from adafuse_llm.backends.remote.processes import ProcessChannel, ProcessConnector
from adafuse_llm.errors import UnsupportedModelError

TOKENS = tuple(f"{space}{letter}" for letter in "abcdefgh" for space in (" ", ""))


def rule(text: str) -> dict[str, float]:
    """Different probabilities of all tokens after every text."""
    weights = [1 + zlib.crc32(f"{text}|{token}".encode()) % 1000 for token in (*TOKENS, END)]
    return {
        token: weight / sum(weights) for token, weight in zip((*TOKENS, END), weights, strict=True)
    }


def fake(name: str = "fake") -> FakeBackend:
    return FakeBackend(name, rule, TOKENS, is_complete=True, bytes_per_token=3)


@dataclass(frozen=True)
class BackendText:
    """The text side of a backend of this process."""

    backend: Any

    @property
    def codec(self) -> TextCodec:
        codec: TextCodec = self.backend.codec
        return codec

    @property
    def token_texts(self) -> Sequence[str] | None:
        texts: Sequence[str] | None = self.backend.token_texts
        return texts

    @property
    def follows_grammars(self) -> bool:
        return bool(self.backend.follows_grammars)

    def grammar_tokenizer(self, size: int | None, end_ids: Collection[int]) -> Any:
        return self.backend.grammar_tokenizer()


class MemoryChannel:
    """A channel to a host in this process. It checks that messages are plain values.

    Args:
        backend: the host's backend.
        faults: for each message, ``"before"`` or ``"after"`` if the host dies before or after it
            handles the message, otherwise None.
    """

    def __init__(self, backend: Backend, faults: Iterator[str | None]) -> None:
        self.served = Host(backend)
        self.messages: list[Any] = []
        self._faults = faults
        self._replies = [self.served.greeting()]
        self._died = False

    @property
    def host(self) -> str:
        return "this process"

    def send(self, message: Any) -> None:
        fault = next(self._faults, None)
        if fault == "before" or self._died:
            self._die()
        self.messages.append(copied(message))
        self._replies.append(self.served.handle(self.messages[-1]))
        self._died = fault == "after"

    def receive(self) -> Any:
        if self._died:
            self._die()
        return copied(self._replies.pop())

    def ask(self, question: Any) -> Any:
        if self._died:
            self._die()
        return copied(self.served.handle(copied(question)))

    def close(self) -> None:
        self._died = True

    def _die(self) -> None:
        self._died = True
        raise HostDied("its host died in a test")


def copied(value: Any) -> Any:
    """A copy of a message as msgpack would give it back: tuples become lists."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [copied(each) for each in value]
    assert value is None or type(value) in (int, float, str, bytes, bool), value
    return value


class MemoryHosts:
    """Hosts in this process, one after the other.

    Args:
        make: creates the backend of each host.
        faults: as for `MemoryChannel`.
    """

    def __init__(self, make: Callable[[], Backend], faults: Iterable[str | None] = ()) -> None:
        self.channels: list[MemoryChannel] = []
        self._make = make
        self._faults = iter(faults)

    def __call__(self) -> MemoryChannel:
        self.channels.append(MemoryChannel(self._make(), self._faults))
        return self.channels[-1]

    def close(self) -> None:
        pass

    def member(self, text: Backend) -> RemoteBackend:
        """The member of a first host, which shares the codec of `text`."""
        return join_host(text.name, BackendText(text), self, self())


# In other processes ---------------------------------------------------------------------------


class Killable(FakeBackend):
    """A fake that does to its process what the files in a folder say."""

    folder: Path

    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        if (self.folder / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.folder / "exit").exists():
            (self.folder / "exit").unlink()
            os._exit(3)
        if (self.folder / "fail").exists():
            raise MemoryError("no room")
        while (self.folder / "hang").exists():
            time.sleep(0.02)
        print("noise that must not reach the output of the application")
        return super().evaluate(queries)


def killable(folder: str) -> Killable:
    made = Killable("fake", rule, TOKENS, is_complete=True)
    made.folder = Path(folder)
    return made


def unloadable() -> Backend:
    raise RuntimeError("no such model")


def unsupported() -> Backend:
    raise UnsupportedModelError("no causal model")


def dying() -> Backend:
    os._exit(5)


def aborting() -> Backend:
    os.abort()


def process_member(
    make: Callable[..., Backend], *arguments: Any, text: MemberText | None = None
) -> RemoteBackend:
    """A member in a process of its own."""
    connector = ProcessConnector("fake", make, *arguments)
    return join_host("fake", text or BackendText(fake()), connector, connector())


def process_of(member: Any) -> int:
    """The id of a member's process."""
    channel = member._session.channel
    assert isinstance(channel, ProcessChannel)
    return channel.process.pid


def ask_process() -> int:
    """Start a process, use it, and return its id."""
    member = process_member(killable, "no folder")
    tree = TokenTree([1, 2])
    member.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
    globals()["kept"] = member
    return process_of(member)
