"""Compute results from the logits that a member keeps for its requests.

Shapes: n nodes, v vocabulary, t likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch

from adafuse_llm.backends.base import Query, QueryResult
from adafuse_llm.backends.logits.adjust import adjusted
from adafuse_llm.backends.logits.draw import REDO, drawn, likeliest, signed
from adafuse_llm.backends.logits.state import RequestLogits, to_device
from adafuse_llm.backends.vocabulary import Vocabulary
from adafuse_llm.tree.sampling import token_codes
from adafuse_llm.tree.tokens import Next, Node


@dataclass
class TokenTable:
    """Facts about a member's tokens on which results depend."""

    vocabulary: Vocabulary
    end_ids: frozenset[int]
    size: int
    device: torch.device | str = "cpu"

    @cached_property
    def ends(self) -> torch.Tensor:
        """Ids of the tokens that end the sequence."""
        return torch.tensor(sorted(self.end_ids), device=self.device).long()

    @cached_property
    def codes(self) -> torch.Tensor:
        """Hashes of the tokens, [v], in the form that `drawn` needs."""
        codes = token_codes(self.vocabulary.token_texts, self.end_ids, self.size)
        return signed(codes).to(self.device)

    @cached_property
    def word_ends(self) -> torch.Tensor:
        """Ids of the tokens that begin with whitespace or end the sequence."""
        spaces = {at for at, text in enumerate(self.vocabulary.token_texts) if text[:1].isspace()}
        known = sorted(token for token in self.end_ids | spaces if token < self.size)
        return torch.tensor(known, device=self.device).long()


def read(
    queries: Sequence[Query], states: Sequence[RequestLogits], tokens: TokenTable
) -> list[QueryResult]:
    """Return the results of queries from the states of their requests, which hold all logits."""
    pairs = list(zip(queries, states, strict=True))
    top = max(query.top for query in queries)
    word_ends = any(query.word_ends for query in queries)
    evaluated = [(state, node) for query, state in pairs for node in query.evaluate]
    scored = [(state, node) for query, state in pairs for node in query.score]
    # collect all numbers in one tensor
    parts: list[torch.Tensor] = []
    if evaluated:
        parts.append(_summaries(evaluated, tokens, top, word_ends=word_ends).flatten())
    if scored:
        parts.append(logprobs(scored))
    # wait for the device once, for all numbers
    numbers = torch.cat(parts).cpu() if parts else torch.empty(0)
    size = len(numbers) - len(scored)
    rows = numbers[:size].view(len(evaluated), -1).tolist() if evaluated else []
    # compute the few rows with ties or unfinished draws again
    if unsure := [place for place, row in enumerate(rows) if row[0]]:
        again = [evaluated[place] for place in unsure]
        exact = _summaries(again, tokens, top, word_ends=word_ends, exact=True)
        for place, row in zip(unsure, exact.tolist(), strict=True):
            rows[place] = row
    # hand the numbers out in the order of the queries
    summaries = iter(rows)
    scores = iter(numbers[size:].tolist())
    return [
        QueryResult(
            tuple(
                _next(next(summaries), query, node.allowed is not None) for node in query.evaluate
            ),
            tuple(islice(scores, len(query.score))),
            *state.costs(),
        )
        for query, state in pairs
    ]


def _summaries(
    nodes: Sequence[tuple[RequestLogits, Node]],
    table: TokenTable,
    top: int,
    *,
    word_ends: bool,
    exact: bool = False,
) -> torch.Tensor:
    """Return a row of numbers for each node, [n, 5 + 2 t], which `_next` turns into a summary.

    If the first number is not 0, the row must be computed again with `exact`.
    """
    logits, total = _changed(nodes)
    allowed = [node.allowed for _, node in nodes]
    draws = [node.draw for _, node in nodes]
    ends, mass = _total(logits, table.ends), total
    # masks change all numbers except the probability of the end
    if any(mask is not None for mask in allowed):
        logits = masked(logits, allowed)
        mass = logits.logsumexp(-1, keepdim=True)
    # compute ends of words, draws, and the likeliest tokens
    words = _total(logits, table.word_ends) if word_ends else torch.full_like(total, math.nan)
    drew = torch.full_like(total, -1)
    if any(draws):
        drew = drawn(logits, draws, table.codes, table.word_ends, exact=exact)
    values, ids, is_tied = likeliest(logits, top, exact=exact)
    unsure = torch.zeros_like(is_tied) if exact else is_tied | (drew == REDO)
    # infinite logits give NaN, which the engine reports; float32 represents ids to 2^24 exactly
    logprobs = torch.cat([ends, mass, words, values], -1) - total
    return torch.cat([unsure, logprobs, drew, ids], -1)


def _next(row: Sequence[float], query: Query, is_restricted: bool) -> Next:
    """Return a summary from a row of `_summaries`."""
    _, ends, mass, words, *numbers = row
    logprobs, (drew, *ids) = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    count = min(query.top, len(ids))
    # leave out forbidden tokens, which come last
    if is_restricted:
        count = min(count, sum(logprob != -math.inf for logprob in logprobs))
    return Next(
        tuple(map(int, ids[:count])),
        tuple(logprobs[:count]),
        ends,
        mass,
        None if drew < 0 else int(drew),
        words if query.word_ends else None,
    )


def logprobs(nodes: Sequence[tuple[RequestLogits, Node]]) -> torch.Tensor:
    """Return the log-probability of each node's token after its parent, [n]."""
    parents = [(state, node.parent) for state, node in nodes if node.parent]
    # without changes, no row need be copied
    rows = [state.rows[parent] for state, parent in parents]
    if any(state.tree.adjustment for state, _ in parents):
        rows = list(zip(*_changed(parents), strict=True))
    picked = [values[node.token] for (values, _), (_, node) in zip(rows, nodes, strict=True)]
    return torch.stack(picked) - torch.cat([total for _, total in rows])


def _changed(nodes: Sequence[tuple[RequestLogits, Node]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the adjusted logits after nodes, [n, v], and the logs of their summed exps, [n, 1]."""
    values, totals = zip(*(state.rows[node] for state, node in nodes), strict=True)
    changes = [state.tree.changes(node) for state, node in nodes]
    written = [state.written for state, _ in nodes]
    return adjusted(torch.stack(values), torch.stack(totals), changes, written)


def _total(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of exp(logit) over some tokens, [n, 1]; -inf if there are none."""
    return logits.index_select(-1, ids.to(logits.device)).logsumexp(-1, keepdim=True)


def masked(logits: torch.Tensor, allowed: Sequence[bytes | None]) -> torch.Tensor:
    """Return logits, [n, v], with minus infinity for tokens that ``Node.allowed`` forbids."""
    permitted = np.ones(logits.shape, dtype=np.bool_)
    for row, mask in zip(permitted, allowed, strict=True):
        # bits beyond the mask are 0
        if mask is not None:
            bits = np.frombuffer(mask, np.uint8)
            row[:] = np.unpackbits(bits, count=len(row), bitorder="little")
    return logits.masked_fill(~to_device(torch.from_numpy(permitted), logits.device), -math.inf)
