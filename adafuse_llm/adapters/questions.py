"""Convert typed questions of LangChain and of the server, and convert answers for LangChain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adafuse_llm.decisions import Choice, Predicate, Question, Score, json_text
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.results import Answer

PARTS = ("text", "input_text", "input_json")
"""Types of the parts of a text. A list with any other item is data, not text."""


def to_question(sent: Mapping[str, Any]) -> Question:
    """Convert a question with its ``type``, its ``instructions`` and its options (`options_of`).

    Raises:
        InvalidInputError: the question cannot be used.
    """
    kind, text, pairs = sent.get("type"), as_text(sent.get("instructions")), options_of(sent)
    about = {as_text(option): as_text(description) for option, description in pairs}
    if kind in ("noul", "predicate"):
        return Predicate(text, about.get("true", ""), about.get("false", ""))
    if kind not in ("choice", "score"):
        raise InvalidInputError(
            f"type must be predicate (or noul), choice or score; got {short_repr(kind)}"
        )
    names = [as_text(option) for option, _ in pairs]
    options = about if len(about) == len(names) else names  # the list has the equal options
    return Choice(text, options) if kind == "choice" else Score(text, options)


def options_of(sent: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the options of a question, each as a pair of its name and its description.

    They are in ``criteria``, a mapping or a list. In OpenAI's API, they are in ``choices`` or
    ``levels``, a list of mappings that have ``value`` or ``label``, and ``description``.
    """
    given: Any = sent.get("criteria") or sent.get("choices") or sent.get("levels")
    if isinstance(given, dict):
        return [*given.items()]
    pairs = []
    for option in given if isinstance(given, list) else []:
        fields = option if isinstance(option, dict) else {}
        name = fields.get("value", fields.get("label", option))
        pairs.append((name, fields.get("description")))
    return pairs


def to_answer(question: Question, answer: Answer) -> dict[str, Any]:
    """Return the answer to a question in LangChain's form."""
    if isinstance(question, Predicate):
        return {"type": "noul", "noul": answer.probability}
    fields = {"confidence": answer.confidence, "probabilities": answer.probabilities}
    if isinstance(question, Choice):
        return {**fields, "type": "choice", "choice": answer.choice}
    return {
        **fields,
        "type": "score",
        "score": answer.score,
        "legend": dict(enumerate(answer.probabilities)),
        "probabilities": dict(enumerate(answer.probabilities.values())),
    }


def as_text(value: Any) -> str:
    """Return text as it is, a list of text parts as one text, None as "", other data as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else []
    if parts and all(isinstance(part, dict) and part.get("type") in PARTS for part in parts):
        return "\n\n".join(as_text(part.get("text", part.get("data"))) for part in parts)
    return json_text(value, "a question")
