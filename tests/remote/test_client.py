"""`RemoteEngine` gives what the engine on the server gives, and its requests end as they should."""

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pytest

pytest.importorskip("starlette")

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    AdaFuseError,
    Engine,
    EngineClosedError,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    QueueFullError,
    RemoteEngine,
    Request,
    RequestCancelledError,
    RequestTimeoutError,
    Round,
    RuntimeConfig,
    ServerError,
    ServerNotReadyError,
    Tool,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.serving import ServingConfig, create_app
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.service import Service
from adafuse_llm.text.conversation import check_conversation
from tests.runtime.test_scheduler import Hanging
from tests.support.scripted import scripted_engine
from tests.support.serving import served
from tests.support.waiting import PATIENCE, background, in_child, wait_until

KEY = "sk-secret-of-the-client"
LONG = "x" * 2000
TURNS = [{"role": "user", "content": "Where is the ferry?"}]
TOOL = Tool("look_up", "Looks up a word.", {"type": "object", "properties": {"word": {}}})
CALL = {"id": "1", "name": "look_up", "arguments": {"word": "\u2028ferry"}}
CALLED: list[dict[str, Any]] = [
    *TURNS,
    {"role": "assistant", "content": "<think>So.</think>Look:", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "a boat"},
]
BEGUN = [*TURNS, {"role": "assistant", "content": "<think>So.</think>At "}]
DRAWN: Any = {"temperature": 0.9, "seed": 3}


def rule(shift: int) -> Callable[[str], dict[str, float]]:
    """Members that write letters, more or less sure of them."""

    def likely(text: str) -> dict[str, float]:
        if text.endswith("!"):
            raise ValueError("it read /srv/models/one/weights.bin badly")
        first = "abcdefgh"[(len(text) + shift * (len(text) % 3)) % 8]
        others = {"u": 0.2, " ": 0.15, "\u2028": 0.05, "é": 0.05, "<end>": 0.05}
        return {**dict.fromkeys("abcdefgh", 0.01), first: 0.4, **others}

    return likely


@pytest.fixture(scope="module")
def local() -> Iterator[AdaFuseEngine]:
    members = [FakeBackend("one", rule(0)), FakeBackend("two", rule(1), (), 1500)]
    with AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=30)) as engine:
        yield engine


@pytest.fixture(scope="module")
def remote(local: AdaFuseEngine) -> Iterator[RemoteEngine]:
    with served(create_app(local)) as url, RemoteEngine(url) as engine:
        yield engine


def endless(text: str) -> dict[str, float]:
    return {"a": 0.9, " ": 0.1}


@dataclass
class Held:
    engine: AdaFuseEngine
    member: Hanging
    service: Service
    remote: RemoteEngine

    def ends(self, unfinished: int = 0) -> None:
        """Wait until only `unfinished` requests run or wait on the server."""
        scheduler = self.engine.scheduler
        wait_until(lambda: scheduler.running + scheduler.waiting == unfinished)


@pytest.fixture
def held() -> Iterator[Held]:
    member = Hanging("m", endless)
    with AdaFuseEngine([member], runtime=RuntimeConfig(max_requests=2, max_waiting=1)) as engine:
        app = create_app(engine)
        with served(app) as url, RemoteEngine(url) as remote:
            yield Held(engine, member, app.state.service, remote)
        member.gate.set()


COSTS = {"forward_passes", "tokens_processed", "elapsed"}


def plain(result: Any) -> Any:
    """A result as plain values, without times and costs that depend on other requests."""
    if isinstance(result, BaseModel):
        result = result.model_dump()
    if isinstance(result, dict):
        return {name: plain(value) for name, value in result.items() if name not in COSTS}
    return [plain(each) for each in result] if isinstance(result, (list, tuple)) else result


CALLS: dict[str, Callable[[Engine], Any]] = {
    "prompt": lambda e: e.generate("The ferry  "),
    "messages": lambda e: e.generate(messages=TURNS, stop=["u"], top_logprobs=2),
    "results of tools": lambda e: e.generate(messages=CALLED, tools=[TOOL], tool_choice="required"),
    "instructions": lambda e: e.generate(
        messages=check_conversation(TURNS, [TOOL], instructions="Be brief.")
    ),
    "continued": lambda e: e.generate(
        messages=BEGUN, continue_final_message=True, weights={"one": 2, "two": 1}
    ),
    "several": lambda e: e.generate("x", **DRAWN, n=3, use="two"),
    "batch": lambda e: e.generate_batch(["x", "yy"], **DRAWN, n=2),
    "empty batch": lambda e: e.generate_batch([]),
    "stream": lambda e: list(e.stream(messages=TURNS)),
    "events of a batch": lambda e: sorted(
        e.open([Request(prompt=each) for each in ("x", "yy")]), key=itemgetter(0)
    ),
    "scores": lambda e: e.score("", ["abc", " u\u2028"], ends=True),
    "batch of scores": lambda e: e.open(
        [Request(prompt=each, texts=["abc", "u"]) for each in ("x", "yy")]
    ).results(),
    "choice": lambda e: e.choose(messages=TURNS, choices=["ab", "u"], use="one"),
    "tokens of messages": lambda e: e.encode_prompt(
        messages=TURNS, tools=[TOOL], tool_choice="required"
    ),
    "tokens of a text": lambda e: e.encode_text("two words"),
    "check": lambda e: e.check_grammar(max_words=2),
    "facts": lambda e: (e.members, e.config, e.member_info, e.context_window, e.can_enforce),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_remote_engine_gives_what_the_engine_gives(
    local: AdaFuseEngine, remote: RemoteEngine, name: str
) -> None:
    assert plain(CALLS[name](remote)) == plain(CALLS[name](local))


def test_without_a_limit_a_remote_reply_is_no_longer_than_a_local_one() -> None:
    with (
        scripted_engine(lambda _: "word " * 400) as local,
        served(create_app(local)) as url,
        RemoteEngine(url) as remote,
    ):
        replies = [each.generate(messages=TURNS) for each in (local, remote)]
    assert replies[0].text == replies[1].text
    assert replies[0].finish_reason == "length"


async def test_asynchronous_calls_give_the_same(local: AdaFuseEngine, remote: RemoteEngine) -> None:
    async def calls(engine: Engine) -> Any:
        whole = await engine.agenerate("x")
        events = [event async for event in engine.astream(messages=TURNS)]
        opened = await engine.aopen([Request(prompt="x", options={**DRAWN, "n": 2})])
        numbered = sorted([pair async for pair in opened], key=itemgetter(0))
        scores = await engine.ascore("x", ["ab", "u"], ends=True)
        return plain([whole, events, numbered, scores])

    assert await calls(remote) == await calls(local)


def test_grammars_are_checked_and_followed_on_the_server() -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"place": {"enum": ["port", "sea"]}}}
    with (
        scripted_engine(lambda _: '{"place": "port"}') as local,
        served(create_app(local)) as url,
        RemoteEngine(url) as remote,
    ):
        tools: Any = {"messages": TURNS, "tools": [TOOL], "json_schema": schema}
        assert remote.generate(**tools).text == local.generate(**tools).text
        remote.check_grammar(regex="a+")
        found = [error_of(lambda e: e.check_grammar(regex="a("), e) for e in (local, remote)]
    assert found[0] == found[1]


def error_of(call: Callable[[Engine], Any], engine: Engine) -> tuple[type[AdaFuseError], str]:
    with pytest.raises(AdaFuseError) as found:
        call(engine)
    return type(found.value), str(found.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.generate(5),
        lambda e: e.generate("x", max_wrds=2),
        lambda e: e.generate("x", regex="a"),
        lambda e: e.generate(LONG),
        lambda e: e.generate_batch(["x", " "]),
        lambda e: e.generate_batch(["x", LONG]),
        lambda e: e.open([Request(prompt="x", texts=each) for each in (["a"], [])]),
        lambda e: e.generate(messages=TURNS, chat_template_kwargs={"thinks": True}),
    ],
)
def test_errors_are_those_of_the_engine(
    local: AdaFuseEngine, remote: RemoteEngine, call: Callable[[Engine], Any]
) -> None:
    assert error_of(call, remote) == error_of(call, local)


def test_a_failing_member_is_named_without_paths(remote: RemoteEngine) -> None:
    with pytest.raises(MemberError) as found:
        remote.generate("x!")
    assert (found.value.member, found.value.reason) == ("one", "ValueError: it read [path] badly")
    assert remote.generate("x").text  # it stays usable


def test_threads_event_loops_and_forks_share_an_engine(
    local: AdaFuseEngine, remote: RemoteEngine
) -> None:
    prompts = [letter * 3 for letter in "abcdefgh"]
    expected = [local.generate(prompt).text for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert [each.text for each in pool.map(remote.generate, prompts)] == expected
        found = pool.map(lambda prompt: asyncio.run(remote.agenerate(prompt)).text, prompts)
        assert list(found) == expected
    assert in_child(lambda: remote.generate("aaa").text == expected[0])
    assert remote.generate("aaa").text == expected[0]


def test_another_strategy_can_be_chosen_and_the_key_is_not_pickled(
    local: AdaFuseEngine, remote: RemoteEngine
) -> None:
    with RemoteEngine(f"{remote.url}/v1/", KEY, strategy="single") as engine:
        data = pickle.dumps(engine)
    assert KEY.encode() not in data
    with pickle.loads(data) as alone:
        found = plain(alone.generate("x", use="one"))
    assert found == plain(local.with_strategy("single").generate("x", use="one"))
    with pytest.raises(InvalidOptionError, match="sngle"):
        RemoteEngine(remote.url, strategy="sngle")


def test_limits_and_keys_are_those_of_the_server(local: AdaFuseEngine) -> None:
    limits = ServingConfig(max_body_bytes=2500, max_output_tokens=5, max_choices=2)
    with served(create_app(local, limits, api_keys=["other", KEY])) as url:
        with pytest.raises(ServerError, match="no API key"):
            RemoteEngine(url)
        with RemoteEngine(url, f" {KEY}\n") as remote:
            assert remote.generate("x").usage.completion_tokens["one"] <= 5
            with pytest.raises(InvalidInputError, match="at most 2,500 bytes"):
                remote.generate("x" * 3000)
            with pytest.raises(InvalidOptionError, match="'n': at most 2 responses"):
                remote.generate("x", n=3, temperature=1)
            with pytest.raises(InvalidOptionError, match=r"^option 'max_new_tokens': .*at most 5"):
                remote.generate("x", max_new_tokens=6)


# Requests that end ------------------------------------------------------------------------------


def test_a_stream_that_is_closed_ends_on_the_server(held: Held) -> None:
    with closing(held.remote.stream("x", max_new_tokens=10**6)) as stream:
        assert next(stream).text
    held.ends()
    dropped = held.remote.stream("x", max_new_tokens=10**6)
    next(dropped)
    del dropped
    held.ends()


@pytest.mark.parametrize("call", ["agenerate", "ascore"])
async def test_a_cancelled_task_ends_its_request_on_the_server(held: Held, call: str) -> None:
    given: Any = {"continuations": ["a"]} if call == "ascore" else {}
    task = asyncio.create_task(getattr(held.remote, call)("hang", **given))
    assert await asyncio.to_thread(held.member.inside.wait, PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(held.ends)


def test_events_cancel_requests_one_by_one(held: Held) -> None:
    cancels = [threading.Event(), threading.Event()]
    requests = [
        Request(prompt=prompt, options={"max_new_tokens": 4}, cancel=cancel)
        for prompt, cancel in zip(["hang", "hang, too"], cancels, strict=True)
    ]
    done = background(held.remote.open(requests).results)
    assert held.member.inside.wait(PATIENCE)
    held.ends(2)
    cancels[0].set()
    held.ends(1)
    held.member.gate.set()
    first, second = done.result(PATIENCE)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert (first.text, second.text) == ("", "aaaa")


def test_a_cancelled_response_has_its_text_so_far_and_scores_have_none(held: Held) -> None:
    cancel, rounds = threading.Event(), list[Round | None]()
    for event in held.remote.stream("x", cancel=cancel, max_new_tokens=10**6):
        rounds.append(event.round)
        if len(rounds) == 3:
            cancel.set()
    done, last = event.generation, rounds.pop()
    assert done is not None
    assert last is None
    assert (done.finish_reason, done.strategy) == ("cancelled", "adafuse")
    assert list(done.rounds) == rounds
    assert done.text == "".join(each.text for each in done.rounds)
    cancel.clear()
    scores = background(held.remote.score, "hang", ["a"], cancel=cancel)
    assert held.member.inside.wait(PATIENCE)
    cancel.set()
    with pytest.raises(RequestCancelledError, match="before its texts were scored"):
        scores.result(PATIENCE)
    held.ends()
    wait_until(lambda: not held.service.running)


def test_time_limits_and_full_queues_are_errors(held: Held) -> None:
    with pytest.raises(RequestTimeoutError, match=r"timeout=0\.1"):
        held.remote.score("hang", ["a"], timeout=0.1)
    waiting = [background(held.remote.generate, "hang") for _ in range(3)]
    held.ends(3)
    with pytest.raises(QueueFullError, match=r"^the server is busy"):
        held.remote.generate("x")
    held.member.gate.set()
    assert all(each.result(PATIENCE).text for each in waiting)


async def test_closing_ends_what_threads_and_tasks_wait_for(held: Held) -> None:
    waiting = background(held.remote.score, "hang", ["a"])
    task = asyncio.create_task(held.remote.agenerate("hang"))
    await asyncio.to_thread(held.ends, 2)
    await asyncio.to_thread(held.remote.close)
    with pytest.raises(EngineClosedError):
        await asyncio.wait_for(task, PATIENCE)
    assert isinstance(waiting.exception(PATIENCE), EngineClosedError)
    for call in (lambda: held.remote.generate("x"), lambda: held.remote.encode_text("x")):
        with pytest.raises(EngineClosedError, match="create a new one"):
            call()


# Servers that cannot be used --------------------------------------------------------------------


def test_a_server_that_stops_ends_streams_with_an_error() -> None:
    with AdaFuseEngine([FakeBackend("m", endless)]) as engine:
        app = create_app(engine, ServingConfig(drain_seconds=0))
        with served(app) as url, RemoteEngine(url) as remote:
            stream = remote.stream("x", max_new_tokens=10**6)
            next(stream)
            app.state.service.begin_drain()
            with pytest.raises(ServerError, match="stopped before the response was complete"):
                list(stream)
            with pytest.raises(ServerNotReadyError, match="the server stops"):
                remote.generate("x")
    with pytest.raises(ServerNotReadyError, match="does not answer"):
        RemoteEngine(url)


def test_an_engine_can_wait_for_a_server(local: AdaFuseEngine) -> None:
    service = Service(ServingConfig())
    with served(build_app(service)) as url:
        with pytest.raises(ServerNotReadyError, match="the members are loading"):
            RemoteEngine(url)
        waiting = background(RemoteEngine, url, ready_timeout=30)
        service.open(local)
        with waiting.result(PATIENCE) as engine:
            assert engine.members == local.members


TOLD = {"member_info": [], "config": {}, "can_enforce": False}
ADAFUSE = {"data": [{"adafuse": TOLD}]}


def other_server(models: Any, answer: Callable[[], Response]) -> Starlette:
    async def complete(_: HttpRequest) -> Response:
        return answer()

    async def listed(_: HttpRequest) -> Response:
        return models if isinstance(models, Response) else JSONResponse(models)

    routes = [Route("/v1/completions", complete, methods=["POST"]), Route("/v1/models", listed)]
    return Starlette(routes=routes)


def events(*chunks: Any) -> Response:
    return PlainTextResponse("".join(f"data: {json.dumps(each)}\n\n" for each in chunks))


def breaks() -> Response:
    async def parts() -> Any:
        yield b'data: {"choices": [], "ada'
        raise OSError

    return StreamingResponse(parts())


@pytest.mark.parametrize(
    ("models", "answer", "says"),
    [
        (PlainTextResponse("hello"), None, "answers in an unknown form"),
        (JSONResponse({"data": [{"id": "gpt"}]}), None, "answers in an unknown form"),
        (PlainTextResponse("no", 404), None, "answers with the status 404"),
        (PlainTextResponse("bad gateway", 502), None, "answers with the status 502"),
        (ADAFUSE, lambda: events({"choices": [{"index": 5}], "adafuse": {"text": ""}}), "unknown"),
        (ADAFUSE, lambda: events(3), "unknown form|complete"),
        (ADAFUSE, lambda: events({"choices": []}), "ended the stream before"),
        (ADAFUSE, breaks, "closed the connection"),
    ],
)
def test_another_server_is_an_error_that_names_it(models: Any, answer: Any, says: str) -> None:
    with (
        served(other_server(models, answer)) as url,
        pytest.raises(ServerError, match=says) as found,
        RemoteEngine(url, KEY) as remote,
    ):
        remote.generate("x")
    assert url in str(found.value)
    assert KEY not in str(found.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://a:b@c", 5, "http://é"])
def test_addresses_and_keys_that_cannot_be_used_are_refused(url: Any) -> None:
    with pytest.raises(InvalidInputError, match="url must be the address of a server"):
        RemoteEngine(url)
    with pytest.raises(InvalidInputError, match="printable"):
        RemoteEngine("http://c", "k\ney")
