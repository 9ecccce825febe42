"""How much quantized GGUF members change: their ends, flash attention, and repeated requests.

``python -m benchmarks.real.quantized FILE...`` prints figures of docs/guides/gguf.md for each file,
and for all of them as an ensemble. All members use one thread. ``--rewrite KIND`` first writes the
files again with another type of weights, and keeps them in the folder ``--folder``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends import NodeQuery, TokenTree
from adafuse_llm.backends.gguf.header import read_tokens
from adafuse_llm.backends.llamacpp import LlamaCppBackend
from adafuse_llm.backends.llamacpp.context import Context, Entry
from adafuse_llm.backends.llamacpp.library import load_library
from adafuse_llm.backends.llamacpp.model import Model
from adafuse_llm.results import Generation
from tests.support.gguf_files import rewritten

QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Why is the sky blue?",
    "How do I boil an egg?",
)
PROMPTS = (
    *QUESTIONS,
    "The old lighthouse keeper climbed the stairs and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n   ",
    "Die Hauptstadt von \u00d6sterreich hei\u00dft",
    '{"name": "Anna", "age": 31, "languages": ["German",',
)
FACTS = "The ferry to Orrin leaves at nine. It carries twelve people, three goats and the post. "


def ends(member: Any) -> str:
    """Return the tokens that end a response, and those that llama.cpp takes for ends besides."""
    vocabulary = load_library().llama_model_get_vocab(member._model.pointer)
    texts = read_tokens(member.path)
    own = [texts[number] for number in sorted(member.end_ids)]
    is_end = load_library().llama_vocab_is_eog
    others = [
        text
        for number, text in enumerate(texts)
        if is_end(vocabulary, number) and number not in member.end_ids
    ]
    return f"ends: {' '.join(own)}; llama.cpp besides: {' '.join(others) or 'none'}"


def attention(path: Path) -> str:
    """Compare the default with no flash attention, on the greedy text without it."""
    members = [
        LlamaCppBackend(path, "m", context=512, threads=1, flash_attention=flash)
        for flash in (False, None)
    ]
    change, other = 0.0, 0
    for prompt in PROMPTS:
        texts = []
        for member in members:
            member.clear_prefix_cache()
            engine = AdaFuseEngine([member], runtime=RuntimeConfig(drafting=False))
            texts.append(engine.generate(prompt, max_new_tokens=24).text)
            member.clear_prefix_cache()
        other += texts[0] != texts[1]
        ids = members[0].codec.encode_prompt(prompt)
        whole = members[0].codec.encode_prompt(prompt + texts[0])
        new = whole[len(ids) :][:24]
        rows = [list(likeliest(member, ids, new)) for member in members]
        for one, two in zip(*rows, strict=True):
            both = one.keys() & two.keys()
            change = max([change, *(abs(one[token] - two[token]) for token in both)])
    for member in members:
        member.close()
    return f"flash attention: largest change {change:.2g}, other texts {other} of {len(PROMPTS)}"


def likeliest(member: Any, ids: Sequence[int], tokens: Sequence[int]) -> Iterator[dict[int, float]]:
    """Yield the 20 likeliest tokens before each of some tokens, each in a pass of its own."""
    tree = TokenTree(ids)
    for token in tokens:
        (result,) = member.evaluate([NodeQuery(tree, (tree.root,), (), 20)])
        yield dict(zip(result.next[0].tokens, result.next[0].logprobs, strict=True))
        tree.commit(tree.grow([token]))
    member.release(tree)


def sizes(path: Path, ids: Sequence[int]) -> str:
    """Compare passes of some sizes with passes of 32 tokens, at the end of 608 tokens."""
    model = Model(path, "m", gpu_layers=0, reorder=False)
    context = Context(model, cells=1024, threads=1, flash_attention=True, cache_type="f16")
    ids, last = [*ids, *ids[1:]][:608], 576

    def run(starts: Sequence[int]) -> torch.Tensor:
        """Evaluate passes, and return the rows of the last 32 tokens."""
        kept = [
            context.run([Entry(ids[at], at, [0], keep=at >= last) for at in range(start, end)])
            for start, end in pairwise(starts)
        ]
        return torch.cat(kept).double().log_softmax(-1)

    run(range(0, last + 1, 32))
    found = {}
    for size in (32, 1, 2, 4, 7, 8, 12, 16):
        found[f"{size}"] = run([*range(last, len(ids), size), len(ids)])
        context.cut(0, last)
    context.clear()
    found["512 and 96"] = run([0, 512, len(ids)])
    base = found.pop("32")
    likely = base.topk(5).indices
    changes = {
        name: float((each.gather(1, likely) - base.gather(1, likely)).abs().max())
        for name, each in found.items()
    }
    context.close()
    model.close()
    return f"passes: {', '.join(f'{name}: {change:.2g}' for name, change in changes.items())}"


def repeats(paths: Sequence[Path], new: int) -> None:
    """Ask the same chats anew, again with kept prefixes, and in a batch of five."""
    seconds: dict[bool, list[float]] = {}
    for repeatable in (False, True):
        members = [
            LlamaCppBackend(path, path.stem, context=2048, threads=1, repeatable=repeatable)
            for path in paths
        ]
        engine, same, change = AdaFuseEngine(members), 0, 0.0
        for branches in (1, 3):
            for question in QUESTIONS:
                for member in members:
                    member.clear_prefix_cache()
                options: Any = {"branching_factor": branches, "max_new_tokens": new}
                chat = [{"role": "user", "content": question}]
                started = time.process_time()
                first = engine.generate(messages=chat, **options)
                seconds.setdefault(repeatable, []).append(time.process_time() - started)
                again = engine.generate(messages=chat, **options)
                others = [[{"role": "user", "content": each}] for each in (*QUESTIONS, FACTS)]
                crowd = engine.generate_batch(messages=[chat, *others[1:]], **options)[0]
                for other in (again, crowd):
                    same += other.text == first.text
                    change = max(change, score_change(first, other))
        engine.close()
        print(
            f"repeatable={repeatable}: {same} of {4 * len(QUESTIONS)} texts the same, largest "
            f"change of a score: {change:.2g}",
            flush=True,
        )
    ratios = sorted(two / one for one, two in zip(*seconds.values(), strict=True))
    median = (ratios[len(ratios) // 2 - 1] + ratios[len(ratios) // 2]) / 2
    print(f"CPU time of the first requests: {median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def score_change(one: Generation, two: Generation) -> float:
    """Return the largest change of a candidate's score, in rounds before the texts differ."""
    change = 0.0
    for first, second in zip(one.rounds, two.rounds, strict=False):
        scores = {each.text: each.score for each in second.candidates}
        for each in first.candidates:
            before, after = each.score, scores.get(each.text)
            if before is not None and after is not None:
                change = max(change, abs(after - before))
        if first.text != second.text:
            break
    return change


def main() -> None:
    """Print the figures of the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--rewrite", choices=("f32", "q8_0"), metavar="KIND")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--new", type=int, default=48, help="tokens of the ensemble's answers")
    parser.add_argument("--only", choices=("files", "repeats"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = arguments.files
    if arguments.rewrite:
        files = [rewritten(path, arguments.folder, arguments.rewrite) for path in files]
    for path in files if arguments.only != "repeats" else ():
        member = LlamaCppBackend(path, "m", context=512, threads=1)
        print(path.name, ends(member), sep="\n")
        ids = member.codec.encode_prompt(FACTS * 40)
        member.close()
        print(sizes(path, ids), attention(path), sep="\n", flush=True)
    if arguments.only != "files" and len(files) > 1:
        repeats(files, arguments.new)


if __name__ == "__main__":
    main()
