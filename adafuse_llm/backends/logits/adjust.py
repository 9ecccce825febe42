"""Apply the changes of `adafuse_llm.tree.adjustment` to the logits of many nodes at a time.

Shapes: n nodes, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from adafuse_llm.backends.logits.state import Written, to_device
from adafuse_llm.tree.adjustment import Changes


def adjusted(
    logits: torch.Tensor,
    total: torch.Tensor,
    changes: Sequence[Changes | None],
    written: Sequence[Written],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the changed logits, [n, v], and the logarithms of their summed exponentials, [n, 1].

    `logits` and `total` are these numbers before the changes, and are not overwritten. `written`
    has the committed tokens of every row's request.
    """
    pairs = zip(changes, written, strict=True)
    work = {row: (each, own) for row, (each, own) in enumerate(pairs) if each is not None}
    if not work:
        return logits, total
    # compute only the rows with changes
    rows = to_device(torch.tensor([*work]), logits.device)
    chosen = logits.index_select(0, rows)
    _change(chosen, [*work.values()])
    totals = chosen.logsumexp(-1, keepdim=True)
    if len(work) == len(changes):
        return chosen, totals
    return logits.index_copy(0, rows, chosen), total.index_copy(0, rows, totals)


def _change(logits: torch.Tensor, rows: Sequence[tuple[Changes, Written]]) -> None:
    """Change logits, [n, v], in place, in the order of the fields of `Changes`."""
    changes = [each for each, _ in rows]
    # biases first
    added = [each.added for each in changes]
    if any(added):
        where, numbers = _entries(logits, added)
        logits.index_put_(where, numbers, accumulate=True)
    # then the repetition penalty, for committed tokens and for those after them
    if any(each.committed for each in changes):
        is_penalized = torch.stack([own.mask(each.committed, logits) for each, own in rows])
        new = [dict.fromkeys(each.new, 0.0) for each in changes]
        if any(new):
            where, _ = _entries(logits, new)
            is_penalized[where] = True
        penalties = torch.tensor([[each.penalty] for each in changes], dtype=logits.dtype)
        penalty = to_device(penalties, logits.device)
        changed = torch.where(logits < 0, logits * penalty, logits / penalty)
        torch.where(is_penalized, changed, logits, out=logits)
    # presence and frequency penalties, and forbidden tokens, last
    taken = [each.taken for each in changes]
    if any(taken):
        where, numbers = _entries(logits, taken)
        logits.index_put_(where, -numbers, accumulate=True)


def _entries(
    logits: torch.Tensor, numbers: Sequence[Mapping[int, float]]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the indices (rows, token ids) and the values of `numbers`, one mapping per row."""
    # a tokenizer may have more tokens than the model has logits
    size = logits.shape[-1]
    entries = [(row, *pair) for row, own in enumerate(numbers) for pair in own.items()]
    entries = [entry for entry in entries if entry[1] < size]
    rows, ids, values = (
        to_device(torch.tensor([entry[part] for entry in entries], dtype=dtype), logits.device)
        for part, dtype in enumerate((torch.long, torch.long, logits.dtype))
    )
    return (rows, ids), values
