"""A second transcription of the strategies that choose token by token, for comparison.

As `reference`: no cache, no tree, no batching, every number from a plain forward pass, and
distributions taken whole where the engine asks for as little as it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reference import UNFINISHED, ReferenceMember, has_ink, leading_whitespace

NEGLIGIBLE = -25.0
"""Natural log of a probability that never wins."""


@dataclass
class Offer:
    """A text that somebody may go on with, and what each member makes of it."""

    text: str
    stops: bool
    tokens: dict[str, list[int]] = field(default_factory=dict)
    proposers: list[str] = field(default_factory=list)
    probability: dict[str, float] = field(default_factory=dict)
    average: float = 0.0


def offers(
    member: ReferenceMember, ids: Sequence[int], count: int
) -> list[tuple[list[int], str, bool]]:
    """The likeliest tokens, each up to the end of a character."""
    found = []
    for token in member.likeliest(ids, count):
        if token in member.end_ids:
            found.append(([], "", True))
            continue
        path = [token]
        for _ in range(3):
            whole = not member.text(ids, path).endswith(UNFINISHED)
            if whole or member.is_full(len(ids) + len(path)):
                break
            following = member.greedy([*ids, *path])
            if following in member.end_ids:
                break
            path.append(following)
        found.append((path, member.text(ids, path), False))
    return found


def union(  # noqa: C901
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    count: int,
    *,
    at_start: bool,
    whole: bool,
) -> list[Offer]:
    """What any member offers, with every member's probability of it; where `whole`, also the texts
    of all other tokens, and a text of several tokens has no probability.
    """
    found: dict[tuple[str, bool], Offer] = {}
    leading: dict[str, str] = {}
    for member in members:
        own = offers(member, ids[member.name], count)
        if at_start and has_ink(own[0][1]):
            leading[member.name] = leading_whitespace(own[0][1])
        for path, text, stops in own:
            key = (text.lstrip() if at_start else text, stops)
            offer = found.setdefault(key, Offer(text, stops))
            if member.name not in offer.tokens:
                offer.tokens[member.name] = path
                offer.proposers.append(member.name)
    for member in members if whole else ():
        before = ids[member.name]
        for token in np.flatnonzero(member.logprobs(before) > NEGLIGIBLE):
            text = member.text(before, [int(token)])
            if token not in member.end_ids and not text.endswith(UNFINISHED):
                key = (text.lstrip() if at_start else text, False)
                found.setdefault(key, Offer(text, stops=False))
        found.setdefault(("", True), Offer("", stops=True))
    for offer in found.values():
        for member in members:
            before = ids[member.name]
            chances = np.exp(member.logprobs(before))
            if offer.stops:
                offer.probability[member.name] = sum(chances[end] for end in member.end_ids)
                continue
            exact = True
            if member.name not in offer.tokens:
                text = offer.text
                if member.name in leading:
                    text = leading[member.name] + text.lstrip()
                tokens, exact = member.codec.encode_continuation(list(before), text)
                if not member.fits(len(before) + len(tokens)):
                    offer.probability[member.name] = 0.0
                    continue
                offer.tokens[member.name] = list(tokens)
            path = offer.tokens[member.name]
            told = exact and path and not (whole and len(path) > 1 and not _own(member, offer))
            offer.probability[member.name] = float(chances[path[0]]) if told else 0.0
    return list(found.values())


def _own(member: ReferenceMember, offer: Offer) -> bool:
    return member.name in offer.proposers


Members = Sequence[ReferenceMember]
Choose = Callable[[Members, Mapping[str, list[int]], Sequence[float], bool], Offer]


def unite(top_k: int = 10) -> Choose:
    """The union of the likeliest tokens, normalised and averaged."""

    def choose(
        members: Members, ids: Mapping[str, list[int]], weights: Sequence[float], at_start: bool
    ) -> Offer:
        found = union(members, ids, top_k, at_start=at_start, whole=False)
        for member, weight in zip(members, weights, strict=True):
            total = sum(offer.probability[member.name] for offer in found)
            for offer in found:
                offer.average += weight * offer.probability[member.name] / total / sum(weights)
        return max(found, key=lambda offer: offer.average)

    return choose


def gac(threshold: float = math.inf) -> Choose:
    """The average over all tokens of all vocabularies; the first member is the gate."""

    def choose(
        members: Members, ids: Mapping[str, list[int]], weights: Sequence[float], at_start: bool
    ) -> Offer:
        gate = members[0]
        own = ids[gate.name]
        highest = math.exp(max(gate.logprobs(own)))
        if highest >= threshold and not at_start:
            ((path, text, stops),) = offers(gate, own, 1)
            offer = Offer(text, stops, {gate.name: path}, [gate.name], {}, highest)
            for member in () if stops else members[1:]:
                tokens, _ = member.codec.encode_continuation(list(ids[member.name]), text)
                if member.fits(len(ids[member.name]) + len(tokens)):
                    offer.tokens[member.name] = list(tokens)
            return offer
        found = union(members, ids, 10, at_start=at_start, whole=True)
        for offer in found:
            chances = [offer.probability[member.name] for member in members]
            offer.average = float(np.average(chances, weights=weights))
        return max(found, key=lambda offer: offer.average)

    return choose


@dataclass
class Decoded:
    """A response, and the text and average of every round."""

    text: str
    finish_reason: str
    rounds: list[tuple[str, float]]
    completion_tokens: dict[str, int]


def decode(
    members: Members,
    prompt: str | None,
    choose: Choose,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    max_new_tokens: int,
    weights: Sequence[float] | None = None,
) -> Decoded:
    """The response to a prompt that does not end in a space, or to a conversation."""
    ids: dict[str, list[int]] = {}
    for member in members:
        ids[member.name] = list(
            member.codec.encode_messages(messages)
            if prompt is None
            else member.codec.encode_prompt(prompt)
        )
    lengths = {name: len(tokens) for name, tokens in ids.items()}
    response, rounds = "", []
    droppable = prompt is None
    while True:
        offer = choose(members, ids, weights or [1.0] * len(members), not has_ink(response))
        overflow = False
        for member in members:
            if offer.stops:
                continue
            if member.name in offer.tokens:
                ids[member.name] += offer.tokens[member.name]
            else:
                overflow = True
        text = offer.text
        if droppable and not response and text.startswith(" "):
            text, droppable = text[1:], False
        response += text
        rounds.append((text, offer.average))
        new = {name: len(ids[name]) - lengths[name] for name in ids}
        full = overflow or any(member.is_full(len(ids[member.name])) for member in members)
        if offer.stops or full or max(new.values()) >= max_new_tokens:
            return Decoded(response, "stop" if offer.stops else "length", rounds, new)
