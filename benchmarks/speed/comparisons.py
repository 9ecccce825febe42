"""The comparisons: each yields lines of the table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import mul
from typing import Any, Final

import torch

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.decoding.draft import EXPENSIVE
from adafuse_llm.results import Generation, Usage
from benchmarks.speed.measure import Cost, Counts, Line, timed
from benchmarks.speed.suites import PASSAGE, Chat, Suite, gguf_file

SYSTEMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mixture": {"strategy": "mixture"},
    "adafuse, B = 1": {"strategy": "adafuse", "branching_factor": 1},
    "adafuse, B = 3": {"strategy": "adafuse", "branching_factor": 3},
    "adafuse, B = 1, no drafts": {"strategy": "adafuse", "branching_factor": 1, "drafting": False},
}
"""The ensembles' strategies and options."""

KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "real": ("q8_0", "q4"),
    "large": ("q4", "q8_0"),
}
"""Types of the weights of GGUF members, by suite. The embedded suite has none."""

Answer = Callable[[Chat, int], Counts]
"""A function that answers a chat with at most a number of tokens."""


@contextmanager
def ensembles(engine: AdaFuseEngine) -> Iterator[dict[str, Answer]]:
    """Yield the systems of `SYSTEMS`, which share the members of an engine."""
    with ExitStack() as stack:
        yield {
            name: partial(_answer, stack.enter_context(_sharing(engine, **options)), options)
            for name, options in SYSTEMS.items()
        }


def _sharing(
    engine: AdaFuseEngine, *, strategy: str, drafting: bool = True, **_: Any
) -> AdaFuseEngine:
    return AdaFuseEngine(
        engine.backends, strategy=strategy, runtime=RuntimeConfig(drafting=drafting)
    )


def _answer(engine: AdaFuseEngine, options: Mapping[str, Any], chat: Chat, new: int) -> Counts:
    return _answer_all(engine, options, new, [chat])


def _answer_all(
    engine: AdaFuseEngine, options: Mapping[str, Any], new: int, chats: Sequence[Chat]
) -> Counts:
    """Answer chats at once, and add up the counts."""
    own = {key: options[key] for key in ("branching_factor",) if key in options}
    found = engine.generate_batch(messages=chats, max_new_tokens=new, **own)
    last = engine.members[-1]
    return Counts(
        sum(len(each.text.encode()) for each in found),
        sum(each.usage.forward_passes[last] for each in found),
        sum(each.usage.completion_tokens[last] for each in found),
    )


@torch.inference_mode()
def run_generate(backend: Any, chat: Chat, new: int) -> Counts:
    """Answer with the greedy ``generate()`` of a transformers member."""
    ids = torch.tensor([backend.codec.encode_messages(chat)], device=backend.model.device)
    output = backend.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )
    written = output[0, ids.shape[1] :]
    text = backend.tokenizer.decode(written, skip_special_tokens=True)
    return Counts(len(text.encode()), 0, len(written))


class LlamaCpp:
    """The greedy decoding of llama.cpp, with its default settings and one thread."""

    def __init__(self, backend: Any) -> None:
        from adafuse_llm.backends.llamacpp.library import Model, Settings, load_library

        self._backend, self._library = backend, load_library()
        self._model = Model(
            backend.facts.files[0], backend.name, Settings(reorder=True, gpu_layers=0)
        )
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 4096, 1, 1
        self._context = self._library.llama_init_from_model(self._model.pointer, params)
        self._batch = self._library.llama_batch_init(2048, 0, 1)

    def answer(self, chat: Chat, new: int) -> Counts:
        """Answer a chat."""
        import numpy as np

        codec = self._backend.codec
        prompt = codec.encode_messages(chat)
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)
        tokens: list[int] = []
        rest, length = prompt, 0
        while len(tokens) < new:
            for index, token in enumerate(rest):
                self._batch.token[index], self._batch.pos[index] = token, length + index
                self._batch.n_seq_id[index], self._batch.seq_id[index][0] = 1, 0
                self._batch.logits[index] = index == len(rest) - 1
            self._batch.n_tokens = len(rest)
            assert not self._library.llama_decode(self._context, self._batch)
            length += len(rest)
            logits = self._library.llama_get_logits(self._context)
            rest = [int(np.ctypeslib.as_array(logits, (self._model.vocabulary_size,)).argmax())]
            if rest[0] in self._backend.end_ids:
                break
            tokens += rest
        return Counts(len(codec.decode_continuation(prompt, tokens).encode()), 0, len(tokens))


def in_turns(systems: Mapping[str, Answer], suite: Suite) -> dict[str, list[Cost]]:
    """Run systems on each chat in turns, after a chat that is not timed."""
    costs: dict[str, list[Cost]] = {name: [] for name in systems}
    for chat in (suite.chats[0], *suite.chats):
        for name, answer in systems.items():
            costs[name].append(timed(partial(answer, chat, suite.response)))
    return {name: found[1:] for name, found in costs.items()}


def ratios(above: Sequence[Cost], *below: Sequence[Cost]) -> list[float]:
    """Return the CPU time per byte of each run, relative to the sum of others."""
    pairs = zip(above, zip(*below, strict=True), strict=True)
    return [one.per_byte / sum(each.per_byte for each in others) for one, others in pairs]


def generate(suite: Suite, _: str) -> Iterator[Line]:
    """Compare ensembles of transformers members with ``generate()`` of their members."""
    for names in suite.groups:
        what = " + ".join(names)
        with suite.ensemble(names) as engine, ensembles(engine) as fused:
            own = {f"{each.name} alone": partial(run_generate, each) for each in engine.backends}
            costs = in_turns({**own, **fused}, suite)
            alone = [costs[name] for name in own]
            for name in own:
                each = [1000 * cost.per_byte for cost in costs[name]]
                yield Line("`generate()`: CPU milliseconds per byte", name, each)
            for name in SYSTEMS:
                found = costs[name]
                yield Line(f"{what}: CPU time / sum of `generate()`", name, ratios(found, *alone))
                yield Line(f"{what}: CPU time / {names[-1]} alone", name, ratios(found, alone[-1]))
                passes = [each.counts.passes / max(1, each.counts.tokens) for each in found]
                yield Line(f"{what}: passes of {names[-1]} per token", name, passes)


def gguf(suite: Suite, name: str) -> Iterator[Line]:
    """Compare GGUF members with llama.cpp's own decoding and, if small, with transformers."""
    names = suite.groups[0]
    with ExitStack() as stack:
        near = {}
        if name != "large":
            others = stack.enter_context(ensembles(stack.enter_context(suite.ensemble(names))))
            near = {f"{key} near": answer for key, answer in others.items()}
        for kind in KINDS.get(name, ()):
            with suite.ensemble(names, kind) as engine, ensembles(engine) as fused:
                own = {each.name: LlamaCpp(each).answer for each in engine.backends}
                costs = in_turns({**own, **near, **fused}, suite)
            alone = [costs[each] for each in own]
            for system in SYSTEMS:
                what, found = f"GGUF {kind.upper()}", costs[system]
                values = ratios(found, *alone)
                yield Line(f"{what}: CPU time / sum of llama.cpp's own decoding", system, values)
                walls = [
                    one.wall_per_byte / sum(each.wall_per_byte for each in others)
                    for one, others in zip(found, zip(*alone, strict=True), strict=True)
                ]
                yield Line(f"{what}: time / sum of llama.cpp's own decoding", system, walls)
                if near:
                    values = ratios(found, costs[f"{system} near"])
                    yield Line(f"{what}: CPU time / transformers, float32", system, values)


def larger(suite: Suite, _: str, kind: str = "") -> Iterator[Line]:
    """Compare mixtures with their last member alone, and count the passes of all members."""
    form = kind.upper() or "float32"
    for names in suite.groups:
        what = f"{' + '.join(names)}, {form}"
        with suite.ensemble(names, kind) as engine, ExitStack() as stack:
            lead = engine.backends[-1]
            alone = LlamaCpp(lead).answer if kind else partial(run_generate, lead)
            found: dict[str, list[Generation]] = {}
            systems: dict[str, Answer] = {"alone": alone}
            for name, (drafting, cost, temperature) in DRAFTS.items():
                runtime = RuntimeConfig(drafting=drafting)
                one = AdaFuseEngine(engine.backends, strategy="mixture", runtime=runtime)
                stack.enter_context(one)
                done = found.setdefault(name, [])
                systems[name] = partial(_counted, one, cost, done, temperature=temperature, seed=1)
            costs = in_turns(systems, suite)
            sizes = [(each.parameters or 0) / (lead.parameters or 1) for each in engine.backends]
        for name, done in found.items():
            values = ratios(costs[name], costs["alone"])
            yield Line(f"{what}: CPU time / {names[-1]} alone", name, values)
            passes = _per_token([each.usage for each in done[1:]])
            for member, count in zip(names, passes, strict=True):
                yield Line(f"{what}: passes of {member} per token", name, [count])
            by_size = sum(map(mul, passes, sizes))
            yield Line(f"{what}: passes by size / {names[-1]} alone", name, [by_size])


def larger_gguf(suite: Suite, name: str) -> Iterator[Line]:
    """Compare mixtures of GGUF members with their last member alone."""
    for kind in KINDS.get(name, ()):
        yield from larger(suite, name, kind)


DRAFTS: Final[Mapping[str, tuple[bool, float | None, float]]] = {
    "mixture": (True, None, 0.0),
    "mixture, no drafts": (False, None, 0.0),
    "mixture, cheap passes": (True, 0.02, 0.0),
    "mixture, T = 1": (True, None, 1.0),
}
"""By name: whether members draft, the cost of a further token in a pass (None: the member's own),
and the temperature."""


def _counted(
    engine: AdaFuseEngine,
    token_cost: float | None,
    done: list[Generation],
    chat: Chat,
    new: int,
    **options: Any,
) -> Counts:
    """Answer a chat, and append the answer to `done`. `token_cost` is as in `DRAFTS`."""
    own = [member.token_cost for member in engine.backends]
    for member, cost in zip(engine.backends, own, strict=True):
        member.token_cost = cost if token_cost is None else token_cost
    try:
        done.append(engine.generate(messages=chat, max_new_tokens=new, **options))
    finally:
        for member, cost in zip(engine.backends, own, strict=True):
            member.token_cost = cost
    return Counts(len(done[-1].text.encode()))


def _per_token(usages: Sequence[Usage]) -> list[float]:
    """Return the passes of each member in all answers, per token of the last member."""
    tokens = sum([*usage.completion_tokens.values()][-1] for usage in usages)
    passes = zip(*(usage.forward_passes.values() for usage in usages), strict=True)
    return [sum(each) / max(1, tokens) for each in passes]


def drafts(suite: Suite, name: str) -> Iterator[Line]:
    """Count what passes cost with drafts, relative to those without, for costs of a further token.

    At each cost c, members draft by the rule for c. A pass over n tokens costs 1 + c (n - 1), times
    the member's parameters. Answers are compared per byte, and tokens of prompts do not count.
    """
    with suite.ensemble(suite.groups[0], "q4" if name in KINDS else "") as engine:
        sizes = {member.name: member.parameters or 1 for member in engine.backends}

        def answers(branches: int, token_cost: float | None) -> list[Generation]:
            runtime = RuntimeConfig(drafting=token_cost is not None)
            done: list[Generation] = []
            with AdaFuseEngine(engine.backends, strategy="adafuse", runtime=runtime) as one:
                for chat in (*suite.chats, *suite.more):
                    _counted(one, token_cost, done, chat, suite.counted, branching_factor=branches)
            return done

        for branches in (1, 3):
            plain = answers(branches, None)
            drafted = {is_dear: answers(branches, float(is_dear)) for is_dear in (False, True)}
            for cost in TOKEN_COSTS:
                pairs = zip(drafted[cost > EXPENSIVE], plain, strict=True)
                values = [
                    pass_cost(one, sizes, cost) / pass_cost(other, sizes, cost)
                    for one, other in pairs
                ]
                what = f"a further token costs {cost}: passes with drafts / without"
                yield Line(what, f"adafuse, B = {branches}", values)


TOKEN_COSTS: Final = (0.02, 0.1, 0.2, 0.5, 1.0)
"""Costs of a further token of a pass, in passes over one token."""


def pass_cost(answer: Generation, sizes: Mapping[str, int], token_cost: float) -> float:
    """Return the cost of an answer's passes per byte, as `drafts` computes it."""
    usage, cost = answer.usage, 0.0
    for name, passes in usage.forward_passes.items():
        tokens = usage.tokens_processed[name] - usage.prompt_tokens[name]
        cost += sizes[name] * (passes + token_cost * (tokens - passes))
    return cost / max(1, len(answer.text.encode()))


def many(suite: Suite, name: str) -> Iterator[Line]:
    """Compare requests at once with one request at a time."""
    numbers = range(-(-suite.requests // len(suite.chats)))
    chats = [_marked(chat, number) for number in numbers for chat in suite.chats]
    chats, new = chats[: suite.requests], suite.response // 2
    for kind in ("", KINDS[name][0]):
        with suite.ensemble(suite.groups[0], kind) as engine:
            for system, options in list(SYSTEMS.items())[:3]:
                with _sharing(engine, **options) as sharing:
                    run = partial(_answer_all, sharing, options, new)
                    run(chats[:2])
                    single = [timed(partial(run, [chat])) for chat in chats[: len(suite.chats)]]
                    batch = timed(partial(run, chats))
                    written = sum(each.counts.bytes for each in single)
                    one = sum(each.cpu for each in single) / written
                    what = f"{suite.requests} requests at once, {kind.upper() or 'float32'}"
                    value = one / batch.per_byte
                    yield Line(f"{what}: throughput / one at a time", system, [value])


def slots(suite: Suite, name: str) -> Iterator[Line]:
    """Compare requests at once with llama.cpp's own server, which runs only the last member.

    The server and each member of the ensemble compute with one thread.
    """
    import httpx
    import psutil

    from tests.real.servers import llama_server

    if name not in KINDS:
        return
    names, kind = suite.groups[0], KINDS[name][0]
    chats = [_marked(suite.chats[n % len(suite.chats)], n) for n in range(suite.requests)]
    with (
        suite.ensemble(names, kind) as engine,
        llama_server(gguf_file(names[-1], kind), slots=len(chats)) as url,
        httpx.Client(base_url=url, timeout=None) as client,
        ThreadPoolExecutor(len(chats)) as threads,
    ):
        process = psutil.Process().children()[-1]

        def ask(chat: Chat) -> int:
            body = {"messages": chat, "max_tokens": suite.response, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            return len(answer["choices"][0]["message"]["content"].encode())

        def answer_there(chats: Sequence[Chat]) -> Cost:
            before, start = process.cpu_times(), time.perf_counter()
            written = sum(threads.map(ask, chats))
            after, wall = process.cpu_times(), time.perf_counter() - start
            cpu = after.user + after.system - before.user - before.system
            return Cost(cpu, wall, Counts(written))

        answer_there(chats[:2])
        for system, options in list(SYSTEMS.items())[:2]:
            with _sharing(engine, **options) as sharing:
                run = partial(_answer_all, sharing, options, suite.response)
                run(chats[:2])
                ours, theirs = timed(partial(run, chats)), answer_there(chats)
            what = f"{len(chats)} requests at once, {kind.upper()}: throughput / llama-server's"
            yield Line(f"{what}, CPU time", system, [theirs.per_byte / ours.per_byte])
            yield Line(f"{what}, time", system, [theirs.wall_per_byte / ours.wall_per_byte])


def _marked(chat: Chat, number: int) -> Chat:
    """Return a chat with a number in its last message, so that it differs from other chats."""
    last = chat[-1]
    return [*chat[:-1], {**last, "content": f"{last['content']} (Answer {number}.)"}]


def prompts(suite: Suite, _: str) -> Iterator[Line]:
    """Compare the time until the first span of long prompts with the members' own prefill.

    Only the default strategy runs, because all strategies read prompts in the same way.
    """
    with suite.ensemble(suite.groups[0]) as engine:
        for length in (1, *suite.prompts):
            chat = [{"role": "user", "content": f"{PASSAGE} " * length}]
            tokens = len(engine.backends[-1].codec.encode_messages(chat))
            own = timed(partial(_prefill, engine, chat)).cpu
            first = timed(partial(_first_span, engine, chat)).cpu
            what = f"prompt of {tokens:,} tokens: CPU time to the first span / prefill"
            if length > 1:  # the short prompt warms up
                yield Line(what, "default strategy", [first / own])


@torch.inference_mode()
def _prefill(engine: AdaFuseEngine, chat: Chat) -> Counts:
    """Run a pass of each model over a prompt."""
    backends: Sequence[Any] = engine.backends
    for backend in backends:
        ids = torch.tensor([backend.codec.encode_messages(chat)])
        backend.model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return Counts(0)


def _first_span(engine: AdaFuseEngine, chat: Chat) -> Counts:
    """Run an ensemble until its first span."""
    cancel, text = threading.Event(), ""
    for event in engine.stream(messages=chat, max_new_tokens=16, cancel=cancel):
        cancel.set()
        text += event.text
    return Counts(len(text))


def server(suite: Suite, _: str) -> Iterator[Line]:
    """Compare requests to a server in this process with calls of its engine."""
    import httpx

    from adafuse_llm.serving import create_app
    from tests.support.serving import served

    with (
        suite.ensemble(suite.groups[0]) as engine,
        served(create_app(engine)) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):

        def here(chat: Chat, new: int) -> Counts:
            found = engine.generate(messages=chat, max_new_tokens=new)
            return Counts(len(found.text.encode()))

        def there(chat: Chat, new: int) -> Counts:
            body = {"model": "adafuse", "messages": chat, "max_tokens": new}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            return Counts(len(answer["choices"][0]["message"]["content"].encode()))

        costs = in_turns({"here": here, "there": there}, suite)
    pairs = list(zip(costs["there"], costs["here"], strict=True))
    extra = [1000 * (one.cpu - other.cpu) for one, other in pairs]
    values = ratios(costs["there"], costs["here"])
    yield Line("a request to the server: CPU time / a call", "default strategy", values)
    yield Line("a request to the server: more CPU milliseconds", "default strategy", extra)


COMPARISONS: Final[Mapping[str, Callable[[Suite, str], Iterator[Line]]]] = {
    "generate": generate,
    "gguf": gguf,
    "many": many,
    "larger": larger,
    "larger gguf": larger_gguf,
    "drafts": drafts,
    "prompts": prompts,
    "server": server,
    "slots": slots,
}
