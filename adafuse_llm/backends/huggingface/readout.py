"""Compute results from the logits that a member keeps for its requests.

Shapes: n nodes, v vocabulary, t likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.kv import to_device
from adafuse_llm.backends.huggingface.state import Logits, RequestState, gather
from adafuse_llm.tree import Next


def read(
    queries: Sequence[NodeQuery],
    states: Sequence[RequestState],
    decoder: Decoder,
    end_ids: torch.Tensor,
) -> list[NodeResult]:
    """Return the results of queries whose nodes are evaluated. Use one transfer from the device."""
    pairs = list(zip(queries, states, strict=True))
    top = max(query.top for query in queries)
    evaluated = [state.rows[node] for query, state in pairs for node in query.evaluate]
    scored = [node.token for query in queries for node in query.score]
    decoder.check(scored)
    parents = [
        state.rows[node.parent] for query, state in pairs for node in query.score if node.parent
    ]
    summaries, logprobs = _summarize(evaluated, parents, scored, top, end_ids)
    next_summary, next_logprob = iter(summaries), iter(logprobs)
    results = []
    for query, state in pairs:
        nexts = tuple(_shortened(next(next_summary), query.top) for _ in query.evaluate)
        own = tuple(next(next_logprob) for _ in query.score)
        passes, tokens, reused = state.costs()
        results.append(NodeResult(nexts, own, passes, tokens, reused))
    return results


def _shortened(summary: Next, top: int) -> Next:
    """Return `summary` with its first `top` tokens."""
    if len(summary.tokens) <= top:
        return summary
    return Next(summary.tokens[:top], summary.logprobs[:top], summary.end_logprob)


def _summarize(
    evaluated: Sequence[tuple[Logits, int]],
    parents: Sequence[tuple[Logits, int]],
    tokens: Sequence[int],
    top: int,
    end_ids: torch.Tensor,
    *,
    by_sorting: bool = False,
) -> tuple[list[Next], list[float]]:
    """Return a summary of each row in `evaluated`, and the log-probabilities of `tokens`.

    The log-probability of a token comes from the row of its parent in `parents`.
    """
    parts = []
    width = 0
    if evaluated:
        logits, total = gather(evaluated)
        values, likely, tied = likeliest(logits, top, by_sorting=by_sorting)
        ends = logits.index_select(-1, end_ids.to(logits.device))  # [n, end ids]
        ends = ends.logsumexp(-1, keepdim=True)  # -inf if there are no end ids
        table = torch.cat(
            [values - total, ends - total, likely.to(logits.dtype), tied.to(logits.dtype)], -1
        )  # [n, 2t + 2]; float32 represents ids up to 2^24 exactly
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
    count = (width - 2) // 2
    if any(row[-1] for row in rows):
        return _summarize(evaluated, parents, tokens, top, end_ids, by_sorting=True)
    summaries = [
        Next(tuple(map(int, row[count + 1 : -1])), tuple(row[:count]), row[count]) for row in rows
    ]
    return summaries, numbers[len(rows) * width :]


def likeliest(
    logits: torch.Tensor, top: int, *, by_sorting: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `top` highest logits and their token ids. Equal logits are ordered by token id.

    If several logits are equal, ``topk`` may return any of them. So this function requests one more
    value than it returns. If the additional value equals the last returned value, a lower id may be
    missing. With `by_sorting`, no id is missing.

    Returns:
        The logits and their ids, [n, t] each; and whether a lower id may be missing, [n, 1].
    """
    top = min(top, logits.shape[-1])
    if by_sorting:
        tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        return logits.gather(-1, tokens), tokens, torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    values, tokens = logits.topk(min(top + 1, logits.shape[-1]))
    tied = (values[:, top:] == values[:, top - 1 : top]).any(-1, keepdim=True)
    tokens, order = tokens[:, :top].sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, by_value), tied
