"""A second transcription of the decoding algorithm, for comparison with the engine.

Written from the specification alone. No cache, no tree, no batching: every number comes from a
plain forward pass over a member's whole token sequence, every text from decoding whole
sequences. Slow on purpose; what it says is what the engine has to say.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch

from tests.reference_adjustment import Process, processed, processors
from tests.reference_grammar import FORMS, Follower, Language, Lead, language
from tests.reference_sampling import codes, digest, draw, key

UNFINISHED = "\ufffd"
EXTRA_TOKENS = 3
UNSPACED_SCRIPTS = (
    *("CJK ", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI "),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "TAI ", "NEW TAI", "TANGUT", "NUSHU", "KHITAN"),
)


@dataclass(frozen=True)
class Options:
    """The options of the algorithm, with their default values."""

    margin_threshold: float = 0.7
    max_words: int = 3
    branching_factor: int | None = None
    max_word_tokens: int = 16
    max_word_letters: int = 4
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choices: tuple[str, ...] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    logit_bias: Mapping[str, float] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False

    def settled(self, members: int) -> Options:
        """These options with B and the limit as numbers: B is 1 for a member alone."""
        tokens = 256 if self.language is None else 2048
        return replace(
            self,
            branching_factor=self.branching_factor or (1 if members == 1 else 3),
            max_new_tokens=self.max_new_tokens or tokens,
        )

    @property
    def language(self) -> Language | None:
        """The texts that a response may be, or None where it may be any text."""
        form = {name: value for name in FORMS if (value := getattr(self, name)) is not None}
        return language(**form) if form else None


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
    _codes: list[int] = field(default_factory=list, repr=False)
    _word_ends: set[int] = field(default_factory=set, repr=False)
    _processors: list[Process] = field(default_factory=list, repr=False)

    def adjust(self, options: Options | None, prompt: int) -> None:
        """Change distributions as `options` say from now on; None to leave them as they are."""
        biases = None
        if options is not None and options.logit_bias is not None:
            before = self.codec.encode_prompt("\n")
            biases = {
                tuple(self.codec.encode_continuation(before, text)[0]): bias
                for text, bias in options.logit_bias.items()
            }
        config = getattr(self.model, "generation_config", None)
        self._processors = (
            []
            if options is None
            else processors(config, options, biases, prompt, sorted(self.end_ids))
        )

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return int(self.model.config.vocab_size)

    def forward(self, ids: Sequence[int]) -> Any:
        """Logits after every token of `ids`, [tokens, vocabulary]."""
        self.passes += 1
        with torch.no_grad():
            output = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return output.logits[0].numpy()

    def logits(self, ids: Sequence[int]) -> Any:
        """Logits of the token after `ids`, as the request changes them, [vocabulary]."""
        row = self.row(ids)
        return processed(self._processors, ids, row) if self._processors else row

    def row(self, ids: Sequence[int]) -> Any:
        """Logits of the token after `ids`, [vocabulary]."""
        key = tuple(ids)
        if key not in self._rows:
            self._rows[key] = self.forward(key)[-1]
        return self._rows[key]

    def logprobs(self, ids: Sequence[int]) -> Any:
        """Log-probabilities in nats of the token after `ids`, [vocabulary]."""
        return log_softmax(self.logits(ids))

    def likeliest(
        self, ids: Sequence[int], count: int, allowed: Sequence[int] | None = None
    ) -> list[int]:
        """The `count` likeliest next tokens, ties to the lower id; only `allowed` ones."""
        row = self.logits(ids)
        choice = np.arange(len(row)) if allowed is None else np.sort(np.asarray(allowed, int))
        order = np.argsort(-row[choice], kind="stable")
        return [int(token) for token in choice[order[:count]]]

    def greedy(self, ids: Sequence[int], allowed: Sequence[int] | None = None) -> int:
        return self.likeliest(ids, 1, allowed)[0]

    def margin(self, ids: Sequence[int], allowed: Sequence[int] | None = None) -> float:
        """Δ, equation 1, with probabilities of the tokens that may follow."""
        chances = np.exp(self.logprobs(ids) - self.mass(ids, allowed))
        first, *second = self.likeliest(ids, 2, allowed)
        return float(chances[first] - (chances[second[0]] if second else 0.0))

    def mass(self, ids: Sequence[int], allowed: Sequence[int] | None = None) -> float:
        """The logarithm of the probability of all tokens that may follow."""
        logprobs = self.logprobs(ids)
        return log_sum(logprobs if allowed is None else logprobs[list(allowed)])

    def word_ends(self) -> set[int]:
        """The tokens that begin with whitespace or end the response."""
        if not self._word_ends:
            before = self.tokenizer.encode("a", add_special_tokens=False)
            known = sorted(self.tokenizer.get_vocab().values())
            texts = self.tokenizer.batch_decode([[*before, token] for token in known])
            at = len(self.tokenizer.decode(before))
            pairs = zip(known, texts, strict=True)
            spaces = {token for token, text in pairs if text[at:][:1].isspace()}
            self._word_ends = spaces | self.end_ids
        return self._word_ends

    def word_end(self, ids: Sequence[int], allowed: Sequence[int] | None = None) -> float:
        """The logarithm of the probability that whitespace or the end follows."""
        follows = range(self.vocabulary) if allowed is None else allowed
        logprobs = self.logprobs(ids)
        return log_sum([logprobs[token] for token in follows if token in self.word_ends()])

    def owing(self, ids: Sequence[int], spaces: int) -> list[int] | None:
        """The tokens that may follow while the prompt lacks `spaces`; None for all of them."""
        return self.continuing(ids, spaces) if spaces > 0 else None

    def continuing(self, ids: Sequence[int], spaces: int) -> list[int]:
        """The tokens that continue `spaces` spaces and do not lead into a dead end."""
        key = (tuple(ids), spaces)
        if key not in self._continuing:
            texts = {token: self.text(ids, [token]) for token in self.spaced()}
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
            texts = [(token, self.text(ids, [token])) for token in self.spaced()]
            self._can_write[key] = any(text.startswith(" " * spaces) for _, text in texts) or any(
                text and set(text) == {" "} and self.can_write([*ids, token], spaces - len(text))
                for token, text in texts
            )
        return spaces <= 0 or self._can_write[key]

    def spaced(self) -> Sequence[int]:
        """All tokens that may begin with a space."""
        return [token for token in range(self.vocabulary) if token not in self.end_ids]

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

    def codes(self) -> list[int]:
        """A number for every token, from its text in the middle of a text."""
        if not self._codes:
            before = self.tokenizer.encode("a", add_special_tokens=False)
            known = set(self.tokenizer.get_vocab().values())
            size = self.vocabulary
            texts = [self.text(before, [token]) if token in known else "" for token in range(size)]
            self._codes = codes(texts, self.end_ids, size)
        return self._codes

    def fits(self, tokens: int) -> bool:
        return self.window is None or tokens <= self.window

    def is_full(self, tokens: int) -> bool:
        return self.window is not None and tokens >= self.window


def log_softmax(row: Any) -> Any:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def log_sum(logprobs: Any) -> float:
    """The logarithm of a sum of probabilities."""
    highest = max(logprobs, default=-math.inf)
    if highest == -math.inf:
        return -math.inf
    return float(highest + np.log(np.exp(np.asarray(logprobs) - highest).sum()))


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


def unspaced(text: str) -> int:
    """The number of letters of scripts that are written without spaces between words."""
    names = (unicodedata.name(char, "") for char in text if char.isalpha())
    return sum(name.startswith(UNSPACED_SCRIPTS) for name in names)


class Form:
    """What a grammar says about a response: its language, and what every member has written."""

    def __init__(
        self, language: Language, members: Sequence[ReferenceMember], opening: Opening
    ) -> None:
        self.language = language
        self._followers = {
            member.name: Follower(
                language,
                member,
                Lead(0 if member.name in opening.held else opening.spaces, free=opening.free),
            )
            for member in members
        }
        self._written = {member.name: b"" for member in members}

    def written(self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]) -> bytes:
        """All that a member has written after its prompt, with `tokens` after `ids` at the end."""
        return self._written[member.name] + self._followers[member.name].written(ids, tokens)

    def allowed(
        self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]
    ) -> tuple[list[int], bool]:
        """What may follow `tokens` after `ids`, and whether it is one alternative only."""
        return self._followers[member.name].allowed(self.written(member, ids, tokens))

    def is_whole(self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether `tokens` end at the end of a character."""
        try:
            self.written(member, ids, tokens).decode()
        except UnicodeDecodeError:
            return False
        return True

    def commit(self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]) -> None:
        self._written[member.name] = self.written(member, ids, tokens)


Allow = Callable[[Sequence[int]], "list[int] | None"]
"""The tokens that may follow some tokens of a span; None for all of them."""

Follow = Callable[[Sequence[int]], int]
"""The token that a member lets follow some tokens of a span: the likeliest one, or a drawn one."""


def allowance(
    member: ReferenceMember, ids: Sequence[int], opening: Opening, form: Form | None
) -> Allow:
    """What may follow the tokens of a span that begins after `ids`."""
    lacking = 0 if member.name in opening.held else opening.spaces

    def allow(tokens: Sequence[int]) -> list[int] | None:
        if form is not None:
            return form.allowed(member, ids, tokens)[0]
        return member.owing([*ids, *tokens], lacking - len(member.text(ids, tokens)))

    return allow


def finish_word(
    member: ReferenceMember, ids: Sequence[int], first: int, options: Options, follow: Follow
) -> list[int]:
    """The word after `ids` that begins with the token `first`."""
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
        following = follow(word)
        if following in member.end_ids:  # rule 4
            return word
        longer = member.text(ids, [*word, following])
        completes_character = unfinished and not longer.startswith(text)
        if has_ink(text) and not completes_character:  # rule 1
            extension = gain(text, longer)
            if extension and extension[0].isspace():
                return word
            letters = unspaced(text) + max(1, unspaced(extension))
            begins = extension[:1] == UNFINISHED or unspaced(extension[:1])
            if begins and not unfinished and letters > options.max_word_letters:  # rule 5
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

    def compared(self, text: str) -> str:
        """What tells candidates apart."""
        return text.lstrip() if self.free else text

    def written(self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of `tokens` after `ids`, with what the prompt of the member holds of it."""
        ahead = " " * self.spaces if member.name in self.held else ""
        return ahead + member.text(ids, tokens)

    def after(self, text: str) -> Opening:
        spaces = max(0, self.spaces - len(text))
        return Opening(spaces, self.free and not has_ink(text), self.held)

    def form(self, member: ReferenceMember, text: str, first: str) -> str:
        """The text as a member writes it, whose own likeliest span is `first`."""
        if self.free and has_ink(first) and has_ink(text):
            return leading_whitespace(first) + text.lstrip()
        return text[self.spaces :] if member.name in self.held else text

    def counted(self, member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int]) -> int:
        """The number of tokens that hold more than spaces of the prompt."""
        if member.name in self.held:
            return len(tokens)
        ends = range(1, len(tokens) + 1)
        return sum(len(member.text(ids, tokens[:end])) > self.spaces for end in ends)


class Drawing:
    """The tokens that members draw (temperature above 0), and where each member stands.

    Attributes:
        writers: what decides which member writes the next word. None if all propose; then they
            share their noise.
        after_word: whether a word has ended, so that the next token begins another one or ends the
            response.
    """

    def __init__(
        self, members: Sequence[ReferenceMember], options: Options, *, apart: bool = False
    ) -> None:
        assert options.seed is not None
        self.seed = options.seed
        self.writers = Random(f"members {self.seed}") if apart else None
        self.after_word = False
        self._seeds = {
            member.name: digest(f"member {number} {self.seed}") >> 1 if apart else self.seed
            for number, member in enumerate(members)
        }
        self._options = options
        self._response = ""
        self._seen = {member.name: [""] for member in members}

    def key(
        self,
        member: ReferenceMember,
        ids: Sequence[int],
        tokens: Sequence[int],
        opening: Opening,
    ) -> int:
        """The key of the place after `tokens`, of a span that begins after `ids`."""
        seen = self._texts(member, ids, tokens, opening)
        silent = 0
        while silent + 1 < len(seen) and seen[-2 - silent] == seen[-1]:
            silent += 1
        return key(self._seeds[member.name], silent, seen[-1])

    def _texts(
        self,
        member: ReferenceMember,
        ids: Sequence[int],
        tokens: Sequence[int],
        opening: Opening,
    ) -> list[str]:
        """The response as it was before and after each token of a member, without the bytes of
        a character that is not complete.
        """
        spans = [tokens[: size + 1] for size in range(len(tokens))]
        shown = [opening.shown(opening.written(member, ids, span)) for span in spans]
        return [
            *self._seen[member.name],
            *((self._response + text).rstrip(UNFINISHED) for text in shown),
        ]

    def token(
        self,
        member: ReferenceMember,
        ids: Sequence[int],
        tokens: Sequence[int],
        opening: Opening,
        allowed: Sequence[int] | None,
    ) -> int:
        """The token that a member draws after `tokens`."""
        row = member.logits([*ids, *tokens])
        return draw(
            {token: row[token] for token in (range(len(row)) if allowed is None else allowed)},
            self.key(member, ids, tokens, opening),
            member.codes(),
            temperature=self._options.temperature,
            top_k=self._options.top_k,
            top_p=self._options.top_p,
            min_p=self._options.min_p,
            ends=member.word_ends() if self.after_word and not tokens else (),
        )

    def commit(
        self,
        members: Sequence[ReferenceMember],
        ids: Mapping[str, Sequence[int]],
        winner: ReferenceCandidate,
        opening: Opening,
    ) -> None:
        """Add the winner to the response; `ids` are the members' tokens before it."""
        for member in members:
            own = winner.tokens[member.name]
            seen = self._texts(member, ids[member.name], own, opening)
            seen[-1] = (self._response + opening.shown(winner.written)).rstrip(UNFINISHED)
            self._seen[member.name] = seen
        self._response += opening.shown(winner.written)


@dataclass(frozen=True)
class Proposal:
    tokens: tuple[int, ...]
    text: str
    ends: bool


def propose(  # noqa: C901
    member: ReferenceMember,
    ids: Sequence[int],
    options: Options,
    opening: Opening,
    form: Form | None = None,
    drawing: Drawing | None = None,
) -> tuple[list[Proposal], list[float]]:
    """The spans that a member proposes, in branch order, and the margins it saw."""
    span: list[int] = []
    margins: list[float] = []
    allow = allowance(member, ids, opening, form)

    def follow(tokens: Sequence[int]) -> int:
        if drawing is not None:
            return drawing.token(member, ids, tokens, opening, allow(tokens))
        return member.greedy([*ids, *tokens], allow(tokens))

    def proposal(tokens: Sequence[int], *, ends: bool) -> Proposal:
        return Proposal(tuple(tokens), opening.written(member, ids, tokens), ends)

    for _ in range(options.max_words):
        here = [*ids, *span]
        if member.is_full(len(here)):
            break
        done = list(span)

        def after(word: Sequence[int], done: Sequence[int] = done) -> int:
            return follow([*done, *word])

        margins.append(member.margin(here, allow(span)))
        if margins[-1] >= options.margin_threshold:
            token = follow(span)
            if token in member.end_ids:
                return [proposal(span, ends=True)], margins
            span += finish_word(member, here, token, options, after)
        else:
            branches = []
            firsts = [follow(span)]
            if drawing is None:
                assert options.branching_factor is not None, "settled"
                firsts = member.likeliest(here, options.branching_factor, allow(span))
            for token in firsts:
                if token in member.end_ids:
                    branches.append(proposal(span, ends=True))
                else:
                    word = finish_word(member, here, token, options, after)
                    branches.append(proposal([*span, *word], ends=False))
            return branches, margins
    return [proposal(span, ends=False)], margins


@dataclass
class ReferenceCandidate:
    """`written` is what members commit, `text` what of it belongs to the response.

    `logprob` is its log-probability under the rule, and `sums` are the members' log-likelihoods.
    `fills`: whether it fills the window of its first proposer.
    """

    written: str
    text: str
    ends: bool
    proposers: list[str]
    tokens: dict[str, list[int]]
    unscorable: set[str]
    nll: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    logprob: float | None = None
    sums: dict[str, float] = field(default_factory=dict)
    fills: bool = False


@dataclass(frozen=True)
class ReferenceToken:
    """A committed token: the text it adds, log p, and texts and log p of the likeliest ones."""

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass
class ReferenceRound:
    candidates: list[ReferenceCandidate]
    winner: int
    text: str
    margins: dict[str, list[float]]
    forced: bool = False
    logprobs: dict[str, list[ReferenceToken]] = field(default_factory=dict)


@dataclass
class ReferenceGeneration:
    text: str
    finish_reason: str
    rounds: list[ReferenceRound]
    prompt_tokens: dict[str, int]
    completion_tokens: dict[str, int]
    seed: int | None = None

    @property
    def logprob(self) -> float:
        """The sum over the rounds of the winners' log-probabilities."""
        return sum(each.candidates[each.winner].logprob or 0.0 for each in self.rounds)

    @property
    def member_logprobs(self) -> dict[str, float]:
        """The sum over the rounds of the winners' log-likelihoods, by member."""
        total: dict[str, float] = {}
        for each in self.rounds:
            for name, logprob in each.candidates[each.winner].sums.items():
                total[name] = total.get(name, 0.0) + logprob
        return total


def token_logprobs(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    winner: ReferenceCandidate,
    options: Options,
    opening: Opening,
    form: Form | None = None,
) -> dict[str, list[ReferenceToken]]:
    """The tokens that a winner adds to `ids`, of the members that have room for them."""
    if not (options.logprobs or options.top_logprobs):
        return {}
    found = {}
    for member in members:
        before, own = ids[member.name], winner.tokens[member.name]
        if member.fits(len(before) + len(own)):
            allow = allowance(member, before, opening, form)
            found[member.name] = [
                reference_token(member, before, own, at, options.top_logprobs, allow)
                for at in range(len(own))
            ]
    return found


def reference_token(
    member: ReferenceMember,
    ids: Sequence[int],
    tokens: Sequence[int],
    at: int,
    count: int,
    allow: Allow,
) -> ReferenceToken:
    """Number `at` of the `tokens` after `ids`. Joining the texts of all gives their text."""
    before, whole = tokens[:at], member.text(ids, tokens)
    here = [*ids, *before]

    def settled(size: int) -> int:
        """The length of the text that the first tokens determine."""
        texts = [member.text(ids, tokens[:end]) for end in range(size + 1)]
        return max(len(text) - len(gain(whole, text)) for text in texts)

    def adds(token: int) -> str:
        return gain(member.text(ids, before), member.text(ids, [*before, token]))

    row = member.logprobs(here)
    top = member.likeliest(here, count, allow(before)) if count else []
    return ReferenceToken(
        whole[settled(at) : settled(at + 1)],
        float(row[tokens[at]]) if math.isfinite(row[tokens[at]]) else None,
        tuple((adds(other), float(row[other])) for other in top if math.isfinite(row[other])),
    )


def pool(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    proposals: Mapping[str, Sequence[Proposal]],
    opening: Opening,
    firsts: Mapping[str, str] | None = None,
) -> list[ReferenceCandidate]:
    """The union of the proposals, with every member's tokens for every candidate.

    Of a reply, each member writes the whitespace of its first proposal, or else of `firsts`.
    """
    found: dict[tuple[str, bool], ReferenceCandidate] = {}
    for member in members:
        for proposal in proposals[member.name]:
            candidate = found.setdefault(
                (opening.compared(proposal.text), proposal.ends),
                ReferenceCandidate(
                    proposal.text, opening.shown(proposal.text), proposal.ends, [], {}, set()
                ),
            )
            if member.name not in candidate.tokens:
                candidate.proposers.append(member.name)
                candidate.tokens[member.name] = list(proposal.tokens)
                if len(candidate.proposers) == 1:
                    size = len(ids[member.name]) + len(proposal.tokens)
                    candidate.fills = member.is_full(size)
    for candidate in found.values():
        for member in members:
            if member.name in candidate.tokens:
                continue
            first = (firsts or {}).get(member.name, "")
            if proposals[member.name]:
                first = proposals[member.name][0].text
            text = opening.form(member, candidate.written, first)
            tokens, exact = member.codec.encode_continuation(list(ids[member.name]), text)
            candidate.tokens[member.name] = list(tokens)
            if not exact or not member.fits(len(ids[member.name]) + len(tokens)):
                candidate.unscorable.add(member.name)
    return list(found.values())


def terms_of(
    member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int], *, ends: bool
) -> list[float]:
    """Negative log-likelihoods of a span's tokens and of its end, in nats (equation 4)."""
    prefixes = [(*ids, *tokens[:at]) for at in range(len(tokens) + ends)]
    if any(prefix not in member._rows for prefix in prefixes):
        rows = member.forward([*ids, *tokens])
        for prefix in prefixes:
            member._rows.setdefault(prefix, rows[len(prefix) - 1])
    terms = [
        -float(member.logprobs(prefix)[token])
        for prefix, token in zip(prefixes, tokens, strict=False)
    ]
    if ends:
        last = member.logprobs(prefixes[-1])
        terms.append(-log_sum([last[end] for end in member.end_ids]))
    return terms


def terms_within(
    member: ReferenceMember,
    ids: Sequence[int],
    tokens: Sequence[int],
    *,
    ends: bool,
    form: Form | None = None,
) -> list[float]:
    """Negative log-likelihoods of a span's tokens and of its end, in nats.

    Under a grammar the first term is relative to all that the grammar allows there, and a term
    counts nothing where the grammar leaves one alternative.
    """
    terms = terms_of(member, ids, tokens, ends=ends)
    if form is not None:
        for at in range(len(terms)):
            allowed, single = form.allowed(member, ids, tokens[:at])
            if at == 0 and not single:
                terms[0] += member.mass(ids, allowed)
            if single:
                terms[at] = 0.0
    return terms


def mean_nll(
    member: ReferenceMember, ids: Sequence[int], tokens: Sequence[int], *, ends: bool
) -> float:
    """Mean negative log-likelihood of a span, in nats per term (equation 4)."""
    terms = terms_within(member, ids, tokens, ends=ends)
    return sum(terms) / len(terms) if terms else math.nan


class MeanRule:
    """The scores of the paper."""

    draws_members = False

    def score(
        self,
        members: Sequence[ReferenceMember],
        ids: Mapping[str, Sequence[int]],
        candidates: Sequence[ReferenceCandidate],
        weights: Sequence[float],
        options: Options,
        form: Form | None = None,
    ) -> None:
        """Fill in the candidates' scores (equation 5)."""
        for candidate in candidates:
            total = share = likelihood = 0.0
            for member, weight in zip(members, weights, strict=True):
                if member.name in candidate.unscorable:
                    continue
                tokens, ends = candidate.tokens[member.name], candidate.ends
                terms = terms_within(member, ids[member.name], tokens, ends=ends, form=form)
                if terms and math.isfinite(sum(terms)):
                    nll = candidate.nll[member.name] = sum(terms) / len(terms)
                    candidate.sums[member.name] = -sum(terms)
                    total += weight * nll
                    likelihood -= weight * sum(terms)
                    share += weight
            if share > 0:
                candidate.score, candidate.logprob = total / share, likelihood / share

    def majority(self, *_: object) -> None:
        """No word wins before all members have proposed."""


@dataclass
class WordMixture:
    """The scores of the strategy `Mixture`: the members' probabilities of a word with its end.

    Attributes:
        early: whether a word can win before all members have proposed.
    """

    early: bool = True
    draws_members = True

    def score(
        self,
        members: Sequence[ReferenceMember],
        ids: Mapping[str, Sequence[int]],
        candidates: Sequence[ReferenceCandidate],
        weights: Sequence[float],
        options: Options,
        form: Form | None = None,
    ) -> None:
        for candidate in candidates:
            total = 0.0
            for member, share in zip(members, weights, strict=True):
                nll = self.nll(member, ids[member.name], candidate, options, form)
                if math.isfinite(nll):
                    candidate.nll[member.name] = nll
                    total += share * math.exp(-nll)
            if total > 0:
                candidate.logprob = math.log(total / sum(weights))
                candidate.score = -candidate.logprob

    def majority(
        self,
        members: Sequence[ReferenceMember],
        ids: Mapping[str, Sequence[int]],
        proposals: dict[str, list[Proposal]],
        weights: Sequence[float],
        options: Options,
        opening: Opening,
        form: Form | None = None,
        drawing: Drawing | None = None,
    ) -> tuple[list[str], ReferenceCandidate] | None:
        """The word of the member with the highest weight, and who read it, this member first.

        None if it has no more than one half. The members with the highest weights read the word;
        its score counts the probability of the others as 0.
        """
        if drawing is not None:
            return self.drawn(members, ids, proposals, weights, options, opening, form, drawing)
        if not self.early or opening.free or opening.spaces:
            return None
        order = sorted(range(len(members)), key=lambda place: (-weights[place], place))
        lead = members[order[0]].name
        own = {member.name: proposals[lead] if member.name == lead else [] for member in members}
        candidate = pool(members, ids, own, opening)[0]
        sure = 0.0
        for read, place in enumerate(order, start=1):
            member = members[place]
            nll = self.nll(member, ids[member.name], candidate, options, form)
            if math.isfinite(nll):
                candidate.nll[member.name] = nll
            sure += weights[place] * math.exp(-nll)
            if sure > 0.5 * sum(weights):
                candidate.logprob = math.log(sure / sum(weights))
                candidate.score = -candidate.logprob
                return [members[each].name for each in order[:read]], candidate
        return None

    def drawn(
        self,
        members: Sequence[ReferenceMember],
        ids: Mapping[str, Sequence[int]],
        proposals: dict[str, list[Proposal]],
        weights: Sequence[float],
        options: Options,
        opening: Opening,
        form: Form | None,
        drawing: Drawing,
    ) -> tuple[list[str], ReferenceCandidate]:
        """The word of one member, which is drawn with a chance proportional to its weight.

        Of the others, only the whitespace before a reply counts, which is that of their first
        tokens. It takes the place of their proposals.
        """
        assert drawing.writers is not None
        (writer,) = drawing.writers.choices(members, weights)
        own = {member.name: proposals[member.name] for member in members if member is writer}
        for member in members:
            before = ids[member.name]
            if member is not writer and not member.is_full(len(before)):
                allow = allowance(member, before, opening, form)
                token = drawing.token(member, before, [], opening, allow([]))
                lead = leading_whitespace(member.text(before, [token]))
                text = "" if token in member.end_ids else f"{lead}."
                proposals[member.name] = [Proposal((), text, ends=False)]
        firsts = {name: each[0].text for name, each in proposals.items()}
        written = {member.name: own.get(member.name, []) for member in members}
        candidate = pool(members, ids, written, opening, firsts)[0]
        nll = self.nll(writer, ids[writer.name], candidate, options, form)
        candidate.nll, candidate.score, candidate.logprob = {writer.name: nll}, nll, -nll
        drawing.after_word = self.has_end(candidate, options)
        return [writer.name], candidate

    def nll(
        self,
        member: ReferenceMember,
        ids: Sequence[int],
        candidate: ReferenceCandidate,
        options: Options,
        form: Form | None,
    ) -> float:
        """Negative log-likelihood of a word and of its end, in nats."""
        if member.name in candidate.unscorable:
            return math.inf
        tokens = candidate.tokens[member.name]
        nll = sum(terms_within(member, ids, tokens, ends=candidate.ends, form=form))
        if math.isfinite(nll):
            candidate.sums[member.name] = -nll
        if not self.has_end(candidate, options):
            return nll
        allowed, single = form.allowed(member, ids, tokens) if form else (None, False)
        return nll if single else nll - member.word_end([*ids, *tokens], allowed)

    def has_end(self, candidate: ReferenceCandidate, options: Options) -> bool:
        """Whether whitespace, or the end of the response, must follow a candidate."""
        text = candidate.written
        return not (
            candidate.ends
            or candidate.fills
            or text[-1:].isspace()
            or any(unspaced(letter) for letter in text)
            or len(candidate.tokens[candidate.proposers[0]]) >= options.max_word_tokens
        )


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


def shortened(
    members: Sequence[ReferenceMember],
    ids: Mapping[str, Sequence[int]],
    winner: ReferenceCandidate,
    opening: Opening,
    firsts: Mapping[str, str],
    fits: Callable[[str, Mapping[str, Sequence[int]]], bool],
) -> ReferenceCandidate:
    """The winner, or its longest prefix whose text and tokens fit; nothing, if none does."""
    if fits(winner.written, winner.tokens):
        return winner
    (proposer,) = [member for member in members if member.name == winner.proposers[0]]
    own = winner.tokens[proposer.name]
    for size in range(len(own) - 1, 0, -1):
        text = proposer.text(ids[proposer.name], own[:size])
        if proposer.name in opening.held:
            text = " " * opening.spaces + text
        if not winner.written.startswith(text):  # it ends inside a character
            continue
        tokens = {
            member.name: member.codec.encode_continuation(
                list(ids[member.name]), opening.form(member, text, firsts[member.name])
            )[0]
            for member in members
        }
        tokens[proposer.name] = own[:size]
        if fits(text, tokens):
            return ReferenceCandidate(
                text, opening.shown(text), False, winner.proposers, tokens, set()
            )
    nothing: dict[str, list[int]] = {member.name: [] for member in members}
    return ReferenceCandidate("", "", False, winner.proposers, nothing, set())


def begin(
    members: Sequence[ReferenceMember],
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    options: Options | None = None,
) -> tuple[Opening, dict[str, list[int]]]:
    """The opening of a response, and every member's tokens before it.

    From now on, the members' distributions are those of `options`, or their own without them.
    """
    opening, ids = encoded(members, prompt, messages)
    for member in members:
        member.adjust(options, len(ids[member.name]))
    return opening, ids


def encoded(
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


class Response:
    """A response, its rounds, and every member's tokens for it."""

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        prompt: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        options: Options,
        *,
        apart: bool = False,
    ) -> None:
        self.options = options
        self.most = options.max_new_tokens or 0
        self.drawing = Drawing(members, options, apart=apart) if options.temperature else None
        self.members = members
        self.language = options.language
        self.opening, self.ids = begin(members, prompt, messages, options)
        self.form = None
        if self.language is not None:
            if self.opening.free and self.language.begins_with_whitespace:
                self.opening = Opening()
            self.form = Form(self.language, members, self.opening)
        self.rounds: list[ReferenceRound] = []
        self.prompt_tokens = {name: len(tokens) for name, tokens in self.ids.items()}
        self.completion = dict.fromkeys(self.ids, 0)
        self.text = ""

    def forced(self) -> ReferenceCandidate | None:
        """Text that no member has proposed, because nothing else may follow, if it fits."""
        if self.language is None or self.opening.free:
            return None
        text = self.language.forced(self.text)
        tokens = {}
        for member in self.members:
            owed = 0 if member.name in self.opening.held else self.opening.spaces
            before = list(self.ids[member.name])
            tokens[member.name] = list(
                member.codec.encode_continuation(before, " " * owed + text)[0]
            )
            if not member.fits(len(before) + len(tokens[member.name])):
                return None
        written = " " * self.opening.spaces + text
        ends = self.language.is_final((self.text + text).encode())
        candidate = ReferenceCandidate(written, text, ends, [], tokens, set(), {}, 0.0, 0.0)
        return candidate if text and self.fits(written, tokens) else None

    def fits(self, _: str, tokens: Mapping[str, Sequence[int]]) -> bool:
        """Whether `tokens` take no member beyond its limit. Forms have no half characters."""
        for member in self.members:
            before, own = self.ids[member.name], tokens[member.name]
            if not member.fits(len(before) + len(own)):
                continue
            if self.form is not None and not self.form.is_whole(member, before, own):
                return False
            count = self.completion[member.name] + self.opening.counted(member, before, own)
            if count > self.most:
                return False
        return True

    def commit(self, candidate: ReferenceCandidate) -> bool:
        """Add a candidate to the response; False if a member had no room for it."""
        logprobs = token_logprobs(
            self.members, self.ids, candidate, self.options, self.opening, self.form
        )
        self.rounds[-1].logprobs = logprobs
        if self.drawing is not None:
            self.drawing.commit(self.members, self.ids, candidate, self.opening)
        for member in self.members:
            before, tokens = self.ids[member.name], candidate.tokens[member.name]
            if member.fits(len(before) + len(tokens)):
                new = self.opening.counted(member, before, tokens)
                self.completion[member.name] += new
                self.prompt_tokens[member.name] += len(tokens) - new
                if self.form is not None:
                    self.form.commit(member, before, tokens)
        fitted = commit(self.members, self.ids, candidate)
        self.opening = self.opening.after(candidate.written)
        self.text += self.rounds[-1].text
        return fitted

    def stop(self) -> int | None:
        """Where the first stop sequence begins before which the response may end."""
        for at in range(len(self.text)):
            if self.text.startswith(tuple(self.options.stop), at) and (
                self.language is None or self.language.holds(self.text[:at].encode())
            ):
                return at
        return None

    def cut(self, at: int) -> None:
        """End the rounds at a character, and with them the tokens that begin there or later."""
        begins = 0
        for done in self.rounds:
            size, begins = len(done.text), begins + len(done.text)
            done.text = done.text[: max(0, at - begins + size)]
            for own in done.logprobs.values():
                end = sum(len(token.text) for token in own) - size + len(done.text)
                starts = [sum(len(token.text) for token in own[:n]) for n in range(len(own))]
                own[:] = [token for token, start in zip(own, starts, strict=True) if start < end]

    def repeats_a_call(self) -> bool:
        """Whether the grammar has calls of tools, and the last call is there twice."""
        *closed, _ = self.text.split("</tool_call>")
        calls = [each[each.find("<tool_call>") :] for each in closed if "<tool_call>" in each]
        calls += [
            line for line in self.text.split("\n") if re.fullmatch(r'{.*"arguments".*}', line)
        ]
        return "</tool_call>" in str(self.options.grammar) and len(calls) > len({*calls})

    def is_full(self) -> bool:
        """Whether some member can take no further token."""
        return any(
            self.completion[member.name] >= self.most or member.is_full(len(self.ids[member.name]))
            for member in self.members
        )


def decode(
    members: Sequence[ReferenceMember],
    prompt: str | None,
    options: Options,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    rule: MeanRule | WordMixture | None = None,
) -> ReferenceGeneration:
    """The whole response to a prompt or a conversation."""
    if options.choices is not None:
        return choose(members, prompt, options, messages=messages)[0]
    options = options.settled(len(members))
    rule = rule or MeanRule()
    response = Response(members, prompt, messages, options, apart=rule.draws_members)
    weights = options.weights or [1.0] * len(members)
    ids, form, drawing = response.ids, response.form, response.drawing
    while True:
        opening = response.opening
        if (winner := response.forced()) is not None:
            kept = winner
            response.rounds.append(ReferenceRound([kept], 0, kept.text, {}, forced=True))
        else:
            proposals: dict[str, list[Proposal]] = {}
            margins: dict[str, list[float]] = {}
            for member in members:
                proposals[member.name], margins[member.name] = propose(
                    member, ids[member.name], options, opening, form, drawing
                )
            found = rule.majority(members, ids, proposals, weights, options, opening, form, drawing)
            firsts = {name: own[0].text for name, own in proposals.items()}
            if found is None:
                candidates = pool(members, ids, proposals, opening)
                rule.score(members, ids, candidates, weights, options, form)
            else:
                (lead, *others), candidates = found[0], [found[1]]
                margins = {lead: margins[lead], **{name: [] for name in others}}
            scores = [math.inf if c.score is None else c.score for c in candidates]
            best = scores.index(min(scores))
            winner = candidates[best]
            if winner.score is None:
                raise RuntimeError("no member can score any candidate")
            kept = shortened(members, ids, winner, opening, firsts, response.fits)
            text = opening.shown(kept.written)
            response.rounds.append(ReferenceRound(candidates, best, text, margins))
        fitted = response.commit(kept)
        if not winner.proposers and drawing is not None:
            drawing.after_word = False

        cut = response.stop()
        is_final = response.language is not None and response.language.is_final(
            response.text.encode()
        )
        finish = (
            "stop_sequence"
            if cut is not None
            else "stop"
            if kept.ends or is_final or response.repeats_a_call()
            else "length"
            if kept is not winner or not fitted or response.is_full()
            else None
        )
        if cut is not None:
            response.cut(cut)
        if finish is not None:
            return ReferenceGeneration(
                response.text[:cut],
                finish,
                response.rounds,
                response.prompt_tokens,
                response.completion,
                drawing.seed if drawing else None,
            )


def choose(
    members: Sequence[ReferenceMember],
    prompt: str | None,
    options: Options,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[ReferenceGeneration, dict[str, list[float]]]:
    """The option that the members find likeliest, and every member's sums in nats."""
    assert options.choices is not None
    opening, ids = begin(members, prompt, messages)
    weights = options.weights or [1.0] * len(members)
    owed = " " * opening.spaces
    candidates = [
        ReferenceCandidate(owed + text, text, True, [], {}, set()) for text in options.choices
    ]
    sums: dict[str, list[float]] = {}
    for member in members:
        before = ids[member.name]
        likeliest = member.greedy(before)
        lead = "" if member.name in opening.held else owed
        if opening.free and likeliest not in member.end_ids:
            lead = leading_whitespace(member.text(before, [likeliest]))
        own = []
        for candidate in candidates:
            tokens, exact = member.codec.encode_continuation(list(before), lead + candidate.text)
            candidate.tokens[member.name] = list(tokens)
            fitting = exact and member.fits(len(before) + len(tokens))
            own.append(sum(terms_of(member, before, tokens, ends=True)) if fitting else math.inf)
        if all(map(math.isfinite, own)):
            sums[member.name] = own
    if not sums:
        raise RuntimeError("no member can score all choices")
    shares = {m.name: weight for m, weight in zip(members, weights, strict=True) if m.name in sums}
    for at, candidate in enumerate(candidates):
        candidate.nll = {name: own[at] for name, own in sums.items()}
        total = sum(shares[name] * nll for name, nll in candidate.nll.items())
        candidate.score = total / sum(shares.values())
        candidate.logprob = -candidate.score
        candidate.sums = {name: -nll for name, nll in candidate.nll.items()}
    scores = [candidate.score for candidate in candidates if candidate.score is not None]
    winner = candidates[scores.index(min(scores))]
    completion, prompt_tokens = {}, {}
    for member in members:
        before, tokens = ids[member.name], winner.tokens[member.name]
        completion[member.name] = opening.counted(member, before, tokens)
        prompt_tokens[member.name] = len(before) + len(tokens) - completion[member.name]
    logprobs = token_logprobs(members, ids, winner, options, opening)
    place = candidates.index(winner)
    read: dict[str, list[float]] = {name: [] for name in ids}
    rounds = [ReferenceRound(candidates, place, winner.text, read, logprobs=logprobs)]
    return ReferenceGeneration(winner.text, "stop", rounds, prompt_tokens, completion), sums
