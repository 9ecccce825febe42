"""Apply the changes of `adafuse_llm.tree.adjustment` to logits, for many nodes at a time.

Shapes: n nodes, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, repeat

import torch

from adafuse_llm.backends.logits.state import Written, to_device
from adafuse_llm.tree.adjustment import Changes


def adjusted(
    logits: torch.Tensor,
    total: torch.Tensor,
    changes: Sequence[Changes | None],
    written: Sequence[Written],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return changed logits, [n, v], and the logarithms of their summed exponentials, [n, 1].

    Args:
        logits: the logits, [n, v], which are not overwritten.
        total: logarithms of the rows' summed exponentials, [n, 1].
        changes: the changes of each row, or None.
        written: the tokens that the request of each row has committed.
    """
    pairs = zip(changes, written, strict=True)
    work = {row: (each, own) for row, (each, own) in enumerate(pairs) if each is not None}
    if not work:
        return logits, total
    rows = to_device(torch.tensor([*work]), logits.device)
    chosen = logits.index_select(0, rows)
    _change(chosen, [*work.values()])
    totals = chosen.logsumexp(-1, keepdim=True)
    if len(work) == len(changes):
        return chosen, totals
    return logits.index_copy(0, rows, chosen), total.index_copy(0, rows, totals)


def _change(logits: torch.Tensor, rows: Sequence[tuple[Changes, Written]]) -> None:
    """Change logits, [n, v], in place."""
    changes = [each for each, _ in rows]
    added = [each.added for each in changes]
    if any(added):
        where, numbers = _entries(logits, added, [tokens.values() for tokens in added])
        logits.index_put_(where, numbers, accumulate=True)
    if any(each.committed for each in changes):
        is_penalized = torch.stack([own.mask(each.committed, logits) for each, own in rows])
        new = [each.new for each in changes]
        if any(new):
            where, _ = _entries(logits, new, [repeat(0.0, len(each)) for each in new])
            is_penalized[where] = True
        penalties = torch.tensor([[each.penalty] for each in changes], dtype=logits.dtype)
        penalty = to_device(penalties, logits.device)
        changed = torch.where(logits < 0, logits * penalty, logits / penalty)
        torch.where(is_penalized, changed, logits, out=logits)
    taken = [each.taken for each in changes]
    if any(taken):
        where, numbers = _entries(logits, taken, [tokens.values() for tokens in taken])
        logits.index_put_(where, -numbers, accumulate=True)


def _entries(
    logits: torch.Tensor, tokens: Sequence[Collection[int]], numbers: Sequence[Iterable[float]]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the indices of the rows' tokens that the logits have, and the numbers of these."""
    rows = torch.repeat_interleave(
        torch.arange(len(tokens)), torch.tensor([len(ids) for ids in tokens])
    )
    ids = torch.tensor(list(chain.from_iterable(tokens)))
    values = torch.tensor(list(chain.from_iterable(numbers)), dtype=logits.dtype)
    known = ids < logits.shape[-1]
    rows, ids, values = (to_device(tensor[known], logits.device) for tensor in (rows, ids, values))
    return (rows, ids), values
