"""A member without a model, for tests of this project and of other projects."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.grammar.matchers import grammar_tokenizer
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.tree.adjustment import NOTHING, changed, log_sum
from adafuse_llm.tree.sampling import token_codes
from adafuse_llm.tree.tokens import Next, Node, TokenTree, is_allowed

END = "<end>"
Rule = Callable[[str], Mapping[str, float]]


class FakeBackend(Backend):
    """A member whose next-token distribution is a function of the text so far.

    The codec splits a text greedily into the longest known tokens; every other character becomes a
    token of its own. The member caches nothing, so every evaluated node costs one pass.

    Args:
        name: the member's name.
        rule: a function that takes the text so far (prompt and response) and returns the
            probabilities of the next tokens, by their texts. The token ``END`` ends the response.
            The probabilities may sum to less than 1.
        vocabulary: texts that are tokens. Without `is_complete`, every character is a token, too.
        is_complete: whether `vocabulary` lists every token, single characters included. If so, any
            other token raises an error. Otherwise, the engine cannot restrict the next tokens.
        context_window: maximum number of tokens in a sequence; None for no limit.
        device: the reported device. Members on different devices run at the same time.

    Attributes:
        passes: number of nodes that the member has evaluated, for assertions in tests.
    """

    knows_distributions = True

    def __init__(
        self,
        name: str,
        rule: Rule,
        vocabulary: Sequence[str] = (),
        context_window: int | None = None,
        *,
        is_complete: bool = False,
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.context_window = context_window
        self.device = device
        self.passes = 0
        self._rule = rule
        self.codec: FakeCodec = FakeCodec(vocabulary, is_complete=is_complete)
        self.end_ids = frozenset({self.codec.end_id})

    @property
    def token_texts(self) -> Sequence[str] | None:
        return self.codec.texts if self.codec.is_complete else None

    @property
    def follows_grammars(self) -> bool:
        return self.codec.is_complete

    def grammar_tokenizer(self) -> Any:
        def encode(text: bytes) -> list[int]:
            return self.codec.encode_prompt(text.decode())

        tokens, ends = [text.encode() for text in self.codec.texts], [self.codec.end_id]
        return grammar_tokenizer(tokens, ends, ends, encode)

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        results = []
        for query in queries:
            self.passes += len(query.evaluate)
            parents = [node.parent for node in query.score if node.parent is not None]
            # compute all distributions first, because a rule can add tokens to the vocabulary
            known = {node: self._after(query.tree, node) for node in (*query.evaluate, *parents)}
            results.append(_answered(query, known.__getitem__, self.codec.texts, self.end_ids))
        return results

    def _after(self, tree: TokenTree, node: Node) -> dict[int, float]:
        """Return the log-probabilities of tokens after a node, by id, as `_ordered` sorts them."""
        rule = self._rule(self.codec.decode([*tree.ids, *tree.tokens(node)]))
        logprobs = {
            self.codec.token(text): math.log(p) if p > 0 else -math.inf for text, p in rule.items()
        }
        changes = tree.changes(node)
        return _ordered(logprobs if changes is None else changed(logprobs, changes))


def answered(
    backend: Backend, query: Query, logits: Callable[[tuple[int, ...]], Iterable[float]]
) -> QueryResult:
    """Return the result of a query from plain logits, without any cache.

    Args:
        backend: a member that knows distributions. If it has no `token_texts`, the result has no
            ``Next.word_end_logprob``.
        query: the query.
        logits: a function that takes token ids, and returns the logits after them, [vocabulary], as
            a sequence or a tensor.

    Raises:
        ValueError: ``Node.allowed`` permits no token after a node.
    """
    import numpy as np  # takes long

    @cache
    def after(node: Node) -> dict[int, float]:
        ids = (*query.tree.ids, *query.tree.tokens(node))
        changes = query.tree.changes(node) or NOTHING.changes(ids, 0)
        return _ordered(changed(dict(enumerate(np.asarray(logits(ids), float).tolist())), changes))

    return _answered(query, after, backend.token_texts, backend.end_ids)


def _ordered(logprobs: Mapping[int, float]) -> dict[int, float]:
    """Sort log-probabilities, which have token ids as keys: highest first, equal ones by id."""
    order = sorted(sorted(logprobs), key=logprobs.__getitem__, reverse=True)
    return {token: logprobs[token] for token in order}


def _answered(
    query: Query,
    after: Callable[[Node], Mapping[int, float]],
    texts: Sequence[str] | None,
    end_ids: frozenset[int],
) -> QueryResult:
    """Return the result of a query. `after` returns sorted log-probabilities (`_ordered`)."""
    ending = end_ids.union(token for token, text in enumerate(texts or ()) if text[:1].isspace())
    nexts = []
    for node in query.evaluate:
        # find the tokens that may follow the node
        likely = every = after(node)
        if node.allowed is not None:
            likely = {t: p for t, p in every.items() if is_allowed(node.allowed, t)}
        if not likely:
            raise ValueError(f"no token can follow {query.tree.tokens(node)!r}")
        # draw a token
        chosen = None
        if node.draw is not None:
            import torch  # takes long

            from adafuse_llm.backends.logits.draw import drawn, signed

            ids = sorted(likely)
            codes = token_codes(texts, end_ids, ids[-1] + 1)
            ends = [place for place, token in enumerate(ids) if token in ending]
            row = torch.tensor([[likely[token] for token in ids]], dtype=torch.float64)
            place = drawn(row, [node.draw], signed([codes[token] for token in ids]), ends)
            chosen = ids[int(place)]
        summary = Next(
            tuple(likely)[: query.top],
            tuple(likely.values())[: query.top],
            _total(every, end_ids),
            0.0 if node.allowed is None else _total(likely, likely),
            chosen,
            _total(likely, ending) if query.word_ends and texts is not None else None,
        )
        nexts.append(summary)
    scored = [(node.parent, node.token) for node in query.score if node.parent is not None]
    logprobs = tuple(after(parent).get(token, -math.inf) for parent, token in scored)
    return QueryResult(tuple(nexts), logprobs, len(nexts), len(nexts))


def _total(logprobs: Mapping[int, float], tokens: Iterable[int]) -> float:
    """Return the natural logarithm of the total probability of some tokens."""
    return log_sum([logprobs[token] for token in tokens if token in logprobs])


class FakeCodec(TextCodec):
    """A codec whose tokens are strings, and whose vocabulary grows unless it is complete."""

    # id of the token `END`
    end_id = 0

    def __init__(self, vocabulary: Sequence[str] = (), *, is_complete: bool = False) -> None:
        self.is_complete = is_complete
        self._texts = [END, *vocabulary]
        self._ids = {text: number for number, text in enumerate(self._texts)}
        self._longest = max(map(len, self._texts))
        self._growing = threading.Lock()

    def token(self, text: str) -> int:
        """Return the id of the token `text`. A vocabulary that may grow adds a missing token."""
        with self._growing:
            if text not in self._ids:
                if self.is_complete:
                    raise ValueError(f"the vocabulary has no token {text!r}")
                self._texts.append(text)
                self._ids[text] = len(self._texts) - 1
                self._longest = max(self._longest, len(text))
            return self._ids[text]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode_continuation((), text)[0]

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        tokens, at = [], 0
        # take the longest known token (not `END`, which no text can spell), or else one character
        while at < len(text):
            size = next(
                size
                for size in range(min(self._longest, len(text) - at), 0, -1)
                if size == 1 or (text[at : at + size] in self._ids and text[at : at + size] != END)
            )
            tokens.append(self.token(text[at : at + size]))
            at += size
        return tokens, True

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in tokens)
