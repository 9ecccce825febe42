"""Word problems with reasoning in one shared text, and in private (``private_reasoning``).

No member of `benchmarks.real.members` reasons by itself. So the two that follow instructions get a
chat template that opens reasoning and asks for a short answer after it::

    python -m benchmarks.real.thinking BENCHMARKS/gsm8k.jsonl

The command needs ``make real``, and takes minutes on a GPU and many hours on two cores. It
continues the output file, whose lines have the results of one system and question each, and prints
the scores of the systems that have answered all questions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adafuse_llm import AdaFuseEngine, MemberSpec
from benchmarks.paper.metrics import load_metric, number
from benchmarks.paper.statistics import interval, mcnemar, p_value
from benchmarks.real.members import MEMBERS, real_folder

SYSTEM = (
    "Solve the problem. Think step by step inside <think> and </think>, without code. "
    'Then write the final number in one line that begins with "The answer is".'
)

TEMPLATE = (
    "{{- '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""ChatML, as both members have it, with reasoning that the template opens."""

REASONING, ANSWER = 300, 64
"""Most tokens of a member's reasoning, and of the answer."""

BATCH = 16
"""Number of questions that are answered at the same time."""

TEMPLATE_FILE = "chat_template.jinja"

TOGETHER: dict[str, Any] = {"max_new_tokens": REASONING + ANSWER}
PRIVATE: dict[str, Any] = {"max_new_tokens": ANSWER, "private_reasoning": REASONING}
FORM = {"regex": "The answer is -?[0-9][0-9,]*([.][0-9]+)?[.]"}

SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen alone": ("single", {**TOGETHER, "use": ["qwen"]}),
    "qwen alone, private, form": ("single", {**PRIVATE, **FORM, "use": ["qwen"]}),
    "smollm alone, private, form": ("single", {**PRIVATE, **FORM, "use": ["smollm"]}),
    **{f"shared, {name}": (name, TOGETHER) for name in ("mixture", "adafuse")},
    **{f"private, {name}": (name, PRIVATE) for name in ("mixture", "adafuse")},
    **{f"private, form, {name}": (name, {**PRIVATE, **FORM}) for name in ("mixture", "adafuse")},
}
"""By system: the strategy, and the options."""

ALONE = "qwen alone"


def load(folder: Path) -> AdaFuseEngine:
    """Load the checkpoints of the two members, with `TEMPLATE`. Links are made in `folder`."""
    specs = []
    for member in MEMBERS:
        if member.name in ("smollm", "qwen"):
            own = folder / member.name
            own.mkdir()
            for file in (real_folder() / member.folder).iterdir():
                if file.name != TEMPLATE_FILE:
                    (own / file.name).symlink_to(file)
            (own / TEMPLATE_FILE).write_text(TEMPLATE, encoding="utf-8")
            specs.append(MemberSpec(str(own), name=member.name))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AdaFuseEngine.from_pretrained(specs, device_map=device)


def report(found: Mapping[tuple[str, int], bool], asked: Sequence[int]) -> None:
    """Print the scores of the systems that have answered all questions."""
    scores = {
        name: [found[name, each] for each in asked if (name, each) in found] for name in SYSTEMS
    }
    print(f"| system | right | 95 % interval | p, compared with {ALONE!r} |\n|---|---:|---|---:|")
    for name, right in scores.items():
        if len(right) == len(asked):
            score = interval(load_metric("number"), [(float(each), 1.0) for each in right])
            is_compared = name != ALONE and len(scores[ALONE]) == len(asked)
            p = p_value(mcnemar(right, scores[ALONE])) if is_compared else ""
            shown = f"{score.low:.1f} to {score.high:.1f} %"
            print(f"| {name} | {sum(right)} of {len(right)} | {shown} | {p} |")


def main() -> None:
    """Answer the questions that the output file lacks, and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="GSM8K, as JSON lines with question and answer")
    parser.add_argument("--first", type=int, default=301, help="first question")
    parser.add_argument("--last", type=int, default=396, help="last question")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="default: all systems")
    parser.add_argument("--output", type=Path, default=Path("thinking.jsonl"))
    given = parser.parse_args()
    lines = given.output.read_text("utf-8").splitlines() if given.output.exists() else []
    found = {(each["system"], each["number"]): each["right"] for each in map(json.loads, lines)}
    questions = [json.loads(line) for line in given.data.read_text("utf-8").splitlines()]
    numbers = range(given.first, given.last + 1)
    with tempfile.TemporaryDirectory() as folder, load(Path(folder)) as engine:
        for system in given.system or SYSTEMS:
            strategy, options = SYSTEMS[system]
            missing = [each for each in numbers if (system, each) not in found]
            for start in range(0, len(missing), BATCH):
                chosen = missing[start : start + BATCH]
                asked = [questions[place - 1] for place in chosen]
                results = engine.with_strategy(strategy).generate_batch(
                    messages=[[{"role": "user", "content": each["question"]}] for each in asked],
                    **options,
                )
                for place, question, result in zip(chosen, asked, results, strict=True):
                    text = result.answer.strip() or result.reasoning
                    right = found[system, place] = number(text, [question["answer"]])
                    record = {"system": system, "number": place, "right": right}
                    record |= {"text": result.text, "thoughts": result.thoughts}
                    record |= {"finish_reason": result.finish_reason}
                    with given.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
    report(found, numbers)


if __name__ == "__main__":
    main()
