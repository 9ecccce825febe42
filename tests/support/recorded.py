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


class FakeReader:
    """Reads the tokens of a `FakeBackend`, whose tokens are texts.

    Attributes:
        is_lossless: whether the tokenizer can write every text after another text.
    """

    is_lossless = True

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    def text(self, ids: Sequence[int], prompt: int) -> str:
        """The text of `ids`, without special tokens around the prompt's `prompt` tokens."""
        return self._backend.codec.decode(ids)

    def is_own(self, text: str) -> bool:
        """Whether the tokenizer gives `text` back after encoding and decoding it."""
        return True


class TokenizerReader:
    """Reads tokens with the plain calls of a transformers tokenizer."""

    def __init__(self, kind: str) -> None:
        self._tokenizer = tokenizer(kind)
        self.is_lossless = kind in LOSSLESS_KINDS
        plain = self._encode("a", add_special_tokens=False)
        whole = self._encode("a", add_special_tokens=True)
        starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
        self._before = starts[0]
        self._after = len(whole) - len(plain) - starts[0]
        self._texts: dict[tuple[int, ...], str] = {}

    def text(self, ids: Sequence[int], prompt: int) -> str:
        key = (*ids[self._before : prompt - self._after], *ids[prompt:])
        if key not in self._texts:
            self._texts[key] = self._decode(key)
        return self._texts[key]

    def is_own(self, text: str) -> bool:
        return self._decode(self._encode(text, add_special_tokens=False)) == text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, split_special_tokens=True
        )
        return ids

    def _decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


Reader = FakeReader | TokenizerReader


class _Recording:
    """Mixin for backends: keeps a `Record` of every request, in order of arrival."""

    reader: Reader
    records: dict[TokenTree, Record]

    def note(self, queries: Sequence[Query]) -> None:
        for query in queries:
            tree = query.tree
            if tree not in self.records:
                self.records[tree] = Record(tree, len(tree.ids))
            seen = self.records[tree].seen
            if not seen or seen[-1] != len(tree.ids):
                seen.append(len(tree.ids))


class RecordedFake(_Recording, FakeBackend):
    """A `FakeBackend` that records."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reader, self.records = FakeReader(self), {}

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        self.note(queries)
        return super().evaluate(queries)


class RecordedModel(_Recording, HuggingFaceBackend):
    """A `HuggingFaceBackend` that records."""

    def __init__(self, recipe: Recipe) -> None:
        self.reader, self.records = TokenizerReader(recipe.kind), {}
        known = tokenizer(recipe.kind, recipe.template)
        super().__init__(model(recipe), known, recipe.name)

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        self.note(queries)
        return super().evaluate(queries)


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
        own_prompt: whether the tokenizer gives the prompt back, so that whole texts were compared
            and not only what follows the prompt.
    """

    record: Record
    ends: tuple[int, ...]
    own_prompt: bool


def trailing_spaces(text: str) -> int:
    return len(text) - len(text.rstrip(" "))


def the_record(member: Backend) -> Record:
    """The record of the only request since `forget`."""
    assert isinstance(member, RecordedFake | RecordedModel)
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
    * a member whose context window the last winner does not fit may lack this winner.
    """
    held = {}
    owing = set()
    for member in members:
        result, owed = _check_member(member, prompt, generation)
        held[member.name] = result
        owing.add(owed)
    assert len(owing - {None}) <= 1, f"members wrote different numbers of the spaces: {owing}"
    return held


def _check_member(member: Backend, prompt: str, generation: Generation) -> tuple[Held, int | None]:
    assert isinstance(member, RecordedFake | RecordedModel)
    record, reader = the_record(member), member.reader
    stripped = prompt.rstrip(" ")
    base = reader.text(record.tree.ids[: record.prompt], record.prompt)
    own = reader.is_own(stripped) and (reader.is_lossless or base in (stripped, prompt))
    if own:
        assert base in (stripped, prompt), f"{member.name}: the prompt became {base!r}"
        spaces = len(prompt) - len(base)
        return _check_commits(member, base, spaces, generation, own_prompt=True)
    if trailing_spaces(prompt) and not reader.is_own("a "):
        return Held(record, (), own_prompt=False), None  # its tokens do not tell these spaces
    if not reader.is_lossless:
        base = _base_of_lossy(member, record, base)
    try:
        return _check_commits(member, base, trailing_spaces(prompt), generation, own_prompt=False)
    except AssertionError:
        if trailing_spaces(prompt) == 0:
            raise
    return _check_commits(member, base, 0, generation, own_prompt=False)


def _base_of_lossy(member: RecordedMember, record: Record, base: str) -> str:
    """The text of the prompt's tokens when a letter follows them.

    Some tokenizers decode whitespace only if something follows it.
    """
    prompt = record.tree.ids[: record.prompt]
    letter, _ = member.codec.encode_continuation(prompt, "a")
    text = member.reader.text([*prompt, *letter], record.prompt)
    return text[:-1] if text.endswith("a") else base


def _check_commits(
    member: RecordedMember, base: str, spaces: int, generation: Generation, *, own_prompt: bool
) -> tuple[Held, int | None]:
    """Compare what a member holds with `base`, followed by `spaces` spaces and the response.

    Returns:
        What the member holds, and the number of the spaces that it wrote if the response is empty,
        the tokenizer gives the prompt back, and the prompt's tokens do not hold the spaces.
    """
    record, reader = the_record(member), member.reader
    ids = record.tree.ids
    texts = [base]
    ends: list[int] = []
    joined = ""
    complete = True
    for round_ in generation.rounds:
        won = round_.candidates[round_.winner]
        known = reader.is_lossless or member.name in won.nll or member.name in won.proposers
        if INCOMPLETE in round_.text or not known:
            complete = False
            break
        at = ends[-1] if ends else record.prompt
        joined += round_.text
        texts.append(base + (" " * spaces + joined if joined else ""))
        end = _end(reader, record, at, texts[-1]) if joined else at
        if end is None:
            last = round_ is generation.rounds[-1]
            if last and not _fits(member, texts[-1][len(reader.text(ids, record.prompt)) :]):
                complete = False
                break
            raise AssertionError(
                f"{member.name} does not hold {texts[-1]!r} after round {round_.index}; "
                f"it holds {reader.text(ids, record.prompt)!r}"
            )
        ends.append(end)
    owed = None
    if complete:
        final = reader.text(ids, record.prompt)
        if joined:
            assert final == texts[-1], f"{member.name} holds {final!r}, not {texts[-1]!r}"
        else:
            empty = reader.text(ids[: record.prompt], record.prompt)
            assert final == empty or _is_early(final, base, spaces), (
                f"{member.name} holds {final!r}; the prompt is {base!r} and {spaces} spaces"
            )
            owed = len(final) - len(empty) if own_prompt and spaces else None
    for seen in record.seen:
        if ends and record.prompt < seen <= ends[-1] and seen not in ends:
            now = reader.text(ids[:seen], record.prompt)
            early = _is_early(now, base, spaces)
            assert early or now in texts, f"{member.name} held {now!r} between commits"
    return Held(record, tuple(ends), own_prompt), owed


def _is_early(text: str, base: str, spaces: int) -> bool:
    """Whether `text` is `base` and at most `spaces` spaces."""
    return text.startswith(base) and text[len(base) :] in (" " * n for n in range(spaces + 1))


def _fits(member: RecordedMember, text: str) -> bool:
    """Whether the member's context window has room for its own encoding of `text`."""
    if member.context_window is None:
        return True
    ids = the_record(member).tree.ids
    tokens, _ = member.codec.encode_continuation(ids, text)
    return len(ids) + len(tokens) <= member.context_window


def _end(reader: Reader, record: Record, at: int, wanted: str) -> int | None:
    """The number of tokens whose text is `wanted`, from `at` on; a number seen in queries first."""
    ids = record.tree.ids
    fits = [n for n in range(at, len(ids) + 1) if reader.text(ids[:n], record.prompt) == wanted]
    return next((n for n in fits if n in record.seen), fits[-1] if fits else None)


def check_reply_is_exact(members: Sequence[Backend], generation: Generation) -> None:
    """Fail unless all members hold the reply, each after whitespace of its own.

    The exceptions of `check_prompt_is_exact` hold here, too.
    """
    assert generation.text == generation.text.lstrip(), f"{generation.text!r} shows whitespace"
    joined = "".join(round_.text for round_ in generation.rounds)
    assert joined == joined.lstrip(), f"{joined!r} shows whitespace"
    comparable = joined.split(INCOMPLETE)[0]
    for member in members:
        assert isinstance(member, RecordedFake | RecordedModel)
        record = the_record(member)
        if not member.reader.is_lossless:
            continue
        base = member.reader.text(record.tree.ids[: record.prompt], record.prompt)
        final = member.reader.text(record.tree.ids, record.prompt)
        assert final.startswith(base)
        reply = final[len(base) :].lstrip()
        if reply != joined and joined.startswith(reply):
            lacks = joined[len(reply) :]
            # before the first character, the member would also need room for its own whitespace
            full = not _fits(member, lacks) or (not reply and member.context_window is not None)
            if generation.rounds[-1].text.endswith(lacks) and full:
                continue
        if comparable == joined:
            assert reply == joined, f"{member.name} holds {reply!r}, not {joined!r}"
        else:
            assert reply.startswith(comparable), f"{member.name} holds {reply!r}, not {joined!r}"


def counted_tokens(held: Record, reader: Reader, spaces: int) -> int:
    """Number of tokens after the prompt that do not hold owed spaces alone."""
    ids, base = held.tree.ids, reader.text(held.tree.ids[: held.prompt], held.prompt)
    for end in range(held.prompt, len(ids)):
        extra = reader.text(ids[: end + 1], held.prompt)[len(base) :]
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
    """Fail unless the NLLs of the rounds agree with `AdaFuseEngine.score` of the response.

    They can be compared for a member if its committed tokens are its encoding of the response, and
    if it scored every winner. The last winner is left out if the response was `cut` inside it.

    Returns:
        The number of members that could be compared.
    """
    rounds = list(generation.rounds)
    while rounds and (cut or rounds[-1].candidates[rounds[-1].winner].ends):
        rounds.pop()
        cut = False
    joined = "".join(round_.text for round_ in rounds)
    if not joined or not rounds[0].text or INCOMPLETE in joined:
        return 0  # the tokens of a first round without text hold spaces of the prompt
    comparable = {}
    for backend in engine.backends:
        if backend.name not in held:
            continue
        own = held[backend.name]
        if len(own.ends) < len(rounds):
            continue
        ids, start = own.record.tree.ids, own.record.prompt
        base = len(_text(backend, own.record))
        ends = [start, *own.ends[: len(rounds)]]
        text = _text(backend, own.record, ends[-1])[base:]
        tokens, exact = backend.codec.encode_continuation(ids[:start], text)
        won = [round_.candidates[round_.winner] for round_ in rounds]
        if exact and tokens == ids[start : ends[-1]] and all(backend.name in c.nll for c in won):
            comparable[backend.name] = math.fsum(
                c.nll[backend.name] * (end - begin)
                for c, begin, end in zip(won, ends, ends[1:], strict=False)
            ) / len(tokens)
    if comparable:
        (scored,) = engine.score(prompt, [joined], **options).texts
        for name, nll in comparable.items():
            want = scored.nll.get(name, math.inf)
            assert abs(nll - want) < SCORE_TOLERANCE, (
                f"{name}: the rounds say {nll} nats per token for {joined!r}, score() says {want}"
            )
    return len(comparable)


def _text(member: Backend, record: Record, end: int | None = None) -> str:
    assert isinstance(member, RecordedFake | RecordedModel)
    return member.reader.text(record.tree.ids[: end or record.prompt], record.prompt)
