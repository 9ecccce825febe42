"""Members that record the tokens they commit, and what must hold for these tokens.

The checks use the public protocol of backends only: a backend sees the committed tokens of a
request in ``tree.ids`` of every query. The list stays valid after the request has ended.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.tree import TokenTree
from tests.support.models import Recipe, model, tokenizer
from tests.support.tokenizers import LOSSLESS_KINDS

INCOMPLETE = "\ufffd"
SCORE_TOLERANCE = 1e-6


@dataclass(eq=False)
class Record:
    """The committed tokens of one request at one member.

    Attributes:
        tree: the request's tree. ``tree.ids`` are the prompt's tokens and the committed tokens.
        prompt: number of tokens of the prompt.
        seen: numbers of committed tokens, prompt included, at which the member was queried.
    """

    tree: TokenTree
    prompt: int
    seen: list[int] = field(default_factory=list)


class _Recording:
    """Mixin for backends: keeps a `Record` of every request, in order of arrival.

    Attributes:
        is_lossless: whether the tokenizer can write every text after another text.
    """

    records: dict[TokenTree, Record]
    is_lossless = True

    def note(self, queries: Sequence[Query]) -> None:
        for query in queries:
            tree = query.tree
            seen = self.records.setdefault(tree, Record(tree, tree.prompt_tokens)).seen
            if not seen or seen[-1] != len(tree.ids):
                seen.append(len(tree.ids))


class RecordedFake(_Recording, FakeBackend):
    """A `FakeBackend` that records."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.records = {}

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        self.note(queries)
        return super().evaluate(queries)

    def read(self, ids: Sequence[int], prompt: int) -> str:
        """The text of `ids`, without special tokens around the prompt's `prompt` tokens."""
        return self.codec.decode(ids)

    def gives_back(self, text: str) -> bool:
        """Whether the tokenizer gives `text` back after encoding and decoding it."""
        return True


class RecordedModel(_Recording, HuggingFaceBackend):
    """A `HuggingFaceBackend` that records. It reads with the plain calls of its tokenizer."""

    def __init__(self, recipe: Recipe) -> None:
        self.records = {}
        self._plain = tokenizer(recipe.kind)
        self.is_lossless = recipe.kind in LOSSLESS_KINDS
        plain, whole = (self._encode("a", special=special) for special in (False, True))
        starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
        self._before, self._after = starts[0], len(whole) - len(plain) - starts[0]
        self._texts_of = functools.cache(self._decode)
        known = tokenizer(recipe.kind, recipe.template)
        super().__init__(model(recipe), known, recipe.name)

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        self.note(queries)
        return super().evaluate(queries)

    def read(self, ids: Sequence[int], prompt: int) -> str:
        return self._texts_of((*ids[self._before : prompt - self._after], *ids[prompt:]))

    def gives_back(self, text: str) -> bool:
        return self._decode(self._encode(text, special=False)) == text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        options = {"add_special_tokens": special, "split_special_tokens": True}
        return list(self._plain.encode(text, **options))

    def _decode(self, ids: Iterable[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._plain.decode(list(ids), **options))


RecordedMember = RecordedFake | RecordedModel


@functools.cache
def recorded(recipe: Recipe) -> RecordedModel:
    """The recording member of `recipe`."""
    return RecordedModel(recipe)


def forget(members: Iterable[Backend]) -> None:
    """Drop all records of these members."""
    for member in members:
        assert isinstance(member, RecordedFake | RecordedModel)
        member.records.clear()


@dataclass(frozen=True)
class Held:
    """What one member holds after a request.

    Attributes:
        record: the member's record.
        ends: number of committed tokens after each round, as far as rounds could be compared.
    """

    record: Record
    ends: tuple[int, ...]


def trailing_spaces(text: str) -> int:
    return len(text) - len(text.rstrip(" "))


def used(members: Iterable[Backend]) -> list[RecordedMember]:
    """The members that were asked since `forget`."""
    known = [each for each in members if isinstance(each, RecordedFake | RecordedModel)]
    return [member for member in known if member.records]


def the_record(member: RecordedMember) -> Record:
    """The record of the only request since `forget`."""
    (record,) = member.records.values()
    return record


def check_prompt_is_exact(
    members: Sequence[Backend], prompt: str, generation: Generation
) -> dict[str, Held]:
    """Fail unless every member holds exactly the prompt and the response after every commit.

    What may differ:

    * special tokens that the tokenizer puts around every prompt are left out;
    * a prompt that the tokenizer does not give back, with or without this package, counts as what
      its tokens decode to, and what follows it is compared. The same is true if the tokenizer
      cannot write every text and the prompt spells a control token;
    * until the spaces at the end of the prompt are written, a member may hold some of them only;
    * nothing is compared if the prompt ends in spaces and the tokenizer drops such spaces;
    * rounds are compared up to the first one with U+FFFD (bytes that are no character) and, for a
      tokenizer that cannot write every text, up to the first winner that the member cannot score;
    * a member whose context window the last winner does not fit may lack this winner;
    * members that were never asked hold nothing.
    """
    return {each.name: _check_member(each, prompt, generation) for each in used(members)}


def _check_member(member: RecordedMember, prompt: str, generation: Generation) -> Held:
    record, stripped, spaces = the_record(member), prompt.rstrip(" "), trailing_spaces(prompt)
    ids = record.tree.ids[: record.prompt]
    base = member.read(ids, record.prompt)
    if member.gives_back(stripped) and (member.is_lossless or base in (stripped, prompt)):
        assert base in (stripped, prompt), f"{member.name}: the prompt became {base!r}"
        return Held(record, _check_commits(member, base, len(prompt) - len(base), generation))
    if spaces and not member.gives_back("a "):
        return Held(record, ())  # its tokens do not tell these spaces
    if not member.is_lossless:  # some tokenizers decode whitespace only if something follows it
        letter, _ = member.codec.encode_continuation(ids, "a")
        text = member.read([*ids, *letter], record.prompt)
        base = text[:-1] if text.endswith("a") else base
    try:
        return Held(record, _check_commits(member, base, spaces, generation))
    except AssertionError:
        if spaces == 0:
            raise
    return Held(record, _check_commits(member, base, 0, generation))


def _check_commits(
    member: RecordedMember, base: str, spaces: int, generation: Generation
) -> tuple[int, ...]:
    """Compare what a member holds with `base`, followed by `spaces` spaces and the response.

    Returns:
        The number of committed tokens after each round, as far as rounds could be compared.
    """
    record = the_record(member)
    ids, ends, texts, written = record.tree.ids, [record.prompt], [base], ""
    held = member.read(ids, record.prompt)
    is_complete = True
    for round_ in generation.rounds:
        won = round_.candidates[round_.winner]
        known = member.is_lossless or member.name in won.nll or member.name in won.proposers
        if INCOMPLETE in round_.text or not known:
            is_complete = False
            break
        written += round_.text
        texts.append(base + (" " * spaces + written if written else ""))
        end = _end(member, record, ends[-1], texts[-1]) if written else record.prompt
        if end is None:
            lacks = round_ is generation.rounds[-1] and texts[-1][len(held) :]
            assert lacks and not _fits(member, lacks), f"{member.name}: {held!r}, not {texts[-1]!r}"
            is_complete = False
            break
        ends.append(end)

    def is_early(text: str) -> bool:
        """Whether `text` is `base` and at most `spaces` spaces."""
        return text.startswith(base) and text[len(base) :] in (" " * n for n in range(spaces + 1))

    if is_complete:
        right = held == texts[-1] if written else held == base or is_early(held)
        assert right, f"{member.name} holds {held!r}, not {texts[-1]!r}"
    for seen in record.seen:
        if record.prompt < seen <= ends[-1] and seen not in ends:
            now = member.read(ids[:seen], record.prompt)
            assert is_early(now) or now in texts, f"{member.name} held {now!r} between commits"
    return tuple(ends[1:])


def _fits(member: RecordedMember, text: str) -> bool:
    """Whether the member's context window has room for its own encoding of `text`."""
    if member.context_window is None:
        return True
    ids = the_record(member).tree.ids
    tokens, _ = member.codec.encode_continuation(ids, text)
    return len(ids) + len(tokens) <= member.context_window


def _end(member: RecordedMember, record: Record, at: int, wanted: str) -> int | None:
    """The number of tokens whose text is `wanted`, from `at` on; a number seen in queries first."""
    ids = record.tree.ids
    fits = [n for n in range(at, len(ids) + 1) if member.read(ids[:n], record.prompt) == wanted]
    return next((n for n in fits if n in record.seen), fits[-1] if fits else None)


def check_reply_is_exact(members: Sequence[Backend], generation: Generation) -> None:
    """Fail unless all members hold the reply, each after whitespace of its own.

    The exceptions of `check_prompt_is_exact` hold here, too.
    """
    joined = "".join(round_.text for round_ in generation.rounds)
    for text in (generation.text, joined):
        assert text == text.lstrip(), f"{text!r} shows whitespace"
    comparable = joined.split(INCOMPLETE)[0]
    for member in used(members):
        record = the_record(member)
        if not member.is_lossless:
            continue
        base = member.read(record.tree.ids[: record.prompt], record.prompt)
        final = member.read(record.tree.ids, record.prompt)
        assert final.startswith(base)
        reply = final[len(base) :].lstrip()
        if reply != joined and joined.startswith(reply):
            lacks = joined[len(reply) :]
            # before the first character, the member would also need room for its own whitespace
            full = not _fits(member, lacks) or (not reply and member.context_window is not None)
            if generation.rounds[-1].text.endswith(lacks) and full:
                continue
        is_right = reply == joined if comparable == joined else reply.startswith(comparable)
        assert is_right, f"{member.name} holds {reply!r}, not {joined!r}"


def counted_tokens(member: RecordedMember, spaces: int) -> int:
    """Number of tokens after the prompt that do not hold owed spaces alone."""
    record = the_record(member)
    ids, base = record.tree.ids, member.read(record.tree.ids[: record.prompt], record.prompt)
    for end in range(record.prompt, len(ids)):
        extra = member.read(ids[: end + 1], record.prompt)[len(base) :]
        if extra.strip(" ") or len(extra) > spaces:
            return len(ids) - end
    return 0


def check_scores(
    engine: AdaFuseEngine,
    prompt: str,
    generation: Generation,
    held: Mapping[str, Held],
    *,
    cut: bool,
    **options: Any,
) -> int:
    """Fail if the NLLs of the rounds differ from `AdaFuseEngine.score` of the response.

    They can be compared for a member if its committed tokens are its encoding of the response, and
    if it scored every winner. The last winner is left out if the response was `cut` inside it. The
    result is the number of these members.
    """
    rounds = list(generation.rounds)
    while rounds and (cut or rounds[-1].candidates[rounds[-1].winner].ends):
        rounds.pop()
        cut = False
    joined = "".join(round_.text for round_ in rounds)
    if not joined or not rounds[0].text or INCOMPLETE in joined:
        return 0  # the tokens of a first round without text hold spaces of the prompt
    won = [round_.candidates[round_.winner] for round_ in rounds]
    comparable = {}
    for member in engine.backends:
        own = held.get(member.name)
        if own is None or len(own.ends) < len(rounds):
            continue
        assert isinstance(member, RecordedFake | RecordedModel)
        ids, start = own.record.tree.ids, own.record.prompt
        ends = [start, *own.ends[: len(rounds)]]
        text = member.read(ids[: ends[-1]], start)[len(member.read(ids[:start], start)) :]
        tokens, exact = member.codec.encode_continuation(ids[:start], text)
        if exact and tokens == ids[start : ends[-1]] and all(member.name in c.nll for c in won):
            comparable[member.name] = math.fsum(
                c.nll[member.name] * (end - begin)
                for c, begin, end in zip(won, ends, ends[1:], strict=False)
            ) / len(tokens)
    scored = engine.score(prompt, [joined], **options).texts[0].nll if comparable else {}
    for name, nll in comparable.items():
        want = scored.get(name, math.inf)
        assert abs(nll - want) < SCORE_TOLERANCE, f"{name}: {nll} nats for {joined!r}, not {want}"
    return len(comparable)
