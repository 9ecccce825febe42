"""Members that decide by words: the likeliest option shares a long word with the state."""

import re

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, Choice
from adafuse_llm.backends import FakeBackend
from adafuse_llm.decisions import ask

WORD = re.compile(r"\w{5,}")


def deciding_engine(
    config: AdaFuseConfig | None = None, *, context_window: int | None = None
) -> AdaFuseEngine:
    """An engine with members that are the more certain, the later they come."""
    members = []
    for number, name in enumerate(("oak", "elm"), start=1):

        def rule(text: str, likely: float = 0.1 * number) -> dict[str, float]:
            lines = text.lower().splitlines()
            first = next(place for place, line in enumerate(lines) if line.startswith("a. "))
            state = {*WORD.findall(" ".join(lines[: first - 1]))}
            is_yes = bool(state & {*WORD.findall(lines[first - 1])})
            found = {}
            for line in lines[first:]:
                label, _, option = line.partition(". ")
                if len(label) == 1:
                    of_words = bool(state & {*WORD.findall(option)})
                    fits = {"yes": is_yes, "no": not is_yes}.get(option.split(":")[0], of_words)
                    found[f" {label.upper()}"] = likely if fits else 0.02
            return found

        letters = [f" {letter}" for letter in "ABCDEFGH"]
        members.append(FakeBackend(name, rule, letters, context_window))
    return AdaFuseEngine(members, config)


def assert_reads_a_state_once(engine: AdaFuseEngine, state: str, count: int) -> None:
    """Check that members process the state once for all questions, and little more."""
    questions = {f"q{n}": Choice(f"Is it {n}?", ["yes", "no", "perhaps"]) for n in range(count)}
    decision = engine.decide(state, questions)
    requests, _ = ask(engine, [state], questions, {})
    prompts = [engine.encode_prompt(messages=r.messages, **r.options) for r in requests]
    for name, ids in engine.encode_text(state).items():
        asked = sum(len(prompt[name]) - len(ids) for prompt in prompts)
        assert decision.usage.tokens_processed[name] <= 1.2 * (len(ids) + asked)
