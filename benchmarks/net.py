"""Record what 100 requests give, and compare two records: a change must not change texts.

    python -m benchmarks.net record before.json     # in the commit before the change
    python -m benchmarks.net record after.json      # in the commit after it
    python -m benchmarks.net compare before.json after.json

A record has, for every response, its text, its finish reason, and the candidates of every round
with the members that proposed them and their NLL. The requests are prompts, chats, tools, forms,
batches, draws and scores, for four teams: the embedded members and, after ``make real``, two real
members in transformers, as GGUF files, and one of each. The GGUF members have ``repeatable=True``,
so that drafts and batches cannot change their numbers. `compare` prints each difference and exits
with 1 if a text, a round or a winner differs, or if an NLL differs by more than `TOLERANCE`.
Forward passes and tokens are costs: it prints their sums and does not judge them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adafuse_llm import AdaFuseEngine, Generation, GGUFMember, TransformersMember
from adafuse_llm.embedded import member_paths
from benchmarks.real.members import real_files, real_folders

TOLERANCE = 2e-4
"""Largest difference of an NLL, in nats: float32 sums in another order differ by less."""

FACTS = (
    "Passage: The Jalith Museum shows the Mavtron Clock. Entry costs 16.86 crowns.\n"
    "Question: What does the entry cost?\nAnswer:"
)
PROMPTS = {
    "facts": FACTS,
    "list": "The first five prime numbers are",
    "code": "def is_even(number):\n    ",
    "chinese": "中国的首都是北京。日本的首都是",
    "emoji": "Weather today: ☀️🌧️. In words:",
    "spaces": "Name: ",
}
CHATS = {
    "question": [{"role": "user", "content": "Name two colours of a flag."}],
    "turns": [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is 12 + 7?"},
        {"role": "assistant", "content": "12 + 7 is 19."},
        {"role": "user", "content": "And 19 + 3?"},
    ],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASKED = [{"role": "user", "content": "How will the weather be in Oslo for two days?"}]
CALLED = [
    *ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "name": "weather", "arguments": {"city": "Oslo", "days": 2}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "Rain, then sun."},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"type": "integer", "minimum": 0, "maximum": 500},
        "kind": {"enum": ["museum", "bakery"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
DRAW: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}

Call = Callable[[AdaFuseEngine], Any]


def requests(tokens: int) -> dict[str, Call]:
    """Return the requests of one team by name; `tokens` limits the length of each response."""
    short: dict[str, Any] = {"max_new_tokens": tokens}
    calls: dict[str, Call] = {}

    def generate(name: str, prompt: str | None = None, **options: Any) -> None:
        calls[name] = lambda engine: engine.generate(prompt, **{**short, **options})

    for name, prompt in PROMPTS.items():
        generate(f"prompt {name}", prompt)
    for name, messages in CHATS.items():
        generate(f"chat {name}", messages=messages)
    generate("one branch", FACTS, branching_factor=1)
    generate("drawn", FACTS, **DRAW)
    generate("two drawn chats", messages=CHATS["question"], n=2, **DRAW)
    generate("penalties", PROMPTS["list"], repetition_penalty=1.3, logit_bias={" the": -5})
    generate("stop", PROMPTS["list"], stop=[","], logprobs=True, top_logprobs=2)
    generate("tool", messages=ASKED, tools=[TOOL])
    generate("tool result", messages=CALLED, tools=[TOOL])
    generate("schema", messages=CHATS["question"], json_schema=SCHEMA, max_new_tokens=4 * tokens)
    generate("regex", FACTS, regex=r" [0-9]{1,3}\.[0-9]{2} crowns")
    calls["batch"] = lambda engine: engine.generate_batch([*PROMPTS.values()], **short)
    calls["score"] = lambda engine: engine.score(FACTS, [" 16.86", " nine", " 中"], ends=True)
    calls["choice"] = lambda engine: engine.choose(FACTS, choices=[" 16.86", " nine crowns"])
    return calls


def teams() -> Iterator[tuple[str, Callable[[], list[Any]], int, tuple[str, ...]]]:
    """Yield each team: name, members, length of responses, and the strategies that run."""
    yield "embedded", lambda: [*member_paths()], 24, ("adafuse", "mixture")
    folders, files = real_folders(), real_files()
    if not {"smollm", "qwen"} <= {*folders} & {*files}:
        print(
            "the real members are missing (make real): only the embedded ones run", file=sys.stderr
        )
        return

    def plain(name: str) -> TransformersMember:
        return TransformersMember(str(folders[name]), name=name, dtype="float32")

    def gguf(name: str) -> GGUFMember:
        return GGUFMember(str(files[name]), name=name, context=4096, repeatable=True)

    yield "real", lambda: [plain("smollm"), plain("qwen")], 12, ("adafuse",)
    yield "gguf", lambda: [gguf("smollm"), gguf("qwen")], 12, ("mixture",)
    yield "mixed", lambda: [plain("smollm"), gguf("qwen")], 8, ("adafuse",)


def simple(result: Any) -> Any:
    """Return the parts of a result that a change must not change, as JSON data."""
    if isinstance(result, list):
        return [simple(each) for each in result]
    if not isinstance(result, Generation):
        return json.loads(result.model_dump_json(exclude={"usage"}))
    rounds = [
        {
            "text": each.text,
            "winner": each.winner,
            "pool": [[c.text, [*c.proposers], c.nll, c.score] for c in each.candidates],
        }
        for each in result.rounds
    ]
    others = [simple(each) for each in result.alternatives]
    found = {"text": result.text, "finish": result.finish_reason, "rounds": rounds}
    return {**found, "alternatives": others, "reply_prefix": result.reply_prefix}


def cost(result: Any) -> tuple[int, int]:
    """Return the forward passes and the tokens of a result."""
    results = result if isinstance(result, list) else [result]
    used = [each.usage for each in results]
    return (
        sum(sum(each.forward_passes.values()) for each in used),
        sum(sum(each.tokens_processed.values()) for each in used),
    )


def record(path: Path, names: list[str]) -> None:
    """Write the results of all requests to a file."""
    found: dict[str, Any] = {}
    for team, members, tokens, strategies in teams():
        if names and team not in names:
            continue
        for strategy in strategies:
            with AdaFuseEngine.from_pretrained(members(), strategy=strategy) as engine:
                for name, call in requests(tokens).items():
                    started = time.process_time()
                    try:
                        result = call(engine)
                        entry = {"result": simple(result), "cost": cost(result)}
                    except Exception as error:
                        entry = {"result": f"{type(error).__name__}: {error}", "cost": (0, 0)}
                    entry["cpu"] = round(time.process_time() - started, 2)
                    found[f"{team}, {strategy}: {name}"] = entry
                    print(f"{team}, {strategy}: {name}: {entry['cpu']} s", flush=True)
            path.write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield each place where two results differ."""
    if isinstance(old, dict) and isinstance(new, dict) and {*old} == {*new}:
        for key in old:
            yield from differences(old[key], new[key], f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > TOLERANCE:
            yield f"{where}: {old:.6f} is {new:.6f} now"
    elif old != new:
        yield f"{where}: {str(old)[:200]!r} is {str(new)[:200]!r} now"


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print all differences and the costs of two records; return the exit status."""
    failed = 0
    for name in {**old, **new}:
        if name not in old or name not in new:
            print(f"{name}: only in one record")
            failed += 1
            continue
        found = [*differences(old[name]["result"], new[name]["result"])]
        failed += bool(found)
        for each in found[:3]:
            print(f"{name}{each}")
    both = [name for name in old if name in new]
    for index, what in enumerate(("forward passes", "tokens processed")):
        sums = [sum(each[name]["cost"][index] for name in both) for each in (old, new)]
        print(f"{what}: {sums[0]} before, {sums[1]} after")
    print(f"{len(both)} requests compared, {failed} differ")
    return 1 if failed else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Record results, and compare two records.")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the requests and write their results")
    recording.add_argument("file", type=Path)
    recording.add_argument("--teams", nargs="*", default=[], metavar="TEAM")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("files", type=Path, nargs=2)
    given = parser.parse_args()
    if given.command == "record":
        record(given.file, given.teams)
        return 0
    return compare(*(json.loads(each.read_text(encoding="utf-8")) for each in given.files))


if __name__ == "__main__":
    sys.exit(main())
