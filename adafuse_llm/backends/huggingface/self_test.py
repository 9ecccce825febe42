"""Test a loaded model on a few tokens, to choose a form that gives correct numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adafuse_llm.backends.file_facts import context_window
from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.backends.huggingface.packing import attentions_of, set_attentions
from adafuse_llm.backends.huggingface.passes import Passes
from adafuse_llm.backends.huggingface.tree_cache import bytes_per_token
from adafuse_llm.errors import UnsupportedModelError
from adafuse_llm.tree.tokens import Node, TokenTree

FORMS: tuple[str, ...] = ("tree", "path")
"""The forms, in the order in which they are tried."""

PROMPTS = (6, 4)
"""Lengths of the two prompts in tokens. A small context window makes them shorter."""

DEPTH = 3
"""Number of tokens in the longer of the two branches that follow a prompt."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest accepted mean error of logits, relative to their standard deviation, by data type."""

ROUNDED_TOLERANCE, ROUNDED_NOISE = 5e-3, 4
"""Largest accepted error for quantized weights and for weights of lower precision. With rounded
activations, the logits of a token depend on the shape of its pass, so the test also accepts
`ROUNDED_NOISE` times the difference between plain passes of different shapes. On a GPU, passes with
a cache may use kernels that no plain pass uses. So the test also accepts `ROUNDED_NOISE` times the
machine epsilon of the data type: 3.1 % for bfloat16, in which 32 layers had an error of 1.2 %."""

Ids = tuple[int, ...]


@torch.inference_mode()
def choose(name: str, decoder: Decoder) -> Passes:
    """Return passes in the first of `FORMS` that gives correct numbers.

    Raises:
        UnsupportedModelError: no form gives correct numbers. The message gives the reasons.
    """
    model, reasons = decoder.model, list[str]()
    usual, forms = attentions_of(model), FORMS
    try:
        expected, tolerance = _expected(decoder), _tolerance(decoder)
    except Exception as error:  # a model may raise any exception
        forms = ()
        reasons.append(f"{type(error).__name__}: {error}")
    # try the forms in order
    for form in forms:
        try:
            passes = Passes(decoder, form)
            reason = _difference(_actual(decoder, passes), expected, tolerance)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            return passes
        reasons.append(f"{form} form: {reason}")
        set_attentions(usual)
    raise UnsupportedModelError(
        f"member {name!r} ({model.config.model_type}) cannot be used in an ensemble: "
        f"{'; '.join(reasons)}"
    )


def _ids(decoder: Decoder, step: int, first: int, count: int) -> list[int]:
    return [(step * i + first) % decoder.vocabulary_size for i in range(count)]


def _prompts(decoder: Decoder) -> list[list[int]]:
    window = context_window(decoder.model.config.get_text_config(decoder=True).to_dict())
    longest = max(PROMPTS) if window is None else max(1, window - DEPTH)
    return [_ids(decoder, 7, size, size) for size in (min(size, longest) for size in PROMPTS)]


def _branch(decoder: Decoder, number: int) -> list[int]:
    return _ids(decoder, 1, 11 * number, DEPTH)


def _expected(decoder: Decoder) -> dict[Ids, torch.Tensor]:
    """Return logits from plain passes, [v], by the sequence of tokens that they follow."""
    expected: dict[Ids, torch.Tensor] = {}
    for prompt in _prompts(decoder):
        for number, depth in ((1, DEPTH), (2, DEPTH - 1)):
            whole = (*prompt, *_branch(decoder, number)[:depth])
            rows = decoder.plain(whole, depth + 1)
            expected.update({whole[: len(prompt) + i]: row for i, row in enumerate(rows)})
    return expected


def _actual(decoder: Decoder, passes: Passes) -> dict[Ids, torch.Tensor]:
    """Return the logits after the sequences of `_expected`. Set `passes.token_bytes`.

    They form two trees with two branches each. After a commit, one branch of each tree grows.
    """
    trees = [TokenTree(prompt) for prompt in _prompts(decoder)]
    requests = [passes.new_request(tree) for tree in trees]
    actual: dict[Ids, torch.Tensor] = {}

    def evaluate(nodes: Sequence[Sequence[Node]]) -> None:
        passes.advance([*zip(requests, nodes, strict=True)])
        for request, own in zip(requests, nodes, strict=True):
            for node in own:
                actual[(*request.tree.ids, *request.tree.tokens(node))] = request.rows[node][0]

    # evaluate the prompts, then two branches of each, then one more token after a commit
    evaluate([[tree.root] for tree in trees])
    one, two = _branch(decoder, 1), _branch(decoder, 2)
    tips = [(tree.grow(one[:-1]), tree.grow(two[:-1])) for tree in trees]
    evaluate([[n for tip in own for n in t.path(tip)] for t, own in zip(trees, tips, strict=True)])
    for request, (tip, _) in zip(requests, tips, strict=True):
        request.tree.commit(request.tree.path(tip)[0])
        request.follow()
    evaluate([[tree.child(tip, one[-1])] for tree, (tip, _) in zip(trees, tips, strict=True)])
    passes.token_bytes = bytes_per_token(requests[0].tensors())
    return actual


def _tolerance(decoder: Decoder) -> float:
    model = decoder.model
    if model.dtype in TOLERANCE and not getattr(model, "is_quantized", False):
        return TOLERANCE[model.dtype]
    # measure how much logits differ if a sequence runs in growing parts, whole, or beside another
    count = len(_prompts(decoder)[0]) + DEPTH
    tokens, other = _ids(decoder, 7, 3, count), _ids(decoder, 5, 11, count)
    parts = torch.cat([decoder.plain(tokens[: end + 1]) for end in range(len(tokens))])
    noise = torch.finfo(model.dtype).eps
    for rows in ([tokens], [tokens, other]):
        ids = torch.tensor(rows, device=decoder.device)
        whole = model(input_ids=ids, use_cache=False, return_dict=True).logits[0].float()
        noise = max(noise, float((whole - parts).abs().mean() / parts.std()))
    return max(ROUNDED_TOLERANCE, ROUNDED_NOISE * noise)


def _difference(
    actual: dict[Ids, torch.Tensor], expected: dict[Ids, torch.Tensor], tolerance: float
) -> str | None:
    right = torch.stack([expected[ids] for ids in actual])
    if right.isnan().any():
        return "the logits are NaN"
    finite = torch.isfinite(right)
    gap = float((torch.stack([*actual.values()]) - right)[finite].abs().mean())
    scale = float(right[finite].std())
    if gap <= tolerance * scale:
        return None
    return (
        f"the logits differ from those of plain forward passes by {gap:.2g} on average "
        f"(standard deviation of the logits: {scale:.2g})"
    )
