"""The JSON that the server adds to OpenAI's API, and that `RemoteEngine` reads.

Responses, chunks and errors have it in the field ``adafuse``. Readers ignore unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adafuse_llm import errors
from adafuse_llm.errors import AdaFuseError, MemberError
from adafuse_llm.report.styles import owner, shared
from adafuse_llm.results import Generation, Round, StreamEvent, Usage, total_logprob

EXTENSION = "adafuse"
"""Name of the field for all that OpenAI's API lacks, in requests and in responses."""

ENDING = {"finish_reason", "cut_by", "seed", "strategy", "logprob", "confidence"}
"""Fields of `Generation` that every client gets with a finished response."""

KINDS: Mapping[str, type[AdaFuseError]] = {name: getattr(errors, name) for name in errors.__all__}
"""Classes of errors by name. A client raises an error of the class that the server names."""


def whole(generation: Generation, *, rounds: bool) -> dict[str, Any]:
    """Return a response as JSON: with `rounds`, all but `alternatives`; otherwise only `ENDING`."""
    if rounds:
        return generation.model_dump(mode="json", exclude={"alternatives"})
    return generation.model_dump(mode="json", include=ENDING)


def chunk(
    played: Round | None, event: StreamEvent | None, warnings: Sequence[str], *, rounds: bool
) -> dict[str, Any]:
    """Return the JSON of a chunk of a stream.

    Pass `event` only for the last chunk of an event. With `rounds`, the JSON has the round
    `played`, how to display this round, and the event's text with all markers. If the event ends
    a response, the JSON has `ENDING` and the warnings, with or without `rounds`.
    """
    fields: dict[str, Any] = {}
    if rounds and played is not None:
        kind = shared(played)
        fields["round"] = {
            **played.model_dump(mode="json"),
            "owner": owner(played, tuple(played.candidates[played.winner].nll)),
            "shared": None if kind is None else kind.kind,
            "probabilities": played.choice_probabilities,
        }
    if rounds and event is not None:
        fields |= {"text": event.text, "reply_prefix": event.reply_prefix}
    if event is not None and event.generation is not None:
        end = ENDING | {"usage", "reply_prefix", "member_logprobs"} if rounds else ENDING
        fields |= event.generation.model_dump(mode="json", include=end)
        if warnings:
            fields["warnings"] = [*warnings]
    return fields


class ResponseReader:
    """Reads one response from its chunks. `is_whole`: whether the finish reason has come."""

    def __init__(self) -> None:
        self.is_whole = False
        self._text = self._prefix = ""
        self._rounds: list[Round] = []
        self._new: Round | None = None

    def add(self, fields: Mapping[str, Any]) -> StreamEvent | None:
        """Add a chunk, and return the event that it completes, or None."""
        if "round" in fields:
            self._new = Round.model_validate(fields["round"])
            self._rounds.append(self._new)
        return self._event(fields) if "text" in fields else None

    def cancelled(self, members: Sequence[str], strategy: str) -> StreamEvent:
        """Return an event that ends the response with the text so far and a usage of 0."""
        rest = "".join(each.text for each in self._rounds)[len(self._text) :]
        usage = {name: dict.fromkeys(members, 0) for name in Usage.model_fields}
        end = {"finish_reason": "cancelled", "strategy": strategy, "usage": usage}
        known = {"logprob": total_logprob(self._rounds)}
        return self._event({"text": rest, "reply_prefix": self._prefix, **end, **known})

    def _event(self, fields: Mapping[str, Any]) -> StreamEvent:
        self._text, self._prefix = self._text + fields["text"], fields["reply_prefix"]
        self.is_whole = "finish_reason" in fields
        everything = {**fields, "text": self._text, "rounds": self._rounds}
        generation = Generation.model_validate(everything) if self.is_whole else None
        new, self._new = self._new, None
        return StreamEvent(
            text=fields["text"], round=new, generation=generation, reply_prefix=self._prefix
        )


def error_fields(error: AdaFuseError) -> dict[str, str]:
    """Return an error as JSON: the name of its class and, if a member failed, the member's name."""
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in KINDS)
    return {"error": kind, **({"member": error.member} if isinstance(error, MemberError) else {})}


def read_error(fields: Mapping[str, Any], message: str) -> AdaFuseError:
    """Return the error that the server has sent, with its message.

    Raises:
        LookupError: `fields` lack the name of a class of errors, or of the member that failed.
    """
    kind = KINDS[fields["error"]]
    if issubclass(kind, MemberError):
        member = fields["member"]
        return kind(member, message.removeprefix(f"member {member!r} failed: "))
    return kind(message.replace(f"field '{EXTENSION}.", "option '").removeprefix(f"{EXTENSION}."))
