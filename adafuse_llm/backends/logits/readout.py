"""Compute results from the logits that a member keeps for its requests.

Shapes: n nodes, v vocabulary, t likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.backends.logits.draw import drawn
from adafuse_llm.backends.logits.likeliest import likeliest
from adafuse_llm.backends.logits.rows import Logits, RequestLogits, gather, to_device
from adafuse_llm.sampling import Draw
from adafuse_llm.tree import Next


def read(
    queries: Sequence[NodeQuery],
    states: Sequence[RequestLogits],
    end_ids: torch.Tensor,
    codes: torch.Tensor,
) -> list[NodeResult]:
    """Return the results of queries whose nodes are evaluated. Use one transfer from the device.

    Args:
        queries: the queries.
        states: the state of each query's request.
        end_ids: ids of the end-of-sequence tokens.
        codes: hashes of the tokens, [v], as `drawn` takes them. They can be empty while no node
            draws its token.
    """
    pairs = list(zip(queries, states, strict=True))
    top = max(query.top for query in queries)
    evaluated = [state.rows[node] for query, state in pairs for node in query.evaluate]
    scored = [node.token for query in queries for node in query.score]
    parents = [
        state.rows[node.parent] for query, state in pairs for node in query.score if node.parent
    ]
    allowed = [node.allowed for query in queries for node in query.evaluate]
    draws = [node.draw for query in queries for node in query.evaluate]
    all_summaries, all_logprobs = _summarize(
        evaluated, allowed, draws, parents, scored, top=top, end_ids=end_ids, codes=codes
    )
    summaries, logprobs = iter(all_summaries), iter(all_logprobs)
    results = []
    for query, state in pairs:
        nexts = tuple(islice(summaries, len(query.evaluate)))
        if query.top < top:
            nexts = tuple(_shortened(summary, query.top) for summary in nexts)
        own = tuple(islice(logprobs, len(query.score)))
        results.append(NodeResult(nexts, own, *state.costs()))
    return results


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
    top: int,
    end_ids: torch.Tensor,
    codes: torch.Tensor,
    by_sorting: bool = False,
) -> tuple[list[Next], list[float]]:
    """Return a summary of each row in `evaluated`, and the log-probabilities of `tokens`.

    A summary lists only tokens that the row's mask in `allowed` permits, in the format of
    ``Node.allowed``, and has the token that the row's draw in `draws` draws. The log-probability of
    a token comes from the row of its parent in `parents`.
    """
    parts = []
    width = 0
    if evaluated:
        logits, total = gather(evaluated)
        mass = torch.zeros_like(total)
        ends = logits.index_select(-1, end_ids.to(logits.device))  # [n, end ids]
        ends = ends.logsumexp(-1, keepdim=True)  # -inf if there are no end ids
        if any(mask is not None for mask in allowed):
            logits = masked(logits, allowed)
            mass = logits.logsumexp(-1, keepdim=True) - total
        values, likely, tied = likeliest(logits, top, by_sorting=by_sorting)
        if any(mask is not None for mask in allowed):
            tied &= values[:, -1:].isfinite()  # the order of forbidden tokens does not matter
        drew = drawn(logits, draws, codes) if any(draws) else torch.full_like(likely[:, :1], -1)
        columns = [values - total, likely, ends - total, mass, drew, tied]
        table = torch.cat(columns, -1)
        # [n, 2t + 4]; float32 represents ids up to 2^24 exactly
        width = table.shape[1]
        parts.append(table.flatten())
    if parents:
        logits, total = gather(parents)
        chosen = logits.gather(-1, to_device(torch.tensor(tokens), logits.device)[:, None])
        parts.append((chosen - total).flatten())
    if not parts:
        return [], []
    numbers = torch.cat(parts).tolist()
    rows = [numbers[i * width : (i + 1) * width] for i in range(len(evaluated))]
    if any(row[-1] for row in rows):
        return _summarize(
            evaluated,
            allowed,
            draws,
            parents,
            tokens,
            top=top,
            end_ids=end_ids,
            codes=codes,
            by_sorting=True,
        )
    summaries = list(map(_to_next, rows, allowed))
    return summaries, numbers[len(rows) * width :]


def _to_next(row: Sequence[float], mask: bytes | None) -> Next:
    """Return a row of the table in `_summarize` as a summary."""
    count = top = len(row) // 2 - 2
    logprobs, tokens, (ends, mass, drew, _) = row[:top], row[top : 2 * top], row[2 * top :]
    if mask is not None:  # forbidden tokens are listed if there are fewer permitted ones
        count = sum(logprob != -math.inf for logprob in logprobs)
    return Next(
        tuple(map(int, tokens[:count])),
        tuple(logprobs[:count]),
        ends,
        mass,
        None if drew < 0 else int(drew),
    )


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
