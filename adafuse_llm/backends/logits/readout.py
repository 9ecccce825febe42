"""Compute results from the logits that a member keeps for its requests.

Shapes: n nodes, v vocabulary, t likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adafuse_llm.adjustment import Changes
from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.backends.logits.adjust import adjusted
from adafuse_llm.backends.logits.draw import drawn, signed
from adafuse_llm.backends.logits.likeliest import likeliest
from adafuse_llm.backends.logits.rows import Logits, RequestLogits, gather, to_device
from adafuse_llm.sampling import Draw, token_codes
from adafuse_llm.tree import Next, Node, TokenTree


class TokenTable:
    """What results need to know about a member's tokens.

    Args:
        end_ids: ids of the end-of-sequence tokens.
        texts: function that returns the text of each token (`Backend.token_texts`), which
            can take seconds.
        size: number of tokens in a distribution.
        device: device of the tensors.

    Attributes:
        ends: ids of the end-of-sequence tokens.
        codes: hashes of the tokens, [v], as `drawn` takes them; empty before `prepare_draws`.
    """

    def __init__(
        self,
        end_ids: Collection[int],
        texts: Callable[[], Sequence[str]],
        size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._end_ids = frozenset(end_ids)
        self._texts = texts
        self._size = size
        self._device = device
        self.ends = torch.tensor(sorted(end_ids), device=device).long()
        self.codes = torch.empty(0, dtype=torch.long, device=device)

    def prepare_draws(self) -> None:
        """Compute the hashes of the tokens, unless they are known."""
        if not len(self.codes):
            codes = token_codes(self._texts(), self._end_ids, self._size)
            self.codes = signed(codes).to(self._device)

    @cached_property
    def word_ends(self) -> torch.Tensor:
        """Ids of the tokens that begin with whitespace or end the sequence."""
        spaces = {at for at, text in enumerate(self._texts()) if text[:1].isspace()}
        known = sorted(each for each in self._end_ids | spaces if each < self._size)
        return torch.tensor(known, device=self._device).long()


def read(
    queries: Sequence[Query],
    states: Sequence[RequestLogits],
    tokens: TokenTable,
) -> list[QueryResult]:
    """Return the results of queries whose nodes are evaluated. Use one transfer from the device.

    Args:
        queries: the queries.
        states: the state of each query's request.
        tokens: the member's tokens.
    """
    pairs = list(zip(queries, states, strict=True))
    top = max(query.top for query in queries)
    evaluated = [state.rows[node] for query, state in pairs for node in query.evaluate]
    scored = [node.token for query in queries for node in query.score]
    parents = [
        state.rows[node.parent] for query, state in pairs for node in query.score if node.parent
    ]
    changes = _changes(queries)
    allowed = [node.allowed for query in queries for node in query.evaluate]
    draws = [node.draw for query in queries for node in query.evaluate]
    word_ends = any(query.word_ends for query in queries)
    all_summaries, all_logprobs = _summarize(
        evaluated,
        allowed,
        draws,
        parents,
        scored,
        changes=changes,
        top=top,
        table=tokens,
        word_ends=word_ends,
    )
    summaries, logprobs = iter(all_summaries), iter(all_logprobs)
    results = []
    for query, state in pairs:
        nexts = tuple(islice(summaries, len(query.evaluate)))
        if query.top < top:
            nexts = tuple(_shortened(summary, query.top) for summary in nexts)
        if word_ends and not query.word_ends:
            nexts = tuple(replace(summary, word_end_logprob=None) for summary in nexts)
        own = tuple(islice(logprobs, len(query.score)))
        results.append(QueryResult(nexts, own, *state.costs()))
    return results


def _changes(queries: Sequence[Query]) -> list[Changes | None]:
    """Return the changes of the evaluated rows, and then of the parents' rows."""
    known: dict[Node, Changes | None] = {}
    wanted = [(query.tree, node) for query in queries for node in query.evaluate]
    wanted += ((q.tree, node.parent) for q in queries for node in q.score if node.parent)
    for tree, node in wanted:
        if node not in known:
            known[node] = tree.changes(node)
    return [known[node] for _, node in wanted]


def _shortened(summary: Next, top: int) -> Next:
    """Return `summary` with its first `top` tokens."""
    if len(summary.tokens) <= top:
        return summary
    return replace(summary, tokens=summary.tokens[:top], logprobs=summary.logprobs[:top])


def _summarize(
    evaluated: Sequence[tuple[Logits, int]],
    allowed: Sequence[bytes | None],
    draws: Sequence[Draw | None],
    parents: Sequence[tuple[Logits, int]],
    tokens: Sequence[int],
    *,
    changes: Sequence[Changes | None],
    top: int,
    table: TokenTable,
    word_ends: bool,
    by_sorting: bool = False,
) -> tuple[list[Next], list[float]]:
    """Return a summary of each row in `evaluated`, and the log-probabilities of `tokens`.

    A summary lists only tokens that the row's mask in `allowed` permits, in the format of
    ``Node.allowed``, and has the token that the row's draw in `draws` draws. The log-probability of
    a token comes from the row of its parent in `parents`. The rows change first, as `changes` says:
    those of `evaluated`, and then those of `parents`.
    """
    parts = []
    if evaluated:
        logits, total = adjusted(*gather(evaluated), changes[: len(evaluated)])
        mass = total
        ends = _total(logits, table.ends)
        if any(mask is not None for mask in allowed):
            logits = masked(logits, allowed)
            mass = logits.logsumexp(-1, keepdim=True)
        words = _total(logits, table.word_ends) if word_ends else torch.full_like(total, math.nan)
        drew = drawn(logits, draws, table.codes) if any(draws) else torch.full_like(total, -1)
        if by_sorting:
            values, likely, _ = likeliest(logits, top, by_sorting=True)
        else:  # one more than necessary, to find ties
            values, likely = logits.topk(min(top + 1, logits.shape[-1]))
        numbers = torch.cat([total, ends, mass, words, drew, values, likely], -1)
        # float32 represents ids up to 2^24 exactly
        parts.append(numbers.flatten())
    if parents:
        logits, total = adjusted(*gather(parents), changes[len(evaluated) :])
        chosen = logits.gather(-1, to_device(torch.tensor(tokens), logits.device)[:, None])
        parts.append((chosen - total).flatten())
    if not parts:
        return [], []
    read = torch.cat(parts).cpu().numpy()
    size = len(read) - len(parents)
    summaries = _to_nexts(read[:size], allowed, top, word_ends) if evaluated else []
    if summaries is None:
        return _summarize(
            evaluated,
            allowed,
            draws,
            parents,
            tokens,
            changes=changes,
            top=top,
            table=table,
            word_ends=word_ends,
            by_sorting=True,
        )
    return summaries, read[size:].tolist()


def _to_nexts(
    table: NDArray[np.floating[Any]],
    allowed: Sequence[bytes | None],
    top: int,
    word_ends: bool,
) -> list[Next] | None:
    """Return the rows of the numbers in `_summarize` as summaries.

    Return None if several tokens are as likely as the last one, so that the table may lack the one
    with the lowest id.
    """
    rows = table.reshape(len(allowed), -1)
    total, ends, mass, words, drew = rows[:, :5].T
    half = (rows.shape[1] + 5) // 2
    values, ids = rows[:, 5:half], rows[:, half:]
    if values.shape[1] > top:
        tied = values[:, top] == values[:, top - 1]
        if any(mask is not None for mask in allowed):
            tied &= np.isfinite(values[:, top])  # the order of forbidden tokens does not matter
        if tied.any():
            return None
        values, ids = values[:, :top], ids[:, :top]
    if (values[:, 1:] == values[:, :-1]).any():  # equal values are ordered by token id
        order = np.lexsort((ids, -values))
        values, ids = (np.take_along_axis(each, order, axis=1) for each in (values, ids))
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, which the engine reports
        columns = (values - total[:, None], ends - total, mass - total, drew, words - total)
    numbers = (column.tolist() for column in (ids.astype(np.int64), *columns))
    return [
        Next(
            *_permitted(tokens, logprobs, mask),
            ends,
            mass,
            None if drew < 0 else int(drew),
            words if word_ends else None,
        )
        for tokens, logprobs, ends, mass, drew, words, mask in zip(*numbers, allowed, strict=True)
    ]


def _permitted(
    tokens: Sequence[int], logprobs: Sequence[float], mask: bytes | None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Drop the tokens that a mask does not permit. They come after those that it permits."""
    count = len(tokens)
    if mask is not None:
        count = sum(logprob != -math.inf for logprob in logprobs)
    return tuple(tokens[:count]), tuple(logprobs[:count])


def _total(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of exp(logit) over some tokens, [n, 1]; -inf if there are none."""
    return logits.index_select(-1, ids.to(logits.device)).logsumexp(-1, keepdim=True)


def masked(logits: torch.Tensor, allowed: Sequence[bytes | None]) -> torch.Tensor:
    """Return logits, [n, v], in which tokens that a mask does not permit are minus infinity.

    Args:
        logits: the logits.
        allowed: for each row, a mask in the format of ``Node.allowed``, or None.
    """
    size = logits.shape[-1]
    permitted = np.ones((len(allowed), size), dtype=np.bool_)
    for row, mask in zip(permitted, allowed, strict=True):
        if mask is not None:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=size, bitorder="little")
            row[:] = bits  # missing bits are 0
    return logits.masked_fill(~to_device(torch.from_numpy(permitted), logits.device), -math.inf)


def distribution(tree: TokenTree, node: Node) -> NDArray[np.floating[Any]]:
    """Return the log-probabilities of all tokens after an evaluated node, [v]."""
    assert isinstance(tree.state, RequestLogits), "the node is not evaluated"
    row = tree.state.logits(node)[None]
    changed = adjusted(row, row[:, :1], [tree.changes(node)])[0][0]
    found: NDArray[np.floating[Any]] = changed.log_softmax(-1).cpu().numpy()
    return found
