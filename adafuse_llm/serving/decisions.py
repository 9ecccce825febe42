"""Typed questions in the form of OpenAI's ``/v1/decisions``, or of ``/v1/systemone``.

The second form has a map of questions under other names, and no refusals. In both, the field
``adafuse`` of an answer is the whole `Answer`, with the probabilities of each member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from adafuse_llm import decisions
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.decisions import Choice, Predicate, Question, Score
from adafuse_llm.errors import AdaFuseError, InvalidInputError, short_repr
from adafuse_llm.remote.wire import EXTENSION
from adafuse_llm.results import Answer, Decision, Scores
from adafuse_llm.run import Run
from adafuse_llm.serving import bodies, sse
from adafuse_llm.serving.bodies import Ignored, Nested, naming
from adafuse_llm.serving.errors import ApiError, invalid
from adafuse_llm.serving.responses import read_input, response_usage
from adafuse_llm.serving.service import Service
from adafuse_llm.text.conversation import to_json

KINDS: Mapping[str, type[Question]] = {
    "predicate": Predicate,
    "noul": Predicate,
    "choice": Choice,
    "score": Score,
}

Opened = tuple[Run[Scores], Callable[[Sequence[Scores]], list[Decision]]]


class _Option(Nested):
    value: str | bool = Field(validation_alias=AliasChoices("value", "label"))
    description: str = ""


class _Question(Nested):
    type: str
    instructions: str | list[Any] | dict[str, Any]
    name: str | None = None
    options: list[_Option] = Field([], validation_alias=AliasChoices("choices", "levels"))
    criteria: dict[str, Any] | list[Any] | None = None


class _Body(bodies.Body):
    PROMPT: ClassVar[str] = "input"

    input: Any
    questions: list[_Question] = Field(min_length=1, max_length=decisions.MAX_QUESTIONS)


class _StateBody(_Body):
    PROMPT: ClassVar[str] = "state"


@dataclass
class AskedQuestions(bodies.ServedRequest):
    """A request with typed questions about a state. `is_map`: whether the questions are a map."""

    state: str = ""
    sent: Sequence[_Question] = ()
    questions: dict[str, Question] = field(default_factory=dict)
    is_map: bool = False


def read_questions(body: dict[str, Any], ignored: Ignored) -> AskedQuestions:
    """Read a request with typed questions, in either form."""
    kind, sent = _Body, body.get("questions")
    if isinstance(sent, dict):
        kind, named = _StateBody, []
        for name, each in sent.items():
            named.append({**each, "name": name} if isinstance(each, dict) else each)
        body = {**body, "input": body.get("state") or "", "state": None, "questions": named}
    text = to_json(body)
    if body.get("assets") or any(f'"type": "{image}"' in text for image in decisions.IMAGES):
        raise invalid("the request has an image; only text is allowed. Describe it.", kind.PROMPT)
    parsed = bodies.parse(kind, body, ignored)
    if parsed.stream:
        raise bodies.refused("stream", ": answers have no text that grows")
    state = parsed.input
    with naming(kind.PROMPT):
        if isinstance(state, list) and kind is _Body:
            turns = read_input(state, ignored)
            state = to_conversation(turns, warn=ignored.warnings.append)
        state = decisions.state_text(state, kind.PROMPT)
    asked = AskedQuestions(parsed, ignored, *bodies.read_options(parsed, ignored), state=state)
    asked.sent, asked.is_map = parsed.questions, kind is _StateBody
    for place, each in enumerate(asked.sent):
        with naming(f"questions.{place}"):
            asked.questions[str(place)] = _question(each)
    return asked


def _question(sent: _Question) -> Question:
    if (kind := KINDS.get(sent.type)) is None:
        raise InvalidInputError(
            f"type must be predicate (or noul), choice or score; got {short_repr(sent.type)}"
        )
    text, criteria = _text(sent.instructions), sent.criteria or {}
    described = criteria if isinstance(criteria, dict) else {}
    if kind is Predicate:
        return Predicate(text, *(_text(described.get(name) or "") for name in ("true", "false")))
    options = [(_text(option.value), option.description) for option in sent.options]
    options += [(_text(each), _text(described.get(each) or "")) for each in criteria]
    names = [name for name, _ in options]
    return kind(text, dict(options) if len({*names}) == len(names) else names)


def _text(value: Any) -> str:
    """Return a text as it is, parts of content joined, and other data as JSON."""
    parts = value if isinstance(value, list) else []
    if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
        return "\n\n".join(_text(part.get("text", part.get("data"))) for part in parts)
    return value if isinstance(value, str) else to_json(value)


async def answer_questions(service: Service, request: Request) -> Response:
    """Answer the questions of a request."""
    asked = await sse.read_object(request, read_questions, service.config)
    limits = (asked.body.adafuse.timeout, service.config.request_timeout)
    limit = min(filter(None, limits), default=None)
    try:
        opened = service.admitted(partial(_open, service, asked, limit), limit=limit)
        decision = await sse.unless_disconnected(request.receive, _decided(service, opened))
    except (ApiError, AdaFuseError) as error:
        raise asked.error(error) from error
    answered = zip(asked.sent, asked.questions.values(), decision.values(), strict=True)
    answers = [_written(*each, asked.is_map) for each in answered]
    extension: dict[str, Any] = {
        "usage": decision.usage.model_dump(),
        "strategy": decision.strategy,
    }
    if asked.ignored.warnings:
        extension["warnings"] = asked.ignored.warnings
    return JSONResponse(
        {
            "model": asked.body.model or service.config.served_model_name,
            "answers": {each.pop("name"): each for each in answers} if asked.is_map else answers,
            "usage": response_usage(decision.usage),
            EXTENSION: extension,
        }
    )


def _open(
    service: Service, asked: AskedQuestions, timeout: float | None, cancel: threading.Event
) -> Opened:
    """Check a request against the models and the limits of the server, and open it."""
    body = asked.body
    engine, options = service.resolve(body.model, body.adafuse.strategy, asked.options)
    longest = max(len(each.prompt("", [*each.options])) for each in asked.questions.values())
    service.check_limits(engine, options, characters=len(asked.state) + longest)
    orders = body.adafuse.orders
    given: Any = {**options, "orders": orders, "timeout": timeout, "cancel": cancel}
    requests, decide = decisions.ask(engine, [asked.state], asked.questions, given)
    return engine.open(requests), decide


async def _decided(service: Service, opened: AbstractAsyncContextManager[Opened]) -> Decision:
    async with opened as (run, decide):
        done = {index: scores async for index, scores in service.events(run)}
    return decide([done[index] for index in range(run.size)])[0]


def _written(sent: _Question, question: Question, answer: Answer, is_map: bool) -> dict[str, Any]:
    """Return an answer in one of the forms. One that is not sure is a refusal in the first."""
    fields: dict[str, Any] = {"name": sent.name, EXTENSION: answer.model_dump()}
    if answer.is_sure is False and not is_map:
        return {**fields, "type": "refusal"}
    if isinstance(question, Predicate):
        kind, key = ("noul", "noul") if is_map else ("predicate", "probability")
        return {**fields, "type": kind, key: answer.probability}
    fields |= {"type": sent.type, "confidence": answer.confidence}
    values: dict[str, Any] = {name: level for level, name in enumerate(question.options)}
    if is_score := isinstance(question, Score):
        fields["score"] = answer.score
    else:
        values = {name: name for name in values}
        values |= {_text(option.value): option.value for option in sent.options}
        fields["choice"] = values[answer.choice]
    chances = [(value, name, answer.probabilities[name]) for name, value in values.items()]
    if is_map:
        fields["probabilities"] = {str(value): chance for value, _, chance in chances}
        return fields | ({"legend": {str(v): name for v, name, _ in chances}} if is_score else {})
    named = [({"label": name} if is_score else {}) for _, name, _ in chances]
    fields["probabilities"] = [
        {"value": value, **label, "probability": chance}
        for (value, _, chance), label in zip(chances, named, strict=True)
    ]
    return fields
