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

from tests.reference import (
    UNFINISHED,
    Opening,
    ReferenceCandidate,
    ReferenceMember,
    begin,
    cap,
    commit,
)

NEGLIGIBLE = -25.0
"""Natural log of a probability that never wins."""


@dataclass
class Offer:
    """A text that somebody may go on with, and what each member makes of it.

    `firsts` are the texts of the members' likeliest tokens.
    """

    text: str
    ends: bool
    firsts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    proposers: list[str] = field(default_factory=list)
    probability: dict[str, float] = field(default_factory=dict)
    average: float = 0.0


def offers(
    member: ReferenceMember, ids: Sequence[int], count: int, opening: Opening
) -> list[tuple[list[int], str, bool]]:
    """The likeliest tokens, each up to the end of a character."""
    found: list[tuple[list[int], str, bool]] = []
    held = member.name in opening.held
    ahead, lacking = (" " * opening.spaces, 0) if held else ("", opening.spaces)
    for token in member.likeliest(ids, count, member.owing(ids, lacking)):
        if token in member.end_ids:
            found.append(([], ahead, True))
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
        found.append((path, ahead + member.text(ids, path), False))
    return found


def union(  # noqa: C901
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    count: int,
    opening: Opening,
    *,
    whole: bool,
) -> list[Offer]:
    """What any member offers, with every member's probability of it; where `whole`, also the texts
    of all other tokens, and a text of several tokens has no probability.
    """
    found: dict[tuple[str, bool], Offer] = {}
    firsts: dict[str, str] = {}
    for member in members:
        own = offers(member, ids[member.name], count, opening)
        firsts[member.name] = own[0][1]
        for path, text, ends in own:
            key = (text.lstrip() if opening.free else text, ends)
            offer = found.setdefault(key, Offer(text, ends, firsts))
            if member.name not in offer.tokens:
                offer.tokens[member.name] = path
                offer.proposers.append(member.name)
    for member in members if whole else ():
        before = ids[member.name]
        held = member.name in opening.held
        ahead, lacking = (" " * opening.spaces, 0) if held else ("", opening.spaces)
        for token in np.flatnonzero(member.logprobs(before) > NEGLIGIBLE):
            text = member.text(before, [int(token)])
            if lacking and token not in member.continuing(before, lacking):
                continue
            if token not in member.end_ids and not text.endswith(UNFINISHED):
                key = ((ahead + text).lstrip() if opening.free else ahead + text, False)
                found.setdefault(key, Offer(ahead + text, False, firsts))
        if not opening.spaces:
            found.setdefault(("", True), Offer("", True, firsts))
    for offer in found.values():
        for member in members:
            before = ids[member.name]
            chances = np.exp(member.logprobs(before))
            if offer.ends:
                offer.probability[member.name] = sum(chances[end] for end in member.end_ids)
                continue
            exact = True
            if member.name not in offer.tokens:
                text = opening.form(member, offer.text, firsts[member.name])
                tokens, exact = member.codec.encode_continuation(list(before), text)
                if not member.fits(len(before) + len(tokens)):
                    offer.probability[member.name] = 0.0
                    continue
                offer.tokens[member.name] = list(tokens)
            path = offer.tokens[member.name]
            told = exact and path and not (whole and len(path) > 1 and not _own(member, offer))
            offer.probability[member.name] = float(chances[path[0]]) if told else 0.0
    return list(found.values())


def _alike(one: str, other: str, opening: Opening) -> bool:
    return one.lstrip() == other.lstrip() if opening.free else one == other


def _own(member: ReferenceMember, offer: Offer) -> bool:
    return member.name in offer.proposers


Members = Sequence[ReferenceMember]
Choose = Callable[[Members, Mapping[str, list[int]], Sequence[float], Opening], Offer]


def unite(top_k: int = 10) -> Choose:
    """The union of the likeliest tokens, normalised and averaged."""

    def choose(
        members: Members, ids: Mapping[str, list[int]], weights: Sequence[float], opening: Opening
    ) -> Offer:
        found = union(members, ids, top_k, opening, whole=False)
        for member, weight in zip(members, weights, strict=True):
            total = sum(offer.probability[member.name] for offer in found)
            for offer in found:
                offer.average += weight * offer.probability[member.name] / total / sum(weights)
        return max(found, key=lambda offer: offer.average)

    return choose


def gac(threshold: float = math.inf) -> Choose:
    """The average over all tokens of all vocabularies; the first member is the gate."""

    def choose(
        members: Members, ids: Mapping[str, list[int]], weights: Sequence[float], opening: Opening
    ) -> Offer:
        gate = members[0]
        own = ids[gate.name]
        chances = np.exp(gate.logprobs(own))
        lacking = 0 if gate.name in opening.held else opening.spaces
        allowed = gate.continuing(own, lacking) if lacking else range(len(chances))
        highest = float(max(chances[list(allowed)]))
        if highest / sum(chances[list(allowed)]) > threshold and not opening.free:
            ((path, text, ends),) = offers(gate, own, 1, opening)
            firsts = dict.fromkeys(ids, text)
            offer = Offer(text, ends, firsts, {gate.name: path}, [gate.name], {}, highest)
            for member in () if ends else members[1:]:
                form = opening.form(member, text, text)
                tokens, _ = member.codec.encode_continuation(list(ids[member.name]), form)
                if member.fits(len(ids[member.name]) + len(tokens)):
                    offer.tokens[member.name] = list(tokens)
            return offer
        found = union(members, ids, 10, opening, whole=True)
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
        members: Members, ids: Mapping[str, list[int]], weights: Sequence[float], opening: Opening
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
        lacking = 0 if main.name in opening.held else opening.spaces
        token = main.greedy(before, main.owing(before, lacking))
        moved = main.logits(before).copy()
        if token not in main.end_ids:
            moved = descend(moved, spaces[0], target, steps, rate)
            allowed = main.continuing(before, lacking) if lacking else range(len(moved))
            token = max(allowed, key=lambda token: moved[token])
        average = float(np.exp(moved - moved.max())[token] / np.exp(moved - moved.max()).sum())
        if token in main.end_ids:
            ahead = " " * opening.spaces
            return Offer(ahead, True, {main.name: ahead}, {}, [main.name], {}, average)
        path = [token]
        while len(path) < 4 and main.text(before, path).endswith(UNFINISHED):
            path.append(main.greedy([*before, *path]))
        text = main.text(before, path)
        if main.name in opening.held:
            text = " " * opening.spaces + text
        firsts = {main.name: text}
        offer = Offer(text, False, firsts, {main.name: path}, [main.name], {}, average)
        for member in members[1:]:
            listed = offers(member, ids[member.name], 10, opening)
            firsts[member.name] = listed[0][1]
            own = [
                path for path, said, stops in listed if not stops and _alike(said, text, opening)
            ]
            natural = opening.form(member, text, firsts[member.name])
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
    """The response to a prompt or a conversation."""
    opening, ids = begin(members, prompt, messages)
    completion = dict.fromkeys(ids, 0)
    response, rounds = "", []
    while True:
        offer = choose(members, ids, weights or [1.0] * len(members), opening)
        placed = [m for m in members if offer.ends or m.name in offer.tokens]
        tokens = {m.name: offer.tokens.get(m.name, []) for m in placed}
        winner = ReferenceCandidate(
            offer.text, opening.shown(offer.text), offer.ends, offer.proposers, tokens, set()
        )
        if not winner.proposers:
            winner.proposers.append(placed[0].name)
        room = {name: max_new_tokens - count for name, count in completion.items()}
        kept = cap(placed, ids, winner, opening, offer.firsts, room)
        for member in placed:
            completion[member.name] += opening.counted(
                member, ids[member.name], kept.tokens[member.name]
            )
        overflow = not commit(placed, ids, kept) or len(placed) < len(members)
        text = opening.shown(kept.written)
        opening = opening.after(kept.written)
        response += text
        rounds.append((text, offer.average))
        full = overflow or any(member.is_full(len(ids[member.name])) for member in members)
        if kept.ends:
            return Decoded(response, "stop", rounds, completion)
        if kept is not winner or full or max(completion.values()) >= max_new_tokens:
            return Decoded(response, "length", rounds, completion)
