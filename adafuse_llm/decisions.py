"""Typed questions about a state, which an ensemble answers with probabilities.

Members read the state once, and then every question, which labels its options with letters (or
numbers). An option is as likely as its label after ``Answer:``, with or without a space between::

    Stripe fails whenever I connect my account.

    Which team should handle it?
    A. billing: payments, invoices
    B. technical: bugs

    Answer with the letter only.

Members favor some labels and positions, whichever option is there. So they read the options in
several orders, and their log-probabilities are averaged. The options of a `Choice` are sorted
first, so the order in which the caller lists them changes no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from threading import Event
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from adafuse_llm.calibration import DecisionCalibration
from adafuse_llm.errors import DecodingError, InvalidInputError, InvalidOptionError, short_repr
from adafuse_llm.request import Request
from adafuse_llm.results import Answer, Decision, Scores, total_usage
from adafuse_llm.text.conversation import Conversation, check_conversation, plain_json, to_json

if TYPE_CHECKING:
    from adafuse_llm.config import AdaFuseConfig
    from adafuse_llm.interface import Engine

MAX_QUESTIONS, MAX_OPTIONS = 400, 255
ALL_ORDERS = 4  # up to this number of options, members read all cyclic orders; of more, only two
MIN_MASS = 0.1  # if all labels together have less probability, the answer has a warning
NOT_FITTED = ("use", "weights", "orders")  # calls with one of these ignore the calibration
LARGEST = "largest"  # the rule by which the member with the most parameters answers
IMAGES = ("image", "image_url", "input_image")


class DecideOptions(TypedDict, total=False):
    """Types of the keyword arguments of `Engine.decide`."""

    orders: int | None
    use: str | Sequence[str] | None
    weights: Mapping[str, float] | Sequence[float] | None
    decisions: DecisionCalibration | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    timeout: float | None
    cancel: Event | None


@dataclass(frozen=True)
class Question:
    """A question with 2 to 255 different options, in a list, or as the keys of descriptions."""

    question: str
    options: Mapping[str, str] | Sequence[str]

    def __post_init__(self) -> None:
        options = [*self.options] if isinstance(self.options, (Mapping, list, tuple)) else []
        if not all(isinstance(text, str) and text.strip() for text in (self.question, *options)):
            raise InvalidInputError(f"a question has an empty text, or none that is text: {self}")
        if not 2 <= len({*map(str.strip, options)}) == len(options) <= MAX_OPTIONS:
            raise InvalidInputError(
                f"a question needs a list or mapping of 2 to {MAX_OPTIONS} different options; got "
                f"{len(options)}: {short_repr(self.options)}"
            )

    def orders(self, most: int | None) -> list[list[str]]:
        """Return the orders in which members read the options, at most `most`. None: no limit."""
        first = sorted(self.options) if isinstance(self, Choice) else [*self.options]
        if len(first) > ALL_ORDERS:
            return [first, first[::-1]][:most]
        return [first[start:] + first[:start] for start in range(len(first))][:most]

    def prompt(self, state: str, order: Sequence[str]) -> str:
        """Return the prompt: the state, the question, and the options in the order `order`."""
        about = self.options if isinstance(self.options, Mapping) else {}
        lines = [self.question]
        for label, option in zip(_labels(len(order)), order, strict=True):
            lines.append(f"{label}. {option}" + (f": {about[option]}" if about.get(option) else ""))
        kind = "letter" if lines[1].startswith("A.") else "number"
        return "\n".join([state, "", *lines, "", f"Answer with the {kind} only."])


class Predicate(Question):
    """A question whose answer is yes or no. `yes` and `no` can describe these answers."""

    def __init__(self, question: str, yes: str = "", no: str = "") -> None:
        super().__init__(question, {"yes": yes, "no": no})


class Choice(Question):
    """A question whose answer is one of 2 to 255 options. Their order does not matter."""


class Score(Question):
    """A question whose answer is one of 2 to 255 levels, listed from the lowest to the highest."""


def ask(
    engine: Engine, states: Sequence[Any], questions: Mapping[str, Question], given: DecideOptions
) -> tuple[list[Request], Callable[[Sequence[Scores]], list[Decision]]]:
    """Check the input of `Engine.decide_batch`. Return its requests, and a function that turns
    their scores into decisions.

    Each request scores the labels of options. There is one per state, question and order.
    """
    asked = [*questions.values()] if isinstance(questions, Mapping) else []
    if not 1 <= len(asked) <= MAX_QUESTIONS or not all(isinstance(q, Question) for q in asked):
        raise InvalidInputError(
            f"questions must be a mapping of 1 to {MAX_QUESTIONS} names to Predicate, Choice or "
            f"Score; got {len(asked)}: {short_repr(questions)}"
        )
    if isinstance(states, (str, Mapping)):
        raise InvalidInputError(f"pass a list of states; got {short_repr(states)}")
    check_options(given)
    options: dict[str, Any] = {**given, "continue_final_message": True}
    most = options.pop("orders", None)
    if most is not None and (not isinstance(most, int) or most < 1):
        raise InvalidOptionError(f"orders must be a whole number above 0, or None; got {most!r}")
    asking = Request.of(options)
    config = engine.config.override(asking.options)
    is_fitted = all(given.get(name) is None for name in NOT_FITTED)
    rule, fit = _rule(engine, config, config.decisions if is_fitted else None)
    asking = replace(asking, options={**asking.options, "decisions": None})
    orders = {name: each.orders(most) for name, each in questions.items()}

    # write the prompts with the state first, so that members read it once
    requests = []
    for number, state in enumerate(states):
        what = f"state {number}" if len(states) > 1 else "the state"
        text = state_text(state, what)
        for name, order in ((each, order) for each in orders for order in orders[each]):
            prompt = {"role": "user", "content": questions[name].prompt(text, order)}
            messages = [prompt, {"role": "assistant", "content": "Answer:"}]
            texts = [form for label in _labels(len(order)) for form in (label, f" {label}")]
            place = f"{what} with question {name!r}"
            requests.append(replace(asking, name=place, messages=messages, texts=texts))

    def decisions(scores: Sequence[Scores]) -> list[Decision]:
        rest, decided = iter(scores), []
        for _ in states:
            read = {name: [(order, next(rest)) for order in own] for name, own in orders.items()}
            answers = {name: _answer(own, rule, fit) for name, own in read.items()}
            used = [each for own in read.values() for _, each in own]
            usage = total_usage(used, len(used))
            decided.append(Decision(answers=answers, usage=usage, strategy=rule))
        return decided

    return requests, decisions


def check_options(names: Iterable[str]) -> None:
    """Raise an InvalidOptionError if a name is none of `DecideOptions`."""
    known = DecideOptions.__annotations__
    if unknown := [name for name in names if name not in known]:
        raise InvalidOptionError(f"decide has no option {unknown[0]!r}; it has {', '.join(known)}")


def _rule(
    engine: Engine, config: AdaFuseConfig, fit: DecisionCalibration | None
) -> tuple[str, DecisionCalibration]:
    """Return the rule's name, and its weights (`LARGEST`: parameter counts) as a calibration."""
    weights = config.member_weights(engine.members)
    if fit is not None:
        fit.check(weights)
        return "calibrated", fit
    if config.weights is not None:
        return "weights", DecisionCalibration(weights=weights)
    sizes = {info.name: float(info.parameters or 1) for info in engine.member_info}
    return LARGEST, DecisionCalibration(weights={name: sizes[name] for name in weights})


def state_text(state: Any, what: str) -> str:
    """Return a state as members read it: text as it is, messages in the plain format, or JSON.

    Raises:
        InvalidInputError: the state cannot be used. The message calls it `what`.
    """
    text, parts = state, state if isinstance(state, (Mapping, list, tuple)) else ()
    has_messages = any(isinstance(part, Mapping) and "role" in part for part in parts)
    if has_messages or isinstance(state, Conversation):
        text = replace(check_conversation(state), continues=True).plain_text()
    elif parts:
        text = json_text(state, what)
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(
            f"{what} must be text, messages, a list or a mapping, and not be empty; got "
            f"{short_repr(state)}"
        )
    return text


def json_text(data: Any, what: str) -> str:
    """Return data as JSON for members. Errors, such as one about an image, call it `what`."""
    text = to_json(plain_json(data, what))
    if any(f'"type": "{kind}"' in text for kind in IMAGES):
        raise InvalidInputError(f"{what} has an image; only text is allowed. Describe it.")
    return text


def _answer(
    read: Sequence[tuple[list[str], Scores]], rule: str, fit: DecisionCalibration
) -> Answer:
    # average over the orders to get the answer of each member
    options, weights = read[0][0], fit.weights
    means, mass, swayed, warnings = {}, {}, [], []
    for member in weights:
        rows = [label_logprobs(member, order, scores) for order, scores in read]
        if any(-math.inf in row.values() for row in rows):
            texts = (text for _, scores in read for text in scores.texts)
            why = next((t.missing[member] for t in texts if member in t.missing), "")
            warnings.append(f"member {member!r} takes no part: {why}")
            continue
        mass[member] = math.fsum(math.exp(p) for row in rows for p in row.values()) / len(rows)
        if len({max(options, key=row.__getitem__) for row in rows}) > 1:
            swayed.append(member)
        means[member] = {each: math.fsum(row[each] for row in rows) / len(rows) for each in options}
    # average over the members to get the answer of all
    least = max((weights[name] for name in means), default=0.0) if rule == LARGEST else 0.0
    shares = {name: weights[name] for name in means if weights[name] >= least and weights[name]}
    if not (total := math.fsum(shares.values())):
        raise DecodingError(f"no member can answer a question: {'; '.join(warnings)}")
    warnings += [
        f"member {name!r} gives all labels together only a probability of {mass[name]:.2g}"
        for name in shares
        if mass[name] < MIN_MASS
    ]
    fused = {}
    for each in options:
        mean = math.fsum(share * means[name][each] for name, share in shares.items()) / total
        fused[each] = mean / fit.temperature + fit.intercepts.get(each, 0.0)
    probabilities, is_sure = _normalized(fused), None
    if fit.threshold is not None:
        is_whole = all(name in shares for name, weight in weights.items() if weight)
        is_sure = is_whole and max(probabilities.values()) >= fit.threshold
    return Answer(
        probabilities=probabilities,
        members={member: _normalized(own) for member, own in means.items()},
        mass=mass,
        swayed=tuple(swayed),
        warnings=tuple(warnings),
        is_sure=is_sure,
    )


def _labels(size: int) -> list[str]:
    # use labels of equal length: none may be the beginning of another
    if size <= len(ascii_uppercase):
        return [*ascii_uppercase[:size]]
    first = 10 if size <= 90 else 100
    return [*map(str, range(first, first + size))]


def label_logprobs(member: str, order: Sequence[str], scores: Scores) -> dict[str, float]:
    """Return a member's log-probabilities of the labels, by option.

    The prompt had the options in the order `order`. A label that the member cannot write has the
    log-probability minus infinity.
    """
    likely = [
        math.exp(-text.nll[member] * text.tokens[member]) if member in text.nll else 0.0
        for text in scores.texts
    ]
    both = [bare + spaced for bare, spaced in zip(likely[::2], likely[1::2], strict=True)]
    return {
        option: math.log(probability) if probability else -math.inf
        for option, probability in zip(order, both, strict=True)
    }


def _normalized(logprobs: Mapping[str, float]) -> dict[str, float]:
    highest = max(logprobs.values())
    values = {option: math.exp(value - highest) for option, value in logprobs.items()}
    total = math.fsum(values.values())
    return {option: value / total for option, value in values.items()}
