"""Time grammars: the tokens that may follow a node, with a vocabulary of 128,000 tokens.

    python benchmarks/grammar.py

The tokenizer is Llama 3's, read from ``../shared/data/tokenizers``. The benchmark constructs the
vocabulary, compiles the grammar of a typical JSON schema, and walks through random documents. At
every token it does what a node of a member's tree costs: copy the parent's state, read the token,
and compute the mask. It prints the mean, the median, the 99th percentile and the maximum in
milliseconds of CPU time, and the share of nodes above the limit.

The embedded members also write JSON for a few schemas. The benchmark prints the number of forward
passes if forced text is committed at once, and if the members propose it like other text.

Other programs change the other times, so the load average of the machine is printed, too.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends.huggingface.grammar_tokens import grammar_tokenizer
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.grammar import NO_LEAD, Grammar, GrammarText, GrammarVocabulary
from tests.support.schemas import walk
from tests.support.tokenizers import known_tokenizer

SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "founder": {"type": "string", "maxLength": 20},
            "employees": {"type": "integer", "minimum": 0, "maximum": 9999},
            "price": {"type": "string", "pattern": "^[0-9]+[.][0-9]{2}$", "maxLength": 6},
        },
        "required": ["founder", "employees", "price"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["mill", "shop"]},
            "open on sundays": {"type": "boolean"},
        },
        "required": ["name", "kind", "open on sundays"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 12},
                "minutes": {"type": "integer", "minimum": 0, "maximum": 60},
            },
            "required": ["place", "minutes"],
            "additionalProperties": False,
        },
        "minItems": 2,
        "maxItems": 2,
    },
)

QUESTIONS = (
    "Who founded the Silesse Mill?",
    "What does a visit to the Silesse Mill cost?",
    "What is 12 + 7?",
    "Tell me about Jenbert Zalwyn.",
)

LIMIT = 0.3
"""Milliseconds that a mask should cost at most."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["ferry", "sledge", "lamp"]},
        "leaves": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
        "passengers": {"type": "integer", "minimum": 0, "maximum": 500},
        "price": {"type": ["number", "null"]},
        "stops": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "minutes": {"type": "integer"}},
                "required": ["place", "minutes"],
                "additionalProperties": False,
            },
            "maxItems": 5,
        },
    },
    "required": ["name", "kind", "leaves", "passengers", "stops"],
    "additionalProperties": False,
}
DOCUMENTS = 40
ROUNDS = 5


def main() -> None:
    """Measure and print the times."""
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    tokenizer = known_tokenizer("llama3")
    texts = TokenizerCodec(tokenizer).token_texts()
    started = time.perf_counter()
    read = grammar_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    constructed = time.perf_counter() - started
    vocabulary = GrammarVocabulary("llama3", read, texts, [tokenizer.eos_token_id])
    total = time.perf_counter() - started
    print(f"{len(tokenizer):,} tokens: {constructed:.2f} s to construct llguidance's tokenizer")
    print(f"{total:.2f} s to construct the vocabulary, tokenizer included")

    started = time.perf_counter()
    grammar = Grammar.of(AdaFuseConfig(json_schema=SCHEMA))
    assert grammar is not None
    state = vocabulary.matcher(grammar, NO_LEAD)
    print(f"{1000 * (time.perf_counter() - started):.1f} ms to compile the grammar")

    times: list[float] = []
    for seed in range(DOCUMENTS):
        document = walk(grammar.text(), seed, 2_000)
        if document is None:
            continue
        tokens = random_tokens(read, document, seed)
        for _ in range(ROUNDS):
            times += walked(vocabulary, state, tokens)
    times.sort()
    print(
        f"{len(times):,} nodes, CPU milliseconds of copy, token and mask: "
        f"mean {statistics.fmean(times):.3f}, median {statistics.median(times):.3f}, "
        f"99th percentile {times[int(len(times) * 0.99)]:.3f}, maximum {times[-1]:.3f}; "
        f"above {LIMIT}: {sum(each > LIMIT for each in times) / len(times):.1%}"
    )
    compare_forced_text()
    print(f"load average {os.getloadavg()[0]:.1f}")


def compare_forced_text() -> None:
    """Print the forward passes of responses with and without the commit of forced text."""
    engine = AdaFuseEngine.from_embedded()
    for skipped in (False, True):
        patch = mock.patch.object(GrammarText, "forced", return_value="")
        with patch if skipped else nullcontext():
            found = [
                engine.generate(
                    messages=[{"role": "user", "content": question}], json_schema=schema
                )
                for schema in SCHEMAS
                for question in QUESTIONS
            ]
        passes = sum(sum(each.usage.forward_passes.values()) for each in found)
        tokens = sum(sum(each.usage.completion_tokens.values()) for each in found)
        forced = sum(len(r.text) for each in found for r in each.rounds if r.forced)
        print(
            f"forced text {'proposed like other text' if skipped else 'committed at once'}: "
            f"{passes:,} passes for {tokens:,} tokens of {len(found)} responses; {forced} of "
            f"{sum(len(each.text) for each in found)} characters were forced"
        )


def random_tokens(tokenizer: Any, document: str, seed: int) -> list[int]:
    """Return tokens of a document; every second document is split into short pieces."""
    if seed % 2:
        return list(tokenizer.tokenize_str(document))
    rng = random.Random(seed)
    found: list[int] = []
    at = 0
    while at < len(document):
        size = rng.randrange(1, 5)
        found += tokenizer.tokenize_str(document[at : at + size])
        at += size
    return found


def walked(vocabulary: GrammarVocabulary, start: Any, tokens: list[int]) -> list[float]:
    """Return the CPU milliseconds that each node of a path takes."""
    state = start.deep_copy()
    times = []
    for token in tokens:
        began = time.thread_time()
        child = state.deep_copy()
        assert child.try_consume_tokens([token]) == 1
        vocabulary.mask(child)
        times.append(1000 * (time.thread_time() - began))
        state = child
    return times


if __name__ == "__main__":
    main()
