"""Compare AdaFuseLLM with HuggingFaceLLM on the same member.

    python benchmarks/llama_index_yardstick.py
    python benchmarks/llama_index_yardstick.py --output yardstick.md

The member is a real model with a real tokenizer, from the tests. Its scripted logits produce a
reply of fifty words, and each forward pass takes a fixed time. Both LLMs get the same model and
tokenizer. An ensemble of one member writes the greedy text of this member, so all differences come
from the integrations. Drafting and prefix caches are off, so that the numbers of forward passes are
comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import LLM, ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.huggingface import HuggingFaceLLM

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.backends.huggingface import HuggingFaceBackend

REPLY = " ".join(f"word{number}" for number in range(50))
PROMPT = "Count to fifty.\nAnswer:"
READ_CHUNKS = 3
"""Number of chunks to read from a stream before closing it."""


class Member:
    """The scripted member, with a record of its forward passes.

    Attributes:
        seconds: duration of a forward pass in seconds.
        passes: number of forward passes so far.
        prompts: tokens of each pass that reads more than one token.
        fails: whether the next passes raise an error.
    """

    def __init__(self, seconds: float) -> None:
        scripted = importlib.import_module("tests.support.scripted")
        template = importlib.import_module("tests.support.models").STRICT
        self.seconds = 0.0
        self.passes, self.fails = 0, False
        self.prompts: list[list[int]] = []
        self.model, shared = scripted.scripted_model(lambda _: REPLY, "sentencepiece", template)
        self.tokenizer = copy.deepcopy(shared)
        self.tokenizer.add_bos_token = True
        self.model.name_or_path = self.tokenizer.name_or_path
        self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.llms: dict[str, Callable[..., LLM]] = {
            "HuggingFaceLLM": self._huggingface,
            "AdaFuseLLM": self._adafuse,
        }
        backend = HuggingFaceBackend(self.model, self.tokenizer, "quill", prefix_cache_bytes=0)
        self._engine = AdaFuseEngine([backend], runtime=RuntimeConfig(drafting=False))
        self.seconds = seconds

    def wait_until_idle(self) -> int:
        """Wait until no more passes run; return the number of passes so far."""
        while True:
            before = self.passes
            time.sleep(10 * self.seconds + 0.05)
            if self.passes == before:
                return before

    def _huggingface(self, **kwargs: Any) -> LLM:
        llm: LLM = HuggingFaceLLM(
            model=self.model, tokenizer=self.tokenizer, model_name="quill", **kwargs
        )
        return llm

    def _adafuse(self, **kwargs: Any) -> LLM:
        return AdaFuseLLM(engine=self._engine, **kwargs)

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("the cable was cut")
        self.passes += 1
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.shape[1] > 1:
            self.prompts.append(ids[0].tolist())
        time.sleep(self.seconds)


Make = Callable[..., LLM]


def same_prompt(member: Member, make: Make) -> str:
    llm = make(
        max_new_tokens=2,
        completion_to_prompt=lambda prompt: f"Well. {prompt}",
        system_prompt="Be brief.",
    )
    member.prompts.clear()
    llm.complete(PROMPT)
    list(llm.stream_complete(PROMPT))
    member.wait_until_idle()
    first, second, *_ = member.prompts
    return "same" if first == second else "differ"


def same_text(_: Member, make: Make) -> str:
    llm = make(max_new_tokens=200)
    whole = llm.complete(PROMPT).text
    streamed = list(llm.stream_complete(PROMPT))[-1].text
    return "same" if whole.strip() == streamed.strip() else "differ"


def beginnings(member: Member, make: Make) -> str:
    member.prompts.clear()
    make(max_new_tokens=2).chat([ChatMessage("Count to fifty.")])
    return str(member.prompts[0].count(member.tokenizer.bos_token_id))


def stop(_: Member, make: Make) -> str:
    text = make(max_new_tokens=200).complete(PROMPT, stop=[" word3"]).text
    return "honoured" if "word3" not in text and "word2" in text else "ignored"


def overrides(member: Member, make: Make) -> str:
    before = member.passes
    make(max_new_tokens=60).complete(PROMPT, max_new_tokens=5)
    return "honoured" if member.passes - before < 20 else "ignored"


def heartbeat(_: Member, make: Make) -> str:
    async def run() -> float:
        gaps, last = [0.0], time.perf_counter()

        async def heart() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(0.002)
                gaps.append(time.perf_counter() - last)
                last = time.perf_counter()

        beating = asyncio.create_task(heart())
        await asyncio.sleep(0.01)
        await make(max_new_tokens=40).acomplete(PROMPT)
        await asyncio.sleep(0.01)
        beating.cancel()
        return max(gaps)

    return f"{asyncio.run(run()) * 1000:.0f} ms"


def closed(member: Member, make: Make) -> str:
    stream = make(max_new_tokens=200).stream_complete(PROMPT)
    for _ in range(READ_CHUNKS):
        next(stream)
    before = member.passes
    stream.close()
    return f"{member.wait_until_idle() - before} passes"


def cancelled(member: Member, make: Make) -> str:
    async def run() -> None:
        task = asyncio.create_task(make(max_new_tokens=200).acomplete(PROMPT))
        await asyncio.sleep(10 * member.seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    before = member.passes
    asyncio.run(run())
    return f"{member.wait_until_idle() - before} passes"


def failure(member: Member, make: Make) -> str:
    """Report what the reader of a stream sees when the member fails. A stream may hang."""
    outcomes: list[str] = []

    def read() -> None:
        try:
            list(make(max_new_tokens=20).stream_complete(PROMPT))
            outcomes.append("ends as if nothing had happened")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}"[:60])

    member.fails = True
    with _silent_threads():
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(timeout=2)
    member.fails = False
    return outcomes[0] if outcomes else "hangs"


def json_safe(_: Member, make: Make) -> str:
    raw: Any = make(max_new_tokens=5).complete(PROMPT).raw
    try:
        json.dumps(raw.model_dump() if hasattr(raw, "model_dump") else raw)
    except TypeError as error:
        return str(error)[:60]
    return "yes"


def usage(_: Member, make: Make) -> str:
    raw: Any = make(max_new_tokens=5).complete(PROMPT).raw
    counts = dict(raw).get("usage")
    if counts is None:
        return "none"
    return f"{counts.prompt_tokens} + {counts.completion_tokens} tokens"


def events(_: Member, make: Make) -> str:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = make(max_new_tokens=2, callback_manager=CallbackManager([debug]))
    llm.chat([ChatMessage("Count to fifty.")])
    return str(len(debug.get_event_pairs(CBEventType.LLM)))


CHECKS: dict[str, Callable[[Member, Make], str]] = {
    "prompts of `complete` and `stream_complete`": same_prompt,
    "texts of `complete` and `stream_complete`": same_text,
    "beginning-of-sequence tokens in a chat": beginnings,
    "`stop` of a call": stop,
    "`max_new_tokens` of a call": overrides,
    "longest pause of the event loop during `acomplete`": heartbeat,
    "computed after a stream was closed": closed,
    "computed by a task that was cancelled after the time of 10 passes": cancelled,
    "a stream whose member fails": failure,
    "`raw` can be written as JSON": json_safe,
    "usage": usage,
    "LLM events of one `chat`": events,
}


def table(seconds: float) -> str:
    """Check both LLMs and return the table as Markdown."""
    member = Member(seconds)
    rows = [["", *member.llms], ["---"] * (1 + len(member.llms))]
    rows += [
        [name, *(check(member, make) for make in member.llms.values())]
        for name, check in CHECKS.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@contextmanager
def _silent_threads() -> Iterator[None]:
    """Keep Python from printing errors in threads."""
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        yield
    finally:
        threading.excepthook = hook


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=0.01, help="duration of a forward pass in seconds"
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args(arguments)
    text = table(args.seconds)
    print(text)
    if args.output:
        args.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
