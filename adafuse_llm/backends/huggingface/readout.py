"""Read results off the logits that a member keeps for its requests.

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
    """Read the results of queries whose nodes have been evaluated, in one transfer."""
    pairs = list(zip(queries, states, strict=True))
    top = max(query.top for query in queries)
    wanted = [state.rows[node] for query, state in pairs for node in query.evaluate]
    scored = [node.token for query in queries for node in query.score]
    decoder.check(scored)
    parents = [
        state.rows[node.parent] for query, state in pairs for node in query.score if node.parent
    ]
    summaries, logprobs = _numbers(wanted, parents, scored, top, end_ids)
    next_summary, next_logprob = iter(summaries), iter(logprobs)
    results = []
    for query, state in pairs:
        nexts = tuple(_cut(next(next_summary), query.top) for _ in query.evaluate)
        own = tuple(next(next_logprob) for _ in query.score)
        passes, tokens, reused = state.costs()
        results.append(NodeResult(nexts, own, passes, tokens, reused))
    return results


def _cut(summary: Next, top: int) -> Next:
    """The summary with `top` tokens."""
    if len(summary.tokens) <= top:
        return summary
    return Next(summary.tokens[:top], summary.logprobs[:top], summary.end_logprob)


def _numbers(
    wanted: Sequence[tuple[Logits, int]],
    parents: Sequence[tuple[Logits, int]],
    tokens: Sequence[int],
    top: int,
    end_ids: torch.Tensor,
    *,
    by_sorting: bool = False,
) -> tuple[list[Next], list[float]]:
    """Summaries of the wanted rows, and log-probabilities of `tokens` after the parents' rows."""
    parts = []
    width = 0
    if wanted:
        logits, total = gather(wanted)
        values, likely, tied = likeliest(logits, top, by_sorting=by_sorting)
        ends = logits.index_select(-1, end_ids.to(logits.device))  # [n, end ids]
        ends = ends.logsumexp(-1, keepdim=True)  # -inf without such ids
        table = torch.cat(
            [values - total, ends - total, likely.to(logits.dtype), tied.to(logits.dtype)], -1
        )  # [n, 2t + 2]; ids fit: float32 counts to 2^24
        width = table.shape[1]
        parts.append(table.flatten())
    if parents:
        logits, total = gather(parents)
        chosen = logits.gather(-1, to_device(torch.tensor(tokens), logits.device)[:, None])
        parts.append((chosen - total).flatten())
    if not parts:
        return [], []
    numbers = torch.cat(parts).tolist()
    rows = [numbers[i * width : (i + 1) * width] for i in range(len(wanted))]
    count = (width - 2) // 2
    if any(row[-1] for row in rows):
        return _numbers(wanted, parents, tokens, top, end_ids, by_sorting=True)
    summaries = [
        Next(tuple(map(int, row[count + 1 : -1])), tuple(row[:count]), row[count]) for row in rows
    ]
    return summaries, numbers[len(rows) * width :]


def likeliest(
    logits: torch.Tensor, top: int, *, by_sorting: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `top` highest logits and their ids, [n, t] each, equal ones by lower id; and whether a
    lower id may have been left out, [n, 1].

    ``topk`` leaves the order of equal values open. So one more value is requested: a lower
    id can only be missing if that value equals the last wanted one. Sorting misses none.
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
