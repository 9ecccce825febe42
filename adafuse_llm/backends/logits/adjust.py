"""Apply the changes of `adafuse_llm.tree.adjustment` to logits, for many nodes at a time.

Shapes: n nodes, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, repeat

import torch

from adafuse_llm.backends.logits.state import to_device
from adafuse_llm.tree.adjustment import Changes


def adjusted(
    logits: torch.Tensor, total: torch.Tensor, changes: Sequence[Changes | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return changed logits and their totals. Rows without changes stay as they are.

    Args:
        logits: the logits, [n, v], which are not overwritten.
        total: logarithms of the rows' summed exponentials, [n, 1].
        changes: the changes of each row, or None.
    """
    places = [row for row, each in enumerate(changes) if each is not None]
    if not places:
        return logits, total
    rows = to_device(torch.tensor(places), logits.device)
    chosen = logits.index_select(0, rows)
    _change(chosen, [each for each in changes if each is not None])
    totals = chosen.logsumexp(-1, keepdim=True)
    if len(places) == len(changes):
        return chosen, totals
    return logits.index_copy(0, rows, chosen), total.index_copy(0, rows, totals)


def _change(logits: torch.Tensor, changes: Sequence[Changes]) -> None:
    """Change logits, [n, v], in place."""
    added = [each.added for each in changes]
    if any(added):
        where, numbers = _entries(logits, added, [each.values() for each in added])
        logits.index_put_(where, numbers, accumulate=True)
    penalized = [each.penalized for each in changes]
    if any(penalized):
        penalties = [repeat(each.penalty, len(each.penalized)) for each in changes]
        where, penalty = _entries(logits, penalized, penalties)
        values = logits[where]
        logits.index_put_(where, torch.where(values < 0, values * penalty, values / penalty))
    taken = [each.taken for each in changes]
    if any(taken):
        where, numbers = _entries(logits, taken, [each.values() for each in taken])
        logits.index_put_(where, -numbers, accumulate=True)


def _entries(
    logits: torch.Tensor, tokens: Sequence[Collection[int]], numbers: Sequence[Iterable[float]]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the indices of each row's tokens, and the numbers of these entries.

    Tokens that the logits do not have, such as the last ones of a larger vocabulary of the input,
    are left out.
    """
    rows = torch.repeat_interleave(
        torch.arange(len(tokens)), torch.tensor([len(each) for each in tokens])
    )
    ids = torch.tensor(list(chain.from_iterable(tokens)))
    values = torch.tensor(list(chain.from_iterable(numbers)), dtype=logits.dtype)
    known = ids < logits.shape[-1]
    rows, ids, values = (to_device(each[known], logits.device) for each in (rows, ids, values))
    return (rows, ids), values
