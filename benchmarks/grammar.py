"""Time grammars: the tokens that may follow a node, with a vocabulary of 128,000 tokens.

    python benchmarks/grammar.py

The tokenizer is Llama 3's, read from ``../shared/data/tokenizers``. The benchmark constructs the
vocabulary, compiles the grammar of a typical JSON schema, and walks through random documents. At
every token it does what a node of a member's tree costs: copy the parent's state, read the token,
and compute the mask. It prints the mean, the median, the 99th percentile and the maximum in
milliseconds of CPU time, and the share of nodes above the limit.

A response is also decoded by an ensemble of two tiny random models. The benchmark prints the number
of forward passes and the share of the text that was committed without asking any member.

Other programs change the other times, so the load average of the machine is printed, too.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from llguidance.hf import from_tokenizer

from adafuse_llm import AdaFuseConfig
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.grammar import NO_LEAD, Grammar, GrammarVocabulary
from tests.support.models import Recipe, engine
from tests.support.schemas import walk
from tests.support.tokenizers import known_tokenizer

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
    read = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)
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
        f"mean {statistics.fmean(times):.3f}, median {statistics.median(times):.3f}, 99th percentile "
        f"{times[int(len(times) * 0.99)]:.3f}, maximum {times[-1]:.3f}; above {LIMIT}: "
        f"{sum(each > LIMIT for each in times) / len(times):.1%}"
    )

    members = (
        Recipe("llama", "bytelevel", seed=31, layers=1),
        Recipe("gpt2", "sentencepiece", seed=32, layers=1),
    )
    found = engine(*members).generate("The ferry to", json_schema=SCHEMA, max_new_tokens=300)
    forced = sum(len(each.text) for each in found.rounds if each.forced)
    passes = sum(found.usage.forward_passes.values())
    print(
        f"{len(found.text)} characters in {len(found.rounds)} rounds and {passes} forward passes; "
        f"{forced} characters in {sum(each.forced for each in found.rounds)} forced rounds"
    )
    print(f"load average {os.getloadavg()[0]:.1f}")


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
