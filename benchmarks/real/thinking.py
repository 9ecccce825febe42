"""Word problems with reasoning in one shared text, and in private (``private_reasoning``).

No member of `benchmarks.real.members` reasons by itself. So the two that follow instructions get a
chat template that opens reasoning and asks for a short answer after it::

    python -m benchmarks.real.thinking BENCHMARKS/gsm8k.jsonl --last 14 --output thinking.jsonl

The command needs ``make real``. It continues the output file, whose lines have the results of one
system and question each, and prints the scores at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from adafuse_llm import AdaFuseEngine, MemberSpec
from adafuse_llm.evaluation.metrics import number
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


def load(folder: Path) -> AdaFuseEngine:
    """Load the two members from their GGUF files, with `TEMPLATE`. Links are made in `folder`."""
    specs = []
    for member in MEMBERS:
        if member.name in ("smollm", "qwen"):
            own = folder / member.name
            own.mkdir()
            (own / member.file).symlink_to(real_folder() / member.file)
            for file in (real_folder() / member.folder).glob("*token*"):
                shutil.copy(file, own)
            (own / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
            specs.append(MemberSpec(str(own / member.file), name=member.name, context=4096))
    return AdaFuseEngine.from_pretrained(specs)


def main() -> None:
    """Answer the questions that the output file lacks, and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="GSM8K, as JSON lines with question and answer")
    parser.add_argument("--first", type=int, default=1, help="first question")
    parser.add_argument("--last", type=int, default=14, help="last question")
    parser.add_argument("--output", type=Path, default=Path("thinking.jsonl"))
    given = parser.parse_args()
    lines = given.output.read_text("utf-8").splitlines() if given.output.exists() else []
    found = {(each["system"], each["number"]): each for each in map(json.loads, lines)}
    questions = [json.loads(line) for line in given.data.read_text("utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder, load(Path(folder)) as engine:
        for place in range(given.first, given.last + 1):
            asked = questions[place - 1]
            for system, (strategy, options) in SYSTEMS.items():
                if (system, place) in found:
                    continue
                started = time.process_time()
                result = engine.with_strategy(strategy).generate(
                    messages=[{"role": "user", "content": asked["question"]}], **options
                )
                record = {
                    "system": system,
                    "number": place,
                    "right": number(result.answer.strip() or result.reasoning, [asked["answer"]]),
                    "text": result.text,
                    "thoughts": result.thoughts,
                    "finish_reason": result.finish_reason,
                    "cpu_seconds": time.process_time() - started,
                }
                found[system, place] = record
                with given.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    scores = defaultdict(list)
    for record in found.values():
        scores[record["system"]].append(record["right"])
    for system, right in scores.items():
        print(f"{system}: {sum(right)} of {len(right)} right")


if __name__ == "__main__":
    main()
