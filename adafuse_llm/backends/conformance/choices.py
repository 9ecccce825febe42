"""Checks of masks, draws and whole distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from adafuse_llm.backends.base import DrawsTokens, KnowsDistributions, NodeQuery
from adafuse_llm.backends.conformance.harness import TOP, Harness, place
from adafuse_llm.backends.conformance.oracle import (
    compare,
    compare_logprobs,
    is_complete,
    log_total,
    permitted,
    summarized,
)
from adafuse_llm.backends.conformance.violations import expect
from adafuse_llm.backends.gumbel import drawn, noise
from adafuse_llm.sampling import Draw
from adafuse_llm.text.words import REPLACEMENT
from adafuse_llm.tree import Next, Node, TokenTree, is_allowed

ALLOWED = (1, 2, 5, 50)
"""Numbers of tokens that masks permit."""

DRAWS = (
    Draw(1, 1.0, 1.0, None),
    Draw(2, 0.5, 1.0, None),
    Draw(3, 3.0, 1.0, None),
    Draw(4, 1.0, 0.8, None),
    Draw(5, 1.5, 1.0, 3),
    Draw(6, 2.0, 0.9, 10),
    Draw(7, 1.5, 1.0, None, 0.3),
)
"""Ways to draw a token."""

KEYS = 4
"""Number of tokens to draw in each way."""


def token_texts(harness: Harness) -> None:
    """Compare the texts of tokens with what the codec decodes."""
    texts = harness.token_texts or ()
    expect(
        not isinstance(texts, str) and all(isinstance(text, str) for text in texts),
        "token_texts is not a sequence of texts.",
    )
    codec = harness.backend.codec
    context = codec.encode_prompt(harness.subject.texts[0])
    for token in harness.words:
        expect(
            token < len(texts),
            f"token_texts has {len(texts)} texts, but the codec uses token {token}.",
        )
        decoded = codec.decode_continuation(context, [token])
        expect(
            texts[token] == decoded or REPLACEMENT in texts[token] + decoded,
            f"The text of token {token} is {texts[token]!r} in token_texts, but the codec decodes "
            f"it to {decoded!r}.",
        )


def masks(harness: Harness) -> None:
    """Restrict the tokens that may follow nodes, with and without masks in one query."""
    tree = harness.begin()
    nodes = [tree.root, *harness.line(tree, harness.depth)]
    size = len(harness.token_texts or ())
    for count in (*ALLOWED, size - 1):
        for number, node in enumerate(nodes):
            node.allowed = _random_mask(harness, tree, node, count) if number != 1 else None
        (result,) = harness.ask(NodeQuery(tree, tuple(nodes), (), TOP))
        for node, summary in zip(nodes, result.next, strict=True):
            _check_masked(harness, tree, node, summary)
    harness.check_nodes(tree, [], harness.siblings(tree, 3))
    for node in nodes:
        node.allowed = None
    harness.check_nodes(tree, nodes)


def word_ends(harness: Harness) -> None:
    """Ask how likely the end of a word is, with masks and without them."""
    tree = harness.begin()
    nodes = [tree.root, *harness.line(tree, harness.depth)]
    ends = {t for t, text in enumerate(harness.token_texts or ()) if text[:1].isspace()}
    ends |= harness.backend.end_ids
    for count in (None, *ALLOWED):
        for number, node in enumerate(nodes):
            node.allowed = None
            if count is not None and number != 1:
                node.allowed = _random_mask(harness, tree, node, count)
        (result,) = harness.ask(NodeQuery(tree, tuple(nodes), (), TOP, word_ends=True))
        for node, summary in zip(nodes, result.next, strict=True):
            known, where = _distribution(harness, tree, node), place(tree, node)
            if is_complete(known):
                allowed = permitted(known, node.allowed)
                want = log_total(logprob for t, logprob in allowed.items() if t in ends)
                got = summary.word_end_logprob
                assert got is not None, "the form of the result is checked"
                compare_logprobs(where, "word_end_logprob", got, want, harness.tolerance)


def draws(harness: Harness) -> None:
    """Draw tokens, with masks and without them, and compare them with the rule for draws."""
    backend = cast("DrawsTokens", harness.backend)
    backend.prepare_draws()
    backend.prepare_draws()
    tree = harness.begin()
    nodes = [tree.root, *harness.line(tree, harness.depth)]
    for turn in range(KEYS):
        for way in DRAWS:
            for number, node in enumerate(nodes):
                node.draw = replace(way, key=way.key + 1000 * turn + 7919 * number)
                if harness.token_texts is not None and turn % 2:
                    node.allowed = _random_mask(harness, tree, node, 5 * turn)
            (result,) = harness.ask(NodeQuery(tree, tuple(nodes), (), TOP))
            for node, summary in zip(nodes, result.next, strict=True):
                _check_masked(harness, tree, node, summary)
                _check_drawn(harness, tree, node, summary)
    for node in nodes:
        node.draw = node.allowed = None
    (result,) = harness.ask(NodeQuery(tree, tuple(nodes), (), TOP))
    for summary in result.next:
        expect(
            summary.drawn is None,
            f"The drawn token of a node without a draw is {summary.drawn}; expected None.",
        )


def distribution(harness: Harness) -> None:
    """Compare whole distributions after nodes with their summaries."""
    backend = cast("KnowsDistributions", harness.backend)
    tree = harness.begin()
    nodes = [tree.root, *harness.line(tree, 2)]
    result = harness.check_nodes(tree, nodes)
    for node, summary in zip(nodes, result.next, strict=True):
        whole = backend.distribution(tree, node)
        for token, logprob in zip(summary.tokens, summary.logprobs, strict=True):
            where, what = f"{place(tree, node)}, distribution()", f"token {token}"
            compare_logprobs(where, what, float(whole[token]), logprob, harness.tolerance)


def _distribution(harness: Harness, tree: TokenTree, node: Node) -> Mapping[int, float]:
    return harness.oracle.distribution([*tree.ids, *tree.tokens(node)])


def _random_mask(harness: Harness, tree: TokenTree, node: Node, count: int) -> bytes:
    """Return a mask that permits `count` random tokens, at least one of them possible."""
    size = len(harness.token_texts or ())
    known = _distribution(harness, tree, node)
    possible = [t for t, logprob in known.items() if t < size and logprob > -math.inf]
    chosen = {
        harness.chance.choice(possible),
        *harness.chance.sample(range(size), min(size, count)),
    }
    bits = bytearray(max(chosen) // 8 + 1)
    for token in [*chosen][:count]:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def _check_masked(harness: Harness, tree: TokenTree, node: Node, summary: Next) -> None:
    """Compare a summary with the expected one, with regard to the mask of the node."""
    where, mask = place(tree, node), node.allowed
    for token in summary.tokens:
        expect(
            mask is None or is_allowed(mask, token),
            f"{where}, the summary lists token {token}, but Node.allowed does not permit it.",
        )
    known = _distribution(harness, tree, node)
    if not is_complete(known):
        return
    allowed = permitted(known, mask)
    end_logprob = log_total(known.get(token, -math.inf) for token in harness.backend.end_ids)
    expected = summarized(allowed, TOP, end_logprob)
    compare(where, summary, expected, TOP, harness.tolerance)
    mass = 0.0 if mask is None else log_total(allowed.values())
    compare_logprobs(
        where, "the mass of the permitted tokens", summary.mass, mass, harness.tolerance
    )


def _check_drawn(harness: Harness, tree: TokenTree, node: Node, summary: Next) -> None:
    """Compare a drawn token with the token that `adafuse_llm.backends.gumbel.drawn` draws.

    Noise may decide between tokens that are nearly equal.
    """
    where, draw, token = place(tree, node), node.draw, summary.drawn
    assert draw is not None
    known = _distribution(harness, tree, node)
    if token is None or not is_complete(known):
        return
    allowed = permitted(known, node.allowed)
    expect(
        allowed.get(token, -math.inf) > -math.inf,
        f"{where}, the drawn token is {token}; expected a possible token that Node.allowed "
        "permits.",
    )
    if harness.token_texts is None:  # the texts in the hashes are not known
        return
    codes = harness.codes(max(known) + 1)
    by_token = sorted(allowed.items())
    logprobs, hashes = [p for _, p in by_token], [codes[t] for t, _ in by_token]

    def rule(draw: Draw) -> int:
        return by_token[drawn(logprobs, hashes, draw)][0]

    if token == (expected := rule(draw)):
        return
    close = harness.tolerance * max(1.0, 1.0 / draw.temperature)
    possible = {expected}
    if draw.top_p < 1:
        possible |= {rule(replace(draw, top_p=draw.top_p + change)) for change in (-close, close)}
    if draw.min_p:
        possible |= {rule(replace(draw, min_p=draw.min_p * (1 + c))) for c in (-close, close)}
    best = max(_sum(allowed[t], codes[t], draw) for t in possible)
    expect(
        token in possible or abs(_sum(allowed[token], codes[token], draw) - best) < 4 * close,
        f"{where}, the drawn token is {token} for {draw}; expected token {expected}.",
    )


def _sum(logprob: float, code: int, draw: Draw) -> float:
    """Return the sum of a token's log-probability and its noise."""
    return logprob / draw.temperature + float(noise(draw.key, [code])[0])
