"""Members that record the tokens they commit, and what must hold for these tokens.

The checks use the public protocol of backends only: a backend sees the committed tokens of a
request in ``tree.ids`` of every query. The list stays valid after the request has ended.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from adafuse_llm import Generation
from adafuse_llm.backends import Backend, FakeBackend, Query, QueryResult
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.tree.tokens import TokenTree
from tests.support.models import Recipe, model, tokenizer

INCOMPLETE = "\ufffd"


class Recorded(Backend):
    """Records the last request since `forget`.

    Attributes:
        tree: its tree, or None.
        seen: numbers of committed tokens, prompt included, at which the member was queried.
    """

    tree: TokenTree | None = None
    seen: set[int]

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        for query in queries:
            if query.tree is not self.tree:
                self.tree, self.seen = query.tree, set()
            self.seen.add(len(query.tree.ids))
        return super().evaluate(queries)  # type: ignore[safe-super]

    def read(self, end: int | None = None) -> str:
        """The text of the first `end` tokens, without a special token before the prompt."""
        assert self.tree is not None
        return self.decode(self.tree.ids[:end])

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def spelled(self, text: str) -> str:
        """What the tokens of a text spell, which need not be the text."""
        return text

    @property
    def prompt(self) -> str:
        """The text of the prompt's tokens."""
        assert self.tree is not None
        return self.read(self.tree.prompt_tokens)


class RecordedFake(Recorded, FakeBackend):
    """A `FakeBackend` that records."""

    def decode(self, ids: Sequence[int]) -> str:
        return self.codec.decode(ids)


class RecordedModel(Recorded, HuggingFaceBackend):
    """A `HuggingFaceBackend` that records. It reads with the plain calls of its tokenizer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(model(recipe), tokenizer(recipe.kind, recipe.template), recipe.name)

    def decode(self, ids: Sequence[int]) -> str:
        if ids[:1] == [self.tokenizer.bos_token_id]:
            ids = ids[1:]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(ids, **options))

    def spelled(self, text: str) -> str:
        return self.decode(self.tokenizer.encode(text, split_special_tokens=True))


def forget(members: Iterable[Backend]) -> None:
    for member in members:
        assert isinstance(member, Recorded)
        member.tree = None


def used(members: Iterable[Backend]) -> list[Recorded]:
    """The members that were asked since `forget`."""
    return [each for each in members if isinstance(each, Recorded) and each.tree is not None]


def check_prompt_is_exact(members: Sequence[Backend], prompt: str, generation: Generation) -> None:
    """Fail unless every member holds exactly the prompt and the response after every commit.

    Until the spaces at the end of the prompt are written, a member may hold some of them only.
    Rounds are compared up to the first one with U+FFFD, for bytes that are no character.
    """
    stripped = prompt.rstrip(" ")
    spans = [each.text for each in generation.rounds]
    comparable = next((n for n, text in enumerate(spans) if INCOMPLETE in text), len(spans))
    written = [text for text in accumulate(spans[:comparable]) if text]
    for member in used(members):
        base, held = member.prompt, member.read()
        start = stripped if base.startswith(stripped) else member.spelled(stripped)
        early = [start + " " * n for n in range(len(prompt) - len(stripped) + 1)]
        texts = [early[-1] + text for text in written]
        assert base in (start, early[-1]), f"{member.name}: the prompt became {base!r}"
        if comparable == len(spans):
            assert held in (texts[-1:] or early), f"{member.name} holds {held!r}, not {texts[-1:]}"
        for end in member.seen:
            now = member.read(end)
            is_later = comparable < len(spans) and now.startswith((texts or early)[-1])
            assert now in early or now in texts or is_later, f"{member.name} held {now!r}"


def check_reply_is_exact(members: Sequence[Backend], generation: Generation) -> None:
    """Fail unless all members hold the reply, each after whitespace of its own."""
    joined = "".join(each.text for each in generation.rounds)
    for text in (generation.text, joined):
        assert text == text.lstrip(), f"{text!r} shows whitespace"
    comparable = joined.split(INCOMPLETE)[0]
    for member in used(members):
        held, base = member.read(), member.prompt
        assert held.startswith(base)
        reply = held[len(base) :].lstrip()
        is_right = reply == joined if comparable == joined else reply.startswith(comparable)
        assert is_right, f"{member.name} holds {reply!r}, not {joined!r}"


def counted_tokens(member: Recorded, prompt: str) -> int:
    """Number of tokens after the prompt that do not hold its spaces alone."""
    assert member.tree is not None
    first, last = member.tree.prompt_tokens, len(member.tree.ids)
    return sum(not prompt.startswith(member.read(end)) for end in range(first + 1, last + 1))
