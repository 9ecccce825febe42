"""Split the CPU time of a batch: the models, the reading of logits, tokenizers and the rest.

CPU time is that of all threads of the process. The rest is what the engine does between the passes:
rounds, trees, drafts, the scheduler, events and results.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.huggingface import backend as huggingface
from adafuse_llm.backends.logits.rows import Logits
from adafuse_llm.text.codec import TokenizerCodec
from benchmarks.speed.measure import Outcome, Report, System, Target, take_turns
from benchmarks.speed.members import Members, embedded, make_engine, prompt_of
from benchmarks.speed.peers import add_up, outcome_of

if TYPE_CHECKING:
    from benchmarks.speed.comparisons import Size

MODELS, LOGITS, TOKENIZERS, REST = "models", "logits", "tokenizers", "rest"
PARTS: Final = (MODELS, LOGITS, TOKENIZERS, REST)
CODEC_METHODS: Final = ("encode_prompt", "encode_continuation", "decode_continuation")
LIMIT: Final = 0.15


class Clocks:
    """Clocks that measure the CPU seconds of named parts.

    Each thread has its own stack of running parts. While a part runs inside another one, only the
    inner part counts.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running = threading.local()

    def enter(self, part: str) -> None:
        """Begin a part in this thread."""
        stack = self._stop()
        stack.append((part, time.thread_time()))

    def leave(self) -> None:
        """End the innermost part of this thread."""
        stack = self._stop()
        stack.pop()
        if stack:
            stack[-1] = (stack[-1][0], time.thread_time())

    def _stop(self) -> list[tuple[str, float]]:
        """Add the seconds of the innermost part, and return the stack of this thread."""
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[tuple[str, float]] = self._running.stack
        if stack:
            part, since = stack[-1]
            self.seconds[part] += time.thread_time() - since
        return stack

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the function with a clock around each call."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed


@contextmanager
def clocks_of(members: Members) -> Iterator[Clocks]:
    """Measure the parts of the members while the context is open."""
    clocks = Clocks()
    with ExitStack() as stack:
        for member in members:
            before = member.model.register_forward_pre_hook(lambda *_: clocks.enter(MODELS))
            after = member.model.register_forward_hook(lambda *_: clocks.leave())
            stack.callback(before.remove)
            stack.callback(after.remove)
        wrapped = [(huggingface, "read", LOGITS), (Logits, "__init__", LOGITS)]
        wrapped += [(TokenizerCodec, name, TOKENIZERS) for name in CODEC_METHODS]
        for owner, name, part in wrapped:
            stack.enter_context(
                patch.object(owner, name, clocks.around(getattr(owner, name), part))
            )
        yield clocks


def share(report: Report, size: Size) -> None:
    """Measure how much of the CPU time of one request and of a batch is outside the models."""
    requests, prompt, response = size.share
    members = embedded()
    texts = [prompt_of(prompt, seed) for seed in range(requests)]
    for branches in (1, 3):
        engine = make_engine(
            members, max_requests=requests, branching_factor=branches, max_new_tokens=response
        )
        systems: dict[str, System] = {
            _name(count): partial(_split, members, engine, texts[:count]) for count in (1, requests)
        }
        point = f"prompt {prompt}, response {response}, B = {branches}"
        rows = take_turns("share", point, systems, size.repeats)
        report.rows += rows.values()
        for name, row in rows.items():
            seconds = {part: row.part(part) for part in PARTS}
            whole = sum(seconds.values())
            shares = ", ".join(f"{part} {seconds[part] / whole:.0%}" for part in PARTS)
            title = f"CPU time, B = {branches}, {name}"
            report.figures.append((title, f"{shares} of {whole:.2f} s"))
        batch = rows[_name(requests)]
        outside = 1 - batch.part(MODELS) / sum(batch.part(part) for part in PARTS)
        title = f"CPU time outside the models, {_name(requests)}, B = {branches}"
        report.targets.append(Target(title, outside, LIMIT, unit="of all"))


def _name(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests} requests at once"


def _split(members: Members, engine: AdaFuseEngine, texts: Sequence[str]) -> Outcome:
    """Run a batch, and return the CPU seconds of its parts."""
    with clocks_of(members) as clocks:
        start = time.process_time()
        generations = engine.generate_batch(texts)
        seconds = time.process_time() - start
    parts = {part: clocks.seconds[part] for part in (MODELS, LOGITS, TOKENIZERS)}
    parts[REST] = seconds - sum(parts.values())
    return replace(add_up([outcome_of(each) for each in generations]), parts=parts)
