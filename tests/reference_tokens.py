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

from tests.reference import UNFINISHED, ReferenceMember, has_ink, leading_whitespace

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
    found: list[tuple[list[int], str, bool]] = []
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


def _alike(one: str, other: str, at_start: bool) -> bool:
    return one.lstrip() == other.lstrip() if at_start else one == other


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


def seen_from(member: ReferenceMember, anchors: Sequence[int]) -> Any:
    """Every token as a distribution over anchors, [vocabulary, anchors]."""
    weight = member.model.get_input_embeddings().weight.detach().numpy()
    unit = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    cosines = unit @ unit[list(anchors)].T
    sharp = np.exp(100 * cosines / np.linalg.norm(cosines, axis=1, keepdims=True))
    return sharp / sharp.sum(1, keepdims=True)


def deepen(steps: int = 5, rate: float = 0.15) -> Choose:
    """Distributions averaged over anchors; the first member's is moved there by AdamW."""

    def choose(
        members: Members, ids: Mapping[str, list[int]], weights: Sequence[float], at_start: bool
    ) -> Offer:
        known = [
            {token.replace("\u0120", "\u2581"): i for token, i in m.tokenizer.get_vocab().items()}
            for m in members
        ]
        shared = sorted(set.intersection(*map(set, known)))
        spaces = [
            seen_from(m, [own[token] for token in shared])
            for m, own in zip(members, known, strict=True)
        ]
        chances = [np.exp(m.logprobs(ids[m.name])) for m in members]
        target = np.average(
            [p @ space for p, space in zip(chances, spaces, strict=True)], axis=0, weights=weights
        )
        main, before = members[0], ids[members[0].name]
        token = main.greedy(before)
        moved = main.logits(before).copy()
        if token not in main.end_ids:
            moved = descend(moved, spaces[0], target, steps, rate)
            token = int(np.argmax(moved))
        average = float(np.exp(moved - moved.max())[token] / np.exp(moved - moved.max()).sum())
        if token in main.end_ids:
            return Offer("", True, {}, [main.name], {}, average)
        path = [token]
        while len(path) < 4 and main.text(before, path).endswith(UNFINISHED):
            path.append(main.greedy([*before, *path]))
        text = main.text(before, path)
        offer = Offer(text, False, {main.name: path}, [main.name], {}, average)
        for member in members[1:]:
            listed = offers(member, ids[member.name], 10)
            own = [
                path for path, said, stops in listed if not stops and _alike(said, text, at_start)
            ]
            natural = text
            if at_start and has_ink(listed[0][1]):
                natural = leading_whitespace(listed[0][1]) + text.lstrip()
            tokens, _ = member.codec.encode_continuation(list(ids[member.name]), natural)
            offer.tokens[member.name] = own[0] if own else list(tokens)
        return offer

    return choose


def descend(logits: Any, space: Any, target: Any, steps: int, rate: float) -> Any:
    """Logits after steps of AdamW on the mean of target * log(target / relative)."""
    first = np.zeros_like(logits)
    second = np.zeros_like(logits)
    for step in range(1, steps + 1):
        now = rate / 4 + (rate - rate / 4) * (1 + math.cos(math.pi * (step - 1) / 10)) / 2
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        slope = space @ (-target / (chances @ space)) / len(target)
        gradient = chances * (slope - chances @ slope)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        logits = logits * (1 - now * 0.01) - now * first / (1 - 0.9**step) / scale
    return logits


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
