"""Typed questions in the form of OpenAI's ``/v1/decisions``, or of ``/v1/systemone``.

The second form has a map of questions, and no refusals. In both, the field ``adafuse`` of an answer
is the whole `Answer`, with the probabilities of each member.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.questions import as_text, options_of, to_answer, to_question
from adafuse_llm.decisions import MAX_QUESTIONS, Predicate, Question, Score, json_text, state_text
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError
from adafuse_llm.remote.wire import EXTENSION
from adafuse_llm.results import Answer, Decision
from adafuse_llm.serving import bodies, sse
from adafuse_llm.serving.bodies import Ignored, naming
from adafuse_llm.serving.errors import ApiError
from adafuse_llm.serving.responses import read_input, response_usage
from adafuse_llm.serving.service import Service


class _Body(bodies.Body):
    PROMPT: ClassVar[str] = "input"

    input: str | list[dict[str, Any]] | dict[str, Any]
    questions: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_QUESTIONS)


class _StateBody(bodies.Body):
    PROMPT: ClassVar[str] = "state"

    state: Any
    questions: dict[str, dict[str, Any]] = Field(min_length=1, max_length=MAX_QUESTIONS)


def read_questions(
    body: dict[str, Any], ignored: Ignored
) -> tuple[bodies.ServedRequest, str, dict[str, Question]]:
    """Read a request in either form. Return it, its state, and its questions by name or number."""
    is_map = isinstance(body.get("questions"), dict)
    kind: type[_Body | _StateBody] = _StateBody if is_map else _Body
    with naming(kind.PROMPT):
        json_text(body, "the request")  # refuses images
    parsed = bodies.parse(kind, body, ignored)
    if parsed.stream:
        raise bodies.refused("stream", ": answers have no text that grows")
    asked = bodies.ServedRequest(parsed, ignored, *bodies.read_options(parsed, ignored))
    with naming(kind.PROMPT):
        if isinstance(parsed, _StateBody):
            state, sent = parsed.state, parsed.questions
        else:
            state, sent = parsed.input, {str(n): each for n, each in enumerate(parsed.questions)}
            if isinstance(state, list):
                state = to_conversation(read_input(state, ignored), warn=ignored.warnings.append)
        state = state_text(state, kind.PROMPT)
    questions = {}
    for name, each in sent.items():
        with naming(f"questions.{name}"):
            questions[name] = to_question(each)
    return asked, state, questions


async def answer_questions(service: Service, request: Request) -> Response:
    """Answer the questions of a request."""
    read = await sse.read_object(request, read_questions, service.config)
    asked, _, questions = read
    try:
        decision = await sse.unless_disconnected(request.receive, _decided(service, *read))
    except (ApiError, AdaFuseError) as error:
        raise asked.error(error) from error
    extension = decision.model_dump(exclude={"answers"})
    if asked.ignored.warnings:
        extension["warnings"] = asked.ignored.warnings
    answers: Any = {
        name: {**to_answer(questions[name], answer), EXTENSION: answer.model_dump()}
        for name, answer in decision.items()
    }
    if isinstance(asked.body, _Body):
        answers = [*map(_listed, asked.body.questions, questions.values(), decision.values())]
    return JSONResponse(
        {
            "model": asked.body.model or service.config.served_model_name,
            "answers": answers,
            "usage": response_usage(decision.usage),
            EXTENSION: extension,
        }
    )


async def _decided(
    service: Service, asked: bodies.ServedRequest, state: str, questions: Mapping[str, Question]
) -> Decision:
    extension = asked.body.adafuse
    limits = (extension.timeout, service.config.request_timeout)
    limit = min(filter(None, limits), default=None)

    def check(cancel: threading.Event) -> tuple[AdaFuseEngine, dict[str, Any]]:
        engine, options = service.resolve(asked.body.model, extension.strategy, asked.options)
        longest = max(len(each.prompt("", [*each.options])) for each in questions.values())
        service.check_limits(engine, options, characters=len(state) + longest)
        return engine, {**options, "orders": extension.orders, "cancel": cancel}

    async with service.admitted(check, limit=limit) as (engine, given):
        return await engine.adecide(state, questions, timeout=limit, **given)


def _listed(sent: Mapping[str, Any], question: Question, answer: Answer) -> dict[str, Any]:
    """Return an answer in OpenAI's form. An answer that is not sure becomes a refusal."""
    fields: dict[str, Any] = {"name": sent.get("name"), EXTENSION: answer.model_dump()}
    if answer.is_sure is False:
        return {**fields, "type": "refusal"}
    if isinstance(question, Predicate):
        return {**fields, "type": "predicate", "probability": answer.probability}
    fields |= {"type": sent["type"], "confidence": answer.confidence}
    found = answer.probabilities
    if isinstance(question, Score):
        levels = [
            {"value": level, "label": name, "probability": found[name]}
            for level, name in enumerate(found)
        ]
        return {**fields, "score": answer.score, "probabilities": levels}
    values = {as_text(option): option for option, _ in options_of(sent)}
    options = [{"value": values[name], "probability": found[name]} for name in values]
    return {**fields, "choice": values[answer.choice], "probabilities": options}
