"""A second transcription of the decoding algorithm, for comparison with the engine.

Written from the specification alone. No cache, no tree, no batching: every number comes from a
plain forward pass over a member's whole token sequence, every text from decoding whole
sequences. Slow on purpose; what it says is what the engine has to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

UNFINISHED = "\ufffd"
EXTRA_TOKENS = 3


@dataclass(frozen=True)
class Options:
    """The options of the algorithm, with their default values."""

    margin_threshold: float = 0.7
    max_words: int = 3
    branching_factor: int = 3
    max_word_tokens: int = 16
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None


@dataclass
class ReferenceMember:
    """One model with its tokenizer. `codec` only encodes; texts are decoded here."""

    name: str
    model: Any
    tokenizer: Any
    codec: Any
    end_ids: frozenset[int]
    window: int | None = None
    passes: int = 0
    _rows: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)
    _texts: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False)
    _continuing: dict[tuple[tuple[int, ...], int], list[int]] = field(
        default_factory=dict, repr=False
    )
    _can_write: dict[tuple[tuple[int, ...], int], bool] = field(default_factory=dict, repr=False)

    def forward(self, ids: Sequence[int]) -> Any:
        """Logits after every token of `ids`, [tokens, vocabulary]."""
        self.passes += 1
        with torch.no_grad():
            output = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return output.logits[0].numpy()

    def logits(self, ids: Sequence[int]) -> Any:
        """Logits of the token after `ids`, [vocabulary]."""
        key = tuple(ids)
        if key not in self._rows:
            self._rows[key] = self.forward(key)[-1]
        return self._rows[key]

    def logprobs(self, ids: Sequence[int]) -> Any:
        """Log-probabilities in nats of the token after `ids`, [vocabulary]."""
        return log_softmax(self.logits(ids))

    def likeliest(self, ids: Sequence[int], count: int, spaces: int = 0) -> list[int]:
        """The `count` likeliest next tokens, ties to the lower id.

        If the prompt still lacks `spaces`, only tokens that continue them.
        """
        row = self.logits(ids)
        allowed = self.continuing(ids, spaces) if spaces > 0 else range(len(row))
        chosen = sorted(allowed, key=lambda token: (-row[token], token))
        return [int(token) for token in chosen[:count]]

    def greedy(self, ids: Sequence[int], spaces: int = 0) -> int:
        return self.likeliest(ids, 1, spaces)[0]

    def margin(self, ids: Sequence[int], spaces: int = 0) -> float:
        """Δ, equation 1, with probabilities of the tokens that may follow."""
        chances = np.exp(self.logprobs(ids))
        allowed = self.continuing(ids, spaces) if spaces > 0 else range(len(chances))
        first, *second = self.likeliest(ids, 2, spaces)
        margin = chances[first] - (chances[second[0]] if second else 0.0)
        return float(margin / chances[list(allowed)].sum())

    def continuing(self, ids: Sequence[int], spaces: int) -> list[int]:
        """The tokens that continue `spaces` spaces and do not lead into a dead end."""
        key = (tuple(ids), spaces)
        if key not in self._continuing:
            texts = {
                token: self.text(ids, [token])
                for token in range(self.model.config.vocab_size)
                if token not in self.end_ids
            }
            self._continuing[key] = [
                token
                for token, text in texts.items()
                if text.startswith(" " * spaces)
                or (
                    text
                    and set(text) == {" "}
                    and self.can_write([*ids, token], spaces - len(text))
                )
            ]
        return self._continuing[key]

    def can_write(self, ids: Sequence[int], spaces: int) -> bool:
        """Whether tokens exist that continue `spaces` spaces. Each space may need its own token."""
        key = (tuple(ids[-1:]), spaces)
        if spaces > 0 and key not in self._can_write:
            texts = [
                (token, self.text(ids, [token]))
                for token in range(self.model.config.vocab_size)
                if token not in self.end_ids
            ]
            self._can_write[key] = any(text.startswith(" " * spaces) for _, text in texts) or any(
                text and set(text) == {" "} and self.can_write([*ids, token], spaces - len(text))
                for token, text in texts
            )
        return spaces <= 0 or self._can_write[key]

    def decode(self, ids: Sequence[int]) -> str:
        key = tuple(ids)
        if key not in self._texts:
            self._texts[key] = self.tokenizer.decode(
                list(key), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return self._texts[key]

    def text(self, before: Sequence[int], new: Sequence[int]) -> str:
        """The text that `new` adds after `before`."""
        return gain(self.decode(before), self.decode([*before, *new]))

    def fits(self, tokens: int) -> bool:
        return self.window is None or tokens <= self.window

    def is_full(self, tokens: int) -> bool:
        return self.window is not None and tokens >= self.window


def log_softmax(row: Any) -> Any:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def gain(before: str, after: str) -> str:
    """`after` without what it shares with `before` at the start."""
    at = 0
    while at < min(len(before), len(after)) and before[at] == after[at]:
        at += 1
    return after[at:]


def has_ink(text: str) -> bool:
    return any(not character.isspace() for character in text)


def leading_whitespace(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def finish_word(
    member: ReferenceMember, ids: Sequence[int], first: int, options: Options, spaces: int = 0
) -> list[int]:
    """The word after `ids` that begins with the token `first`; the rest is greedy.

    The prompt still lacks `spaces` after `ids`.
    """
    word = [first]
    while True:
        text = member.text(ids, word)
        unfinished = text.endswith(UNFINISHED)
        if has_ink(text) and text[-1].isspace():  # rule 2
            return word
        longest = options.max_word_tokens + (EXTRA_TOKENS if unfinished else 0)
        if len(word) >= longest:  # rule 3
            return word
        if member.is_full(len(ids) + len(word)):
            return word
        following = member.greedy([*ids, *word], spaces - len(text))
        if following in member.end_ids:  # rule 4
            return word
        longer = member.text(ids, [*word, following])
        completes_character = unfinished and not longer.startswith(text)
        if has_ink(text) and not completes_character:  # rule 1
            extension = gain(text, longer)
            if extension and extension[0].isspace():
                return word
        word.append(following)


@dataclass(frozen=True)
class Opening:
    """What the first text of a response must regard.

    `spaces` are those at the end of the prompt that are not written yet. The members in `held`
    cannot write them, so their prompts hold them already. Whitespace at the start of a reply to
    messages is `free`: each member writes its own, and none of it is shown.
    """

    spaces: int = 0
    free: bool = False
    held: frozenset[str] = frozenset()

    def shown(self, text: str) -> str:
        return text.lstrip() if self.free else text[self.spaces :]

    def after(self, text: str) -> Opening:
        spaces = max(0, self.spaces - len(text))
        return Opening(spaces, self.free and not has_ink(text), self.held)

    def form(self, member: ReferenceMember, text: str, first: str) -> str:
        """The text as a member writes it, whose own likeliest span is `first`."""
        if self.free and has_ink(first):
            return leading_whitespace(first) + text.lstrip()
        return text[self.spaces :] if member.name in self.held else text

    def counted(self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]) -> int:
        """The number of tokens that hold more than spaces of the prompt."""
        if member.name in self.held:
            return len(tokens)
        ends = range(1, len(tokens) + 1)
        return sum(len(member.text(ids, tokens[:end])) > self.spaces for end in ends)


@dataclass(frozen=True)
class Proposal:
    tokens: tuple[int, ...]
    text: str
    stops: bool


def propose(
    member: ReferenceMember, ids: Sequence[int], options: Options, opening: Opening
) -> tuple[list[Proposal], list[float]]:
    """The spans that a member proposes, in branch order, and the margins it saw."""
    span: list[int] = []
    margins: list[float] = []
    held = member.name in opening.held
    ahead = " " * opening.spaces if held else ""
    lacking = 0 if held else opening.spaces

    def proposal(tokens: Sequence[int], *, stops: bool) -> Proposal:
        return Proposal(tuple(tokens), ahead + member.text(ids, tokens), stops)

    for _ in range(options.max_words):
        here = [*ids, *span]
        if member.is_full(len(here)):
            break
        left = lacking - len(member.text(ids, span))
        margins.append(member.margin(here, left))
        if margins[-1] >= options.margin_threshold:
            token = member.greedy(here, left)
            if token in member.end_ids:
                return [proposal(span, stops=True)], margins
            span += finish_word(member, here, token, options, left)
        else:
            branches = []
            for token in member.likeliest(here, options.branching_factor, left):
                if token in member.end_ids:
                    branches.append(proposal(span, stops=True))
                else:
                    word = finish_word(member, here, token, options, left)
                    branches.append(proposal([*span, *word], stops=False))
            return branches, margins
    return [proposal(span, stops=False)], margins


@dataclass
class ReferenceCandidate:
    """`written` is what members commit, `text` what of it belongs to the response."""

    written: str
    text: str
    stops: bool
    proposers: list[str]
    tokens: dict[str, list[int]]
    unscorable: set[str]
    nll: dict[str, float] = field(default_factory=dict)
    score: float | None = None


@dataclass
class ReferenceRound:
    candidates: list[ReferenceCandidate]
    winner: int
    text: str
    margins: dict[str, list[float]]


@dataclass
class ReferenceGeneration:
    text: str
    finish_reason: str
    rounds: list[ReferenceRound]
    prompt_tokens: dict[str, int]
    completion_tokens: dict[str, int]


def pool(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    proposals: Mapping[str, Sequence[Proposal]],
    opening: Opening,
) -> list[ReferenceCandidate]:
    """The union of the proposals, with every member's tokens for every candidate."""
    found: dict[tuple[str, bool], ReferenceCandidate] = {}
    for member in members:
        for proposal in proposals[member.name]:
            compared = proposal.text.lstrip() if opening.free else proposal.text
            candidate = found.setdefault(
                (compared, proposal.stops),
                ReferenceCandidate(
                    proposal.text, opening.shown(proposal.text), proposal.stops, [], {}, set()
                ),
            )
            if member.name not in candidate.tokens:
                candidate.proposers.append(member.name)
                candidate.tokens[member.name] = list(proposal.tokens)
    for candidate in found.values():
        for member in members:
            if member.name in candidate.tokens:
                continue
            text = opening.form(member, candidate.written, proposals[member.name][0].text)
            tokens, exact = member.codec.encode_continuation(list(ids[member.name]), text)
            candidate.tokens[member.name] = list(tokens)
            if not exact or not member.fits(len(ids[member.name]) + len(tokens)):
                candidate.unscorable.add(member.name)
    return list(found.values())


def mean_nll(
    member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int], *, stops: bool
) -> float:
    """Mean negative log-likelihood of a span, in nats per term (equation 5)."""
    prefixes = [(*ids, *tokens[:at]) for at in range(len(tokens) + stops)]
    if any(prefix not in member._rows for prefix in prefixes):
        rows = member.forward([*ids, *tokens])
        for prefix in prefixes:
            member._rows.setdefault(prefix, rows[len(prefix) - 1])
    terms = [
        -float(member.logprobs(prefix)[token])
        for prefix, token in zip(prefixes, tokens, strict=False)
    ]
    if stops:
        chance = sum(math.exp(member.logprobs(prefixes[-1])[end]) for end in member.end_ids)
        terms.append(-math.log(chance) if chance > 0 else math.inf)
    return sum(terms) / len(terms) if terms else math.nan


def score(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    candidates: Sequence[ReferenceCandidate],
    weights: Sequence[float],
) -> None:
    """Fill in the candidates' scores (equation 6)."""
    for candidate in candidates:
        total = share = 0.0
        for member, weight in zip(members, weights, strict=True):
            if member.name in candidate.unscorable:
                continue
            nll = mean_nll(
                member, ids[member.name], candidate.tokens[member.name], stops=candidate.stops
            )
            if math.isfinite(nll):
                candidate.nll[member.name] = nll
                total += weight * nll
                share += weight
        candidate.score = total / share if share > 0 else None


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def commit(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, list[int]],
    winner: ReferenceCandidate,
) -> bool:
    """Append every member's tokens for the winner; False if they did not fit one of them."""
    fitted = True
    for member in members:
        tokens = winner.tokens[member.name]
        if member.fits(len(ids[member.name]) + len(tokens)):
            ids[member.name].extend(tokens)
        else:
            fitted = False
    return fitted


def cap(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    winner: ReferenceCandidate,
    opening: Opening,
    firsts: Mapping[str, str],
    room: Mapping[str, int],
) -> ReferenceCandidate:
    """The winner, or the longest prefix of it that takes no member beyond its `room`."""

    def within(tokens: Mapping[str, Sequence[int]]) -> bool:
        return all(
            not member.fits(len(ids[member.name]) + len(tokens[member.name]))
            or opening.counted(member, ids[member.name], tokens[member.name]) <= room[member.name]
            for member in members
        )

    if within(winner.tokens):
        return winner
    (proposer,) = [member for member in members if member.name == winner.proposers[0]]
    own = winner.tokens[proposer.name]
    for size in range(len(own) - 1, -1, -1):
        text = proposer.text(ids[proposer.name], own[:size])
        if proposer.name in opening.held:
            text = " " * opening.spaces + text
        if size and not winner.written.startswith(text):  # it ends inside a character
            continue
        tokens = {
            member.name: member.codec.encode_continuation(
                list(ids[member.name]), opening.form(member, text, firsts[member.name])
            )[0]
            if size
            else []
            for member in members
        }
        tokens[proposer.name] = own[:size]
        if within(tokens):
            return ReferenceCandidate(
                text if size else "", opening.shown(text), False, winner.proposers, tokens, set()
            )
    raise AssertionError("a prefix without tokens is always within the room")


def decode(
    members: Sequence[ReferenceMember],
    prompt: str | None,
    options: Options,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> ReferenceGeneration:
    """The whole response to a prompt or a conversation."""
    opening, ids = begin(members, prompt, messages)
    prompt_tokens = {name: len(tokens) for name, tokens in ids.items()}
    completion = dict.fromkeys(ids, 0)
    weights = options.weights or [1.0] * len(members)
    response = ""
    rounds: list[ReferenceRound] = []
    while True:
        proposals: dict[str, list[Proposal]] = {}
        margins: dict[str, list[float]] = {}
        for member in members:
            proposals[member.name], margins[member.name] = propose(
                member, ids[member.name], options, opening
            )
        candidates = pool(members, ids, proposals, opening)
        score(members, ids, candidates, weights)
        scores = [math.inf if c.score is None else c.score for c in candidates]
        best = scores.index(min(scores))
        winner = candidates[best]
        if winner.score is None:
            raise RuntimeError("no member can score any candidate")

        firsts = {name: own[0].text for name, own in proposals.items()}
        room = {name: options.max_new_tokens - count for name, count in completion.items()}
        kept = cap(members, ids, winner, opening, firsts, room)
        for member in members:
            before, tokens = ids[member.name], kept.tokens[member.name]
            if member.fits(len(before) + len(tokens)):
                new = opening.counted(member, before, tokens)
                completion[member.name] += new
                prompt_tokens[member.name] += len(tokens) - new
        overflow = not commit(members, ids, kept)
        text = opening.shown(kept.written)
        opening = opening.after(kept.written)
        response += text
        rounds.append(ReferenceRound(candidates, best, text, margins))

        cut = first_stop(response, options.stop)
        longest = max(completion.values())
        full = overflow or any(member.is_full(len(ids[member.name])) for member in members)
        finish = (
            "stop_sequence"
            if cut is not None
            else "stop"
            if kept.stops
            else "length"
            if kept is not winner or longest >= options.max_new_tokens or full
            else None
        )
        if finish is not None:
            return ReferenceGeneration(response[:cut], finish, rounds, prompt_tokens, completion)


def begin(
    members: Sequence[ReferenceMember],
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
) -> tuple[Opening, dict[str, list[int]]]:
    """The opening of a response, and every member's tokens before it."""
    if prompt is None:
        return Opening(free=True), {
            m.name: list(m.codec.encode_messages(messages)) for m in members
        }
    start = prompt.rstrip(" ")
    spaces = len(prompt) - len(start)
    ids = {member.name: list(member.codec.encode_prompt(start)) for member in members}
    held = {member.name for member in members if not member.can_write(ids[member.name], spaces)}
    ids |= {m.name: list(m.codec.encode_prompt(prompt)) for m in members if m.name in held}
    return Opening(spaces, held=frozenset(held)), ids
