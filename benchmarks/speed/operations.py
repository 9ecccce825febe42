"""Count the operations of a decoding pass, which do not depend on the machine.

On a GPU, each operation that computes something is a launch. So their number should not depend on
how many requests share the pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from adafuse_llm.backends import NodeQuery
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.tree import Node, TokenTree
from benchmarks.speed.measure import Report, Target
from benchmarks.speed.members import random_weights

LIMIT: Final = 1.5
FREE: Final = ("aten::detach", "aten::_unsafe_view", "aten::empty", "aten::lift_fresh")
"""Operations that compute nothing. Views compute nothing, either."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """A counter of the operations that torch runs in a block.

    Attributes:
        operations: number of operations, views included.
        launches: number of operations that compute something.
        scores: number of attention scores of all heads, with padding.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.operations = self.launches = self.scores = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.operations += 1
        self.launches += not (func.is_view or name.startswith(FREE))
        if "scaled_dot_product" in name:
            query, keys = args[:2]
            self.scores += query.shape[:3].numel() * keys.shape[2]
        return func(*args, **(kwargs or {}))


def compare(report: Report, shape: str, counts: Sequence[int], lengths: tuple[int, int]) -> None:
    """Count the operations of passes that several requests share.

    Args:
        report: receives the results.
        shape: shape of the member.
        counts: numbers of requests.
        lengths: tokens of the prompts of short and of long requests in one pass.
    """
    made = random_weights(shape)[0]
    member = HuggingFaceBackend(made.model, made.tokenizer, "counted", prefix_cache_bytes=0)
    for branches, name in ((1, "one token each"), (4, "1 to 4 tokens each")):
        found = [_decoding_pass(member, [lengths[0]] * count, branches) for count in counts]
        report.figures.append(
            (
                f"pass, {name}, {', '.join(map(str, counts))} requests: operations "
                "(of these, computing)",
                ", ".join(f"{each.operations} ({each.launches})" for each in found),
            )
        )
        report.targets.append(
            Target(
                f"computing operations of one pass over {counts[-1]} requests / over "
                f"{counts[0]}, {name}",
                found[-1].launches / found[0].launches,
                LIMIT,
            )
        )
    report.figures.append(_padding(member, lengths))


def _padding(member: HuggingFaceBackend, lengths: tuple[int, int]) -> tuple[str, str]:
    """Return how many attention scores padding adds if short and long requests share a pass."""
    short, long = lengths
    prompts = [short, long] * 4
    config = member.model.config
    found = _decoding_pass(member, prompts, 1).scores
    rows = sum(length + 3 for length in prompts)  # the pass is the third one
    needed = rows * config.num_attention_heads * config.num_hidden_layers
    name = f"pass over 4 requests of {short:,} tokens and 4 of {long:,}: attention scores"
    return name, f"{found / needed:.2f} x those without padding"


def _decoding_pass(member: HuggingFaceBackend, prompts: Sequence[int], branches: int) -> Counter:
    """Read prompts, decode some tokens, and count the operations of the pass after these.

    Args:
        member: the member.
        prompts: number of tokens in each prompt.
        branches: maximum number of new tokens of a request in each pass.
    """
    rng = random.Random(0)
    trees = [TokenTree([rng.randrange(100, 400) for _ in range(length)]) for length in prompts]
    for tree in trees:  # one by one, so that a pass does not hold all prompts
        member.evaluate([NodeQuery(tree, (tree.root,), (), 2)])
    for _ in range(2):  # the second pass follows a commit, as most passes do
        counter = Counter()
        with counter:
            member.evaluate([NodeQuery(tree, _nodes(tree, rng, branches), (), 2) for tree in trees])
        for tree in trees:
            tree.commit(next(iter(tree.root.children.values())))
    for tree in trees:
        member.release(tree)
    return counter


def _nodes(tree: TokenTree, rng: random.Random, branches: int) -> tuple[Node, ...]:
    """Return up to `branches` new nodes after the root, each for a different token."""
    return tuple(tree.child(tree.root, 100 + i) for i in range(rng.randint(1, branches)))
