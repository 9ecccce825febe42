"""The option ``private_reasoning``: each member reasons alone, and the answer is fused."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    Generation,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    Request,
    RequestTimeoutError,
    RuntimeConfig,
)
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.runtime.job import Job
from adafuse_llm.strategies.registry import NAMED
from adafuse_llm.thinking import _closing
from adafuse_llm.tree import TokenTree
from tests.reference import Options, ReferenceMember, WordMixture, decode
from tests.support.compare import assert_same
from tests.support.models import CHATML, Recipe, backend, reference
from tests.support.scripted import Script, scripted
from tests.support.thinkers import DEEPSEEK, QWEN, decoded

ASKED = [{"role": "user", "content": "The capital?"}]
ANSWER = "Paris is it."


def says(thought: str, answer: str = ANSWER, *, closed: str = "\n</think>\n\n") -> Script:
    """A member that reasons, and then answers. A prompt without open reasoning gets the answer."""

    def script(prompt: str) -> str:
        opens = prompt.endswith("assistant\n")
        if opens and "<|A|>" not in prompt:
            return f"<think>\n{thought}{closed}{answer}"
        return f"{thought}{closed}{answer}" if prompt.endswith("<think>\n") else answer

    return script


def plain(_: str) -> str:
    return ANSWER


def deep(thought: str = "It is Paris.", **how: Any) -> HuggingFaceBackend:
    return scripted(says(thought, **how), name="deep", template=DEEPSEEK)


def wide(thought: str = "Paris, or Rome?", **how: Any) -> HuggingFaceBackend:
    """A member whose template leaves it to the member to open its reasoning."""
    return scripted(says(thought, **how), "sentencepiece", name="wide", template=QWEN)


def short(name: str = "short") -> HuggingFaceBackend:
    """A member that does not reason."""
    return scripted(plain, name=name, template=CHATML)


def engine_of(*members: HuggingFaceBackend, **options: Any) -> AdaFuseEngine:
    return AdaFuseEngine(members, AdaFuseConfig(**{"private_reasoning": 100, **options}))


def prompts_of(engine: AdaFuseEngine, **options: Any) -> tuple[dict[str, str], Generation]:
    """Every member's prompt of the answer, as text, and the response."""
    jobs: list[Job] = []
    with patch.object(engine.scheduler, "submit", wraps=engine.scheduler.submit) as submit:
        generation = engine.generate(messages=ASKED, **options)
        jobs += [job for job, _ in submit.call_args.args]
    (job,) = jobs
    members = {m.name: decoded(m.codec, m.tree.ids[: m.prompt_tokens]) for m in job.members}
    return members, generation


# Against the reference --------------------------------------------------------------------------

RECIPES = (
    Recipe(seed=1, template=DEEPSEEK),
    Recipe("gpt2", "sentencepiece", 2, template=DEEPSEEK),
    Recipe(seed=3, template=CHATML),
)


class Fixed:
    """A codec whose conversations have given tokens."""

    def __init__(self, codec: Any, ids: Sequence[int]) -> None:
        self._codec, self._ids = codec, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode_messages(self, _: Any) -> Sequence[int]:
        return self._ids


def thought_about(
    member: ReferenceMember, recipe: Recipe, limit: int, *, closes: bool = True
) -> ReferenceMember:
    """The same member behind its prompt and its own greedy reasoning, which is closed."""
    ids = list(member.codec.encode_messages(ASKED))
    if recipe.template == DEEPSEEK:
        prompt = len(ids)
        while len(ids) < prompt + limit:
            token = int(np.argmax(member.row(ids)))
            if token in member.end_ids:
                break
            ids.append(token)
        text = member.codec.decode_continuation(ids[:prompt], ids[prompt:])
        closing = "</think>\n\n" if text.endswith("\n") else "\n</think>\n\n"
        ids += member.codec.encode_continuation(ids, closing)[0] if closes else []
    return replace(member, codec=Fixed(member.codec, ids))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize(("strategy", "rule"), [("adafuse", None), ("mixture", WordMixture)])
@pytest.mark.parametrize("limit", [1, 12])
def test_the_answer_is_that_of_the_reference_after_the_private_thoughts(
    strategy: str, rule: Callable[[], Any] | None, limit: int, *, drafting: bool
) -> None:
    members = [backend(recipe) for recipe in RECIPES]
    engine = AdaFuseEngine(members, strategy=strategy, runtime=RuntimeConfig(drafting=drafting))
    thinkers = [thought_about(reference(each), each, limit) for each in RECIPES]
    options: dict[str, Any] = {"max_new_tokens": 24, "weights": (2.0, 1.0, 1.0)}
    options["branching_factor"] = 2
    expected = decode(
        thinkers,
        None,
        replace(Options(**options), max_words=1 if rule else 3),
        messages=ASKED,
        rule=rule() if rule else None,
    )
    actual = engine.generate(messages=ASKED, private_reasoning=limit, **options)
    assert set(actual.thoughts) == {RECIPES[0].name, RECIPES[1].name}
    thinking = {
        each.name: len(each.codec.encode_messages(ASKED)) - actual.usage.prompt_tokens[each.name]
        for each in thinkers
    }
    assert thinking[RECIPES[2].name] == 0
    assert limit <= thinking[RECIPES[0].name] <= limit + 11
    counted = actual.usage.model_copy(
        update={
            "prompt_tokens": {n: t + thinking[n] for n, t in actual.usage.prompt_tokens.items()},
            "completion_tokens": {
                n: t - thinking[n] for n, t in actual.usage.completion_tokens.items()
            },
        }
    )
    assert_same(actual.model_copy(update={"usage": counted}), expected, 1e-5)


@pytest.mark.parametrize("strategy", ["adafuse", "mixture"])
def test_nothing_known_from_thinking_is_used_in_the_answer(strategy: str) -> None:
    """Where the last token of a thought closes it, the answer begins at an evaluated node."""
    engine = AdaFuseEngine([backend(recipe) for recipe in RECIPES], strategy=strategy)
    thinkers = [thought_about(reference(each), each, 5, closes=False) for each in RECIPES]
    options: dict[str, Any] = {"max_new_tokens": 12, "weights": (2.0, 1.0, 1.0)}
    options |= {"branching_factor": 3, "temperature": 0.0}
    rule = WordMixture() if strategy == "mixture" else None
    asked = replace(Options(**options), max_words=1 if rule else 3)
    expected = decode(thinkers, None, asked, messages=ASKED, rule=rule)
    with patch("adafuse_llm.thinking._closing", lambda _: ""):
        actual = engine.generate(messages=ASKED, private_reasoning=5, **options)
    assert actual.text == expected.text
    assert len(actual.rounds) == len(expected.rounds)


# What members read and say ----------------------------------------------------------------------


@pytest.mark.quick
def test_each_member_answers_after_its_own_thoughts_and_not_those_of_others() -> None:
    prompts, generation = prompts_of(engine_of(deep(), wide(), short()))
    assert prompts["deep"].endswith("<|A|><think>\nIt is Paris.\n</think>\n\n")
    assert prompts["wide"].endswith("assistant\n<think>\nParis, or Rome?\n</think>\n\n")
    assert prompts["short"].endswith("The capital?<|im_end|>\n<|im_start|>assistant\n")
    assert (generation.text, generation.answer, generation.reasoning) == (ANSWER, ANSWER, "")
    assert generation.reply_prefix == ""
    assert generation.thoughts == {"deep": "It is Paris.", "wide": "Paris, or Rome?"}
    assert json.loads(generation.model_dump_json())["thoughts"] == generation.thoughts


@pytest.mark.parametrize("closed", ["\n</think>\n\n", "</think>", "\n</think> "])
def test_a_blank_line_follows_what_a_member_closes_itself(closed: str) -> None:
    prompts, generation = prompts_of(engine_of(deep("Hm.", closed=closed), short()))
    assert prompts["deep"].endswith(f"Hm.{closed.rstrip()}\n\n")
    assert generation.thoughts == {"deep": "Hm."}
    assert generation.text == ANSWER


@pytest.mark.quick
@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("so", "\n</think>\n\n"),
        ("so\n", "</think>\n\n"),
        ("", "\n</think>\n\n"),
        ("so</think>", "\n\n"),
        ("so</think>\n", "\n"),  # a token may hold more than the end of the marker
        ("so</think>\n\n", ""),
        ("so</think>Pa", ""),
    ],
)
def test_what_a_member_has_closed_is_not_closed_again(written: str, missing: str) -> None:
    codec = SimpleNamespace(decode_continuation=lambda before, ids: written)
    thinker: Any = SimpleNamespace(codec=codec, tree=TokenTree([1, 2]), prompt_tokens=2)
    assert _closing(thinker) == missing


def test_reasoning_is_closed_at_the_limit_and_where_a_member_ends_without() -> None:
    engine = engine_of(deep("word " * 50), short())
    prompts, generation = prompts_of(engine, private_reasoning=7)
    thought = generation.thoughts["deep"]
    assert thought and ("word " * 50).startswith(thought)
    assert prompts["deep"].rstrip().endswith("</think>")
    assert prompts["deep"].endswith("\n</think>\n\n")
    assert generation.text == ANSWER
    ended = engine_of(deep("No end.", answer="", closed=""), short())
    prompts, generation = prompts_of(ended)
    assert prompts["deep"].endswith("No end.\n</think>\n\n")
    assert generation.thoughts == {"deep": "No end."}


def test_usage_counts_the_tokens_and_passes_of_thinking() -> None:
    engine = AdaFuseEngine([deep(), short()], runtime=RuntimeConfig(drafting=False))
    whole = engine.generate(messages=ASKED, use=["short"])
    generation = engine.generate(messages=ASKED, private_reasoning=100)
    member = engine.backends[0]
    prompt = len(member.codec.encode_messages(ASKED))
    written = member.codec.encode_continuation((1,), f"It is Paris.\n</think>\n\n{ANSWER}")[0]
    assert generation.usage.prompt_tokens["deep"] == prompt
    assert abs(generation.usage.completion_tokens["deep"] - len(written)) <= 1
    assert generation.usage.completion_tokens["short"] == whole.usage.completion_tokens["short"]
    assert generation.usage.forward_passes["deep"] > len(written) - 6
    processed = generation.usage.tokens_processed["deep"] + generation.usage.cached_tokens["deep"]
    assert processed >= prompt + len(written) - 3


def test_the_limit_of_the_answer_does_not_count_thoughts() -> None:
    generation = engine_of(deep(), short()).generate(messages=ASKED, max_new_tokens=3)
    assert generation.thoughts == {"deep": "It is Paris."}
    assert generation.finish_reason == "length"
    assert ANSWER.startswith(generation.text)
    assert generation.text


# All calls ---------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_all_calls_give_the_same() -> None:
    engine = engine_of(deep(), wide())
    expected = engine.generate(messages=ASKED)
    events = list(engine.stream(messages=ASKED))
    assert "".join(each.text for each in events) == ANSWER
    assert events[-1].generation is not None
    assert events[-1].generation.thoughts == expected.thoughts
    assert all(each.round is not None for each in events)
    batch = engine.generate_batch(messages=[ASKED, [{"role": "user", "content": "Which?"}]])
    assert [each.text for each in batch] == [ANSWER, ANSWER]
    assert [each.thoughts for each in batch] == [expected.thoughts] * 2
    assert (await engine.agenerate(messages=ASKED)).thoughts == expected.thoughts
    assert engine.choose(messages=ASKED, choices=["Rome.", ANSWER]).text == ANSWER


@pytest.mark.sweep(2)
@pytest.mark.parametrize("strategy", sorted(NAMED))
def test_every_strategy_answers_after_private_thoughts(strategy: str) -> None:
    members = [deep(), wide()]
    use = ["deep"] if strategy == "single" else None
    engine = AdaFuseEngine(members, AdaFuseConfig(use=use), strategy=strategy)
    generation = engine.generate(messages=ASKED, private_reasoning=100, max_new_tokens=24)
    assert generation.text == ANSWER
    assert generation.thoughts["deep"] == "It is Paris."


def test_draws_depend_on_the_seed_and_on_the_member() -> None:
    recipes = [Recipe(seed=1, template=DEEPSEEK)] * 2
    known = backend(recipes[0])
    members = [
        HuggingFaceBackend(known.model, known.codec._tokenizer, name) for name in ("one", "two")
    ]
    engine = AdaFuseEngine(members)
    options: dict[str, Any] = {"messages": ASKED, "private_reasoning": 12, "max_new_tokens": 8}
    first = engine.generate(**options, temperature=1.0, seed=1, n=2)
    assert first.thoughts["one"] != first.thoughts["two"]
    (other,) = first.alternatives
    assert other.thoughts["one"] != first.thoughts["one"]
    again = engine.generate(**options, temperature=1.0, seed=1)
    assert (again.text, again.thoughts) == (first.text, first.thoughts)
    assert engine.generate(**options, temperature=1.0, seed=2).thoughts != first.thoughts
    greedy = engine.generate(**options)
    assert greedy.thoughts["one"] == greedy.thoughts["two"]


def test_the_answer_has_the_form_and_the_thoughts_are_free() -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = '{"city": "Paris"}'
    engine = engine_of(deep(answer=answer), scripted(lambda _: answer, name="short"))
    generation = engine.generate(messages=ASKED, json_schema=schema)
    assert json.loads(generation.text) == {"city": "Paris"}
    assert generation.thoughts == {"deep": "It is Paris."}
    assert engine.generate(messages=ASKED, regex=r"\{.*\}").thoughts == generation.thoughts


def test_clients_give_the_same() -> None:
    expected = engine_of(deep(), wide()).generate(messages=ASKED)
    pytest.importorskip("starlette")
    httpx = pytest.importorskip("httpx")
    from adafuse_llm import RemoteEngine
    from adafuse_llm.serving import ServingConfig, create_app
    from tests.support.serving import served

    local = AdaFuseEngine([deep(), wide()])
    with served(create_app(local, ServingConfig(max_output_tokens=120))) as url:
        with RemoteEngine(url) as engine:
            assert _same(engine.generate(messages=ASKED, private_reasoning=100), expected)
        body = {"model": "x", "messages": ASKED, "adafuse": {"private_reasoning": 100}}
        body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        said = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        assert said["choices"][0]["message"]["content"] == ANSWER
        assert said["choices"][0]["adafuse"]["thoughts"] == expected.thoughts
        body["adafuse"] = {"private_reasoning": 121}
        refused = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "private_reasoning must be at most 120" in refused.text


def _same(one: Generation, other: Generation) -> bool:
    return (one.text, one.thoughts) == (other.text, other.thoughts)


# Ends and errors --------------------------------------------------------------------------------


class After(threading.Event):
    """Is set after it was asked some times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_request_that_is_cancelled_while_members_think_tells_their_thoughts() -> None:
    engine = engine_of(deep("word " * 200), short(), private_reasoning=2000)
    generation = engine.generate(messages=ASKED, cancel=After(30))
    assert (generation.text, generation.finish_reason) == ("", "cancelled")
    thought = generation.thoughts["deep"]
    assert thought.startswith("word") and len(thought) < 900
    assert generation.usage.completion_tokens["deep"] > 0
    assert generation.usage.forward_passes["deep"] > 0
    assert engine.generate(messages=ASKED, private_reasoning=3).text == ANSWER


async def test_leaving_a_call_stops_the_thinking() -> None:
    engine = engine_of(deep("word " * 400), short(), private_reasoning=6000)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.agenerate(messages=ASKED), 0.5)
    with pytest.raises(RequestTimeoutError, match=r"stopped after timeout=0\.3"):
        engine.generate(messages=ASKED, timeout=0.3)
    assert engine.generate(messages=ASKED, private_reasoning=3).text == ANSWER


def test_a_member_that_fails_while_it_thinks_ends_the_request() -> None:
    member = deep()
    engine = engine_of(member, short())
    evaluate = member.evaluate
    calls = iter(range(100))

    def failing(queries: Any) -> Any:
        if next(calls) > 4:
            raise RuntimeError("out of order")
        return evaluate(queries)

    member.evaluate = failing  # type: ignore[method-assign]
    with pytest.raises(MemberError, match="out of order"):
        engine.generate(messages=ASKED)
    member.evaluate = evaluate  # type: ignore[method-assign]
    assert engine.generate(messages=ASKED).text == ANSWER


@pytest.mark.quick
def test_a_prompt_and_a_begun_reply_are_refused() -> None:
    engine = engine_of(deep(), short())
    with pytest.raises(InvalidInputError, match=r"needs messages .* and a prompt"):
        engine.generate("The capital?")
    begun = [*ASKED, {"role": "assistant", "content": "Par"}]
    with pytest.raises(InvalidInputError, match="and continue_final_message"):
        engine.generate(messages=begun, continue_final_message=True)
    with pytest.raises(InvalidOptionError, match="private_reasoning"):
        engine.generate(messages=ASKED, private_reasoning=0)
    assert engine.generate("The capital? Answer:", private_reasoning=None).thoughts == {}
    scores = engine.score(messages=ASKED, continuations=[ANSWER]).texts
    assert scores == engine.score(messages=ASKED, continuations=[ANSWER]).texts


def test_thoughts_leave_room_for_the_answer_in_the_window() -> None:
    member = scripted(says("word " * 400), name="deep", template=DEEPSEEK, window=100)
    engine = engine_of(member, short(), private_reasoning=500)
    generation = engine.generate(messages=ASKED, max_new_tokens=20)
    assert generation.text == ANSWER
    assert generation.thoughts["deep"].startswith("word word")
    with pytest.raises(ContextWindowError, match="leaves no room for private_reasoning"):
        engine.generate(messages=ASKED, max_new_tokens=80)


def test_members_of_which_none_reasons_answer_as_without(caplog: pytest.LogCaptureFixture) -> None:
    engine = AdaFuseEngine([short("a"), short("b")])
    with caplog.at_level(logging.WARNING):
        generation = engine.generate(messages=ASKED, private_reasoning=9)
        engine.generate(messages=ASKED, private_reasoning=9)
    assert caplog.text.count("private_reasoning has no effect") == 1
    expected = engine.generate(messages=ASKED)
    assert (generation.text, generation.thoughts) == (expected.text, {})
    assert generation.usage.completion_tokens == expected.usage.completion_tokens


def test_reasoning_that_is_switched_off_is_no_private_reasoning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of(wide(), short())
    assert "only some members reason" not in caplog.text
    off = engine.generate(messages=ASKED, chat_template_kwargs={"enable_thinking": False})
    assert off.thoughts == {}


def test_the_memory_of_thoughts_is_reserved() -> None:
    engine = AdaFuseEngine([deep(), short()])
    asked = Request(messages=ASKED, options={"max_new_tokens": 10})
    (usual,) = engine._jobs(asked)
    (private,) = engine._jobs(replace(asked, options={**asked.options, "private_reasoning": 50}))
    more = private.members[0].prompt_tokens - usual.members[0].prompt_tokens + 50
    member: Any = engine.backends[0]
    grown = sum(private.needs.values()) - sum(usual.needs.values())
    assert grown >= member.cache_bytes(200 + more) - member.cache_bytes(200)
