"""`RemoteEngine` gives what the engine on the server gives: results, events, errors."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    AdaFuseError,
    Engine,
    EngineClosedError,
    Generation,
    InvalidInputError,
    InvalidOptionError,
    MemberError,
    QueueFullError,
    RemoteEngine,
    Request,
    RequestTimeoutError,
    Round,
    RuntimeConfig,
    ServerError,
    ServerNotReadyError,
    StreamEvent,
    Tool,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.client import wire
from adafuse_llm.serving import ServingConfig, create_app
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.service import Service
from adafuse_llm.text.conversation import check_conversation
from tests.support.forks import in_child
from tests.support.serving import served

TURNS = [{"role": "user", "content": "Where is the ferry?"}]
TOOL = Tool("look_up", "Looks up a word.", {"type": "object", "properties": {"word": {}}})
CALLED = [
    *TURNS,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "name": "look_up", "arguments": {"word": "\u2028ferry"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "a boat"},
]
LONG = "x" * 2000
KEY, OTHER_KEY = "sk-secret-of-the-client", "sk-secret-of-the-server"


def rule(shift: int) -> Callable[[str], dict[str, float]]:
    """Members that write letters, more or less sure of them."""

    def likely(text: str) -> dict[str, float]:
        if text.endswith("!"):
            raise ValueError("it read /srv/models/one/weights.bin badly")
        first = "abcdefgh"[(len(text) + shift * (len(text) % 3)) % 8]
        return {
            **dict.fromkeys("abcdefgh", 0.01),
            first: 0.4,
            "u": 0.2,
            " ": 0.15,
            "\u2028": 0.05,
            "é": 0.05,
            "<end>": 0.05,
        }

    return likely


def slow(text: str) -> dict[str, float]:
    time.sleep(0.002)
    return {"a": 0.9, " ": 0.1}


@pytest.fixture(scope="module")
def local() -> Iterator[AdaFuseEngine]:
    members = [FakeBackend("one", rule(0)), FakeBackend("two", rule(1), (), 1500)]
    with AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=30)) as engine:
        yield engine


@pytest.fixture(scope="module")
def remote(local: AdaFuseEngine) -> Iterator[RemoteEngine]:
    with served(create_app(local)) as url, RemoteEngine(url) as engine:
        yield engine


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine([FakeBackend("slow", slow)], AdaFuseConfig(max_new_tokens=10**6)) as engine:
        yield engine


@pytest.fixture(scope="module")
def slow_remote(slow_engine: AdaFuseEngine) -> Iterator[RemoteEngine]:
    with served(create_app(slow_engine)) as url, RemoteEngine(url) as engine:
        yield engine


def as_round(played: Round) -> Round:
    return played.model_copy(update={"elapsed": 0.0})


def as_result(result: Any) -> Any:
    """A result without what differs between equal decodes."""
    if isinstance(result, Generation):
        return result.model_copy(
            update={
                "usage": result.usage.model_copy(
                    update={"forward_passes": {}, "tokens_processed": {}}  # they depend on timing
                ),
                "rounds": tuple(map(as_round, result.rounds)),
                "alternatives": tuple(map(as_result, result.alternatives)),
            }
        )
    if isinstance(result, StreamEvent):
        return result.model_copy(
            update={
                "round": result.round and as_round(result.round),
                "generation": result.generation and as_result(result.generation),
            }
        )
    if isinstance(result, (list, tuple)):
        return [as_result(each) for each in result]
    return result


def both(
    local: AdaFuseEngine, remote: RemoteEngine, call: Callable[[Engine], Any]
) -> tuple[Any, Any]:
    return as_result(call(local)), as_result(call(remote))


@pytest.mark.quick
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda engine: engine.generate("The ferry  "), id="prompt"),
        pytest.param(
            lambda engine: engine.generate(messages=TURNS, stop=["u"], top_logprobs=2),
            id="messages",
        ),
        pytest.param(
            lambda engine: engine.generate(messages=CALLED, tools=[TOOL], tool_choice="required"),
            id="results of tools",
        ),
        pytest.param(
            lambda engine: engine.generate(
                messages=check_conversation(TURNS, [TOOL], instructions="Be brief.")
            ),
            id="conversation",
        ),
        pytest.param(
            lambda engine: engine.generate(
                messages=[*TURNS, {"role": "assistant", "content": "At "}],
                continue_final_message=True,
                weights={"one": 2, "two": 1},
            ),
            id="continued",
        ),
        pytest.param(
            lambda engine: engine.generate("x", temperature=0.9, seed=3, n=3, use="two"),
            id="several responses",
        ),
        pytest.param(
            lambda engine: engine.generate_batch(["x", "yy"], temperature=0.9, seed=3, n=2),
            id="batch",
        ),
        pytest.param(
            lambda engine: engine.generate_batch(messages=[TURNS, CALLED], max_words=1),
            id="batch of conversations",
        ),
        pytest.param(lambda engine: engine.generate_batch([]), id="empty batch"),
        pytest.param(lambda engine: list(engine.stream(messages=TURNS)), id="stream"),
        pytest.param(
            lambda engine: sorted(engine.stream_batch(["x", "yy"]), key=lambda pair: pair[0]),
            id="stream of a batch",
        ),
        pytest.param(lambda engine: engine.score("", ["abc", " u\u2028"], stops=True), id="scores"),
        pytest.param(
            lambda engine: engine.score(messages=TURNS, continuations=["abc"], use="one"),
            id="scores of replies",
        ),
        pytest.param(
            lambda engine: engine.score_batch(["x", "yy"], [["abc"], ["u", "a"]]),
            id="batch of scores",
        ),
        pytest.param(
            lambda engine: engine.score_batch(
                messages=[TURNS, CALLED], continuations=[["u"], ["a", "b"]], stops=True
            ),
            id="batch of scores of replies",
        ),
        pytest.param(lambda engine: engine.choose("x", choices=["ab", "u"]), id="choice"),
        pytest.param(
            lambda engine: engine.choose_batch(messages=[TURNS, CALLED], choices=["ab", "u"]),
            id="choices",
        ),
        pytest.param(
            lambda engine: engine.encode_prompt(messages=TURNS, tools=[TOOL]),
            id="tokens of messages",
        ),
        pytest.param(lambda engine: engine.encode_prompt(LONG, use="two"), id="tokens of a prompt"),
        pytest.param(lambda engine: engine.encode_text("two words"), id="tokens of a text"),
        pytest.param(lambda engine: engine.check_grammar(max_words=2), id="check"),
        pytest.param(lambda engine: engine.generate("x").usage.prompt_tokens, id="usage"),
        pytest.param(
            lambda engine: (
                engine.members,
                engine.config,
                engine.member_info,
                engine.context_window,
            ),
            id="facts",
        ),
        pytest.param(lambda engine: engine.can_enforce, id="abilities"),
    ],
)
def test_a_remote_engine_gives_what_the_engine_gives(
    local: AdaFuseEngine, remote: RemoteEngine, call: Callable[[Engine], Any]
) -> None:
    expected, found = both(local, remote, call)
    assert found == expected


@pytest.mark.quick
async def test_asynchronous_calls_give_the_same(local: AdaFuseEngine, remote: RemoteEngine) -> None:
    async def calls(engine: Engine) -> Any:
        rounds: list[Round] = []
        whole = await engine.agenerate("x", on_round=rounds.append)
        events = [event async for event in engine.astream(messages=TURNS)]
        drawn = {"temperature": 0.9, "seed": 3, "n": 2}
        opened = await engine.aopen([Request(prompt="x", options=drawn)])
        numbered = sorted([pair async for pair in opened], key=lambda pair: pair[0])
        chosen = await engine.achoose("x", choices=["ab", "u"])
        scores = await engine.ascore("x", ["ab", "u"], stops=True)
        batch = await engine.ascore_batch(messages=[TURNS] * 2, continuations=[["a"], ["b"]])
        assert rounds == list(whole.rounds)
        return as_result([whole, events, numbered, chosen, scores, batch])

    assert await calls(remote) == await calls(local)


def test_structured_responses_are_the_same(members_that_answer: AdaFuseEngine) -> None:
    schema = {"type": "object", "properties": {"place": {"enum": ["port", "sea"]}}}
    with served(create_app(members_that_answer)) as url, RemoteEngine(url) as remote:
        expected, found = both(
            members_that_answer,
            remote,
            lambda engine: engine.generate(messages=TURNS, json_schema=schema).text,
        )
        assert found == expected
        remote.check_grammar(regex="a+")
        with pytest.raises(InvalidOptionError) as refused:
            remote.check_grammar(regex="a(")
        with pytest.raises(type(refused.value)) as same:
            members_that_answer.check_grammar(regex="a(")
        assert str(refused.value) == str(same.value)


@pytest.fixture(scope="module")
def members_that_answer() -> Iterator[AdaFuseEngine]:
    pytest.importorskip("llguidance")
    from tests.support.scripted import scripted_engine

    with scripted_engine(lambda _: '{"place": "port"}') as engine:
        yield engine


@pytest.mark.quick
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda engine: engine.generate(), id="no input"),
        pytest.param(lambda engine: engine.generate(5), id="a number"),
        pytest.param(lambda engine: engine.stream("x", messages=TURNS), id="both inputs"),
        pytest.param(lambda engine: engine.generate("\ud800"), id="half a character"),
        pytest.param(
            lambda engine: engine.generate(messages=[{"role": "user"}, 3]), id="wrong messages"
        ),
        pytest.param(
            lambda engine: engine.generate("x", tools=[TOOL]), id="tools without messages"
        ),
        pytest.param(lambda engine: engine.generate("x", max_wrds=2), id="unknown option"),
        pytest.param(lambda engine: engine.generate("x", use="three"), id="unknown member"),
        pytest.param(lambda engine: engine.generate("x", weights=[1]), id="too few weights"),
        pytest.param(lambda engine: engine.generate("x", n=2), id="nothing drawn"),
        pytest.param(
            lambda engine: engine.stream("x", n=2, temperature=1), id="several in a stream"
        ),
        pytest.param(lambda engine: engine.generate("x", regex="a"), id="no grammar"),
        pytest.param(lambda engine: engine.generate(LONG), id="too long"),
        pytest.param(lambda engine: engine.generate("x", timeout=0), id="no time"),
        pytest.param(lambda engine: engine.generate("x", cancel=5), id="wrong cancel"),
        pytest.param(lambda engine: engine.generate_batch(["x", " "]), id="empty in a batch"),
        pytest.param(lambda engine: engine.generate_batch(["x", LONG]), id="too long in a batch"),
        pytest.param(
            lambda engine: engine.generate_batch(
                messages=[TURNS, [{"role": "boss", "content": "x"}]]
            ),
            id="wrong role in a batch",
        ),
        pytest.param(lambda engine: engine.generate_batch("x"), id="text for a batch"),
        pytest.param(lambda engine: engine.score("x", []), id="no continuations"),
        pytest.param(
            lambda engine: engine.score("x", ["a"], use="three"), id="unknown member to score"
        ),
        pytest.param(lambda engine: engine.choose("x", choices=None), id="no choices"),
        pytest.param(
            lambda engine: engine.choose("x", choices=["a"], max_new_tokens=0), id="no tokens"
        ),
        pytest.param(lambda engine: engine.encode_text(None), id="no text"),
        pytest.param(
            lambda engine: engine.generate(
                messages=TURNS, chat_template_kwargs={"three": {"thinks": True}}
            ),
            id="unknown member of variables",
        ),
    ],
)
def test_errors_are_those_of_the_engine(
    local: AdaFuseEngine, remote: RemoteEngine, call: Callable[[Engine], Any]
) -> None:
    with pytest.raises(AdaFuseError) as expected:
        call(local)
    with pytest.raises(AdaFuseError) as found:
        call(remote)
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)
    assert remote.generate("x").text  # it stays usable


@pytest.mark.quick
def test_a_failing_member_is_named_without_paths(
    local: AdaFuseEngine, remote: RemoteEngine
) -> None:
    with pytest.raises(MemberError) as expected:
        local.generate("x!")
    stream = remote.stream("x!")  # its input is usable
    with pytest.raises(MemberError) as found:
        next(stream)
    assert found.value.member == expected.value.member
    assert found.value.reason == expected.value.reason.replace(
        "/srv/models/one/weights.bin", "[path]"
    )


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_streams_end_on_the_server_when_they_are_closed(
    slow_engine: AdaFuseEngine, slow_remote: RemoteEngine
) -> None:
    running = lambda: slow_engine._scheduler.running  # noqa: E731
    with closing(slow_remote.stream("x")) as stream:
        assert next(stream).text
        assert running() == 1
    until(lambda: running() == 0)
    unread = slow_remote.stream("x")
    until(lambda: running() == 1)
    unread.close()
    until(lambda: running() == 0)
    dropped = slow_remote.stream("x")
    until(lambda: running() == 1)
    del dropped
    until(lambda: running() == 0)

    async def leave() -> None:
        await asyncio.wait_for(slow_remote.agenerate("x"), 0.2)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(leave())
    until(lambda: running() == 0)


@pytest.mark.parametrize("way", ["sync", "async", "unread"])
def test_an_event_cancels_at_once(slow_remote: RemoteEngine, way: str) -> None:
    cancel = threading.Event()
    rounds: list[Round] = []
    if way == "unread":
        stream = slow_remote.stream("x", cancel=cancel)
        time.sleep(0.1)
        cancel.set()
        time.sleep(0.3)  # the server is not told again
        *events, last = stream
        assert last.generation is not None
        assert last.generation.rounds == tuple(
            event.round for event in [*events, last] if event.round
        )
        assert last.generation.finish_reason == "cancelled"
        return

    def started(played: Round) -> None:
        rounds.append(played)
        if len(rounds) == 3:
            times.append(time.monotonic())
            cancel.set()

    times: list[float] = []
    if way == "sync":
        done = slow_remote.generate("x", cancel=cancel, on_round=started)
    else:
        done = asyncio.run(slow_remote.agenerate("x", cancel=cancel, on_round=started))
    assert time.monotonic() - times[0] < 0.5
    assert done.finish_reason == "cancelled"
    assert list(done.rounds) == rounds


def test_an_event_cancels_a_stream_that_a_load_balancer_hides(slow_engine: AdaFuseEngine) -> None:
    """Two servers behind a load balancer: the second one with the stream, and the first one."""
    other = AdaFuseEngine([FakeBackend("slow", slow)])
    apps = [create_app(other), create_app(slow_engine)]
    cancels: list[int] = []

    async def balance(scope: Scope, receive: Receive, send: Send) -> None:
        is_cancel = scope["type"] == "http" and scope["path"] == wire.CANCEL
        if is_cancel:
            cancels.append(len(cancels))
        await apps[0 if is_cancel and len(cancels) < 3 else 1](scope, receive, send)

    cancel = threading.Event()
    with other, served(balance) as url, RemoteEngine(url) as remote:
        events = remote.stream("x", cancel=cancel)
        next(events)
        cancel.set()
        *_, last = events
    assert last.generation is not None
    assert last.generation.finish_reason == "cancelled"
    assert len(cancels) == 3


def test_an_event_that_is_set_already_leaves_no_text(
    slow_engine: AdaFuseEngine, slow_remote: RemoteEngine
) -> None:
    cancel = threading.Event()
    cancel.set()
    expected, found = both(
        slow_engine, slow_remote, lambda engine: engine.generate("x", cancel=cancel)
    )
    assert found == expected
    assert found.text == ""


def test_a_request_that_takes_too_long_is_an_error(slow_remote: RemoteEngine) -> None:
    with pytest.raises(RequestTimeoutError, match=r"0\.1"):
        slow_remote.generate("x", timeout=0.1)


def test_a_full_queue_is_an_error() -> None:
    runtime = RuntimeConfig(max_requests=1, max_waiting=0)
    with (
        AdaFuseEngine([FakeBackend("slow", slow)], runtime=runtime) as engine,
        served(create_app(engine)) as url,
        RemoteEngine(url) as remote,
        closing(remote.stream("x", max_new_tokens=10**6)) as stream,
    ):
        next(stream)
        with pytest.raises(QueueFullError, match=r"^the server is busy: .* Try again later"):
            remote.generate("x")


def test_threads_and_event_loops_share_an_engine(
    local: AdaFuseEngine, remote: RemoteEngine
) -> None:
    prompts = [letter * 3 for letter in "abcdefgh"]
    expected = [local.generate(prompt).text for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert [each.text for each in pool.map(remote.generate, prompts)] == expected
        found = pool.map(lambda prompt: asyncio.run(remote.agenerate(prompt)).text, prompts)
        assert list(found) == expected


def test_observers_see_every_round_and_may_fail(
    remote: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Round] = []

    def observe(played: Round) -> None:
        seen.append(played)
        raise ValueError("no")

    with RemoteEngine(remote.url, on_round=seen.append) as watched:
        with caplog.at_level(logging.ERROR):
            rounds = watched.generate("x", on_round=observe).rounds
        assert seen == [each for each in rounds for _ in range(2)]
        assert "an on_round observer failed" in caplog.text


def test_another_strategy_can_be_chosen(local: AdaFuseEngine, remote: RemoteEngine) -> None:
    with RemoteEngine(remote.url, strategy="single") as alone:
        found = as_result(alone.generate("x", use="one"))
        assert found == as_result(local.with_strategy("single").generate("x", use="one"))
        assert found != as_result(remote.generate("x", use="one", branching_factor=3))
    with pytest.raises(InvalidOptionError, match="sngle"):
        RemoteEngine(remote.url, strategy="sngle")


def test_a_closed_engine_takes_no_requests(
    slow_engine: AdaFuseEngine, slow_remote: RemoteEngine
) -> None:
    engine = RemoteEngine(slow_remote.url)
    stream = engine.stream("x")
    next(stream)
    waiting = ThreadPoolExecutor(1).submit(engine.score, "x", ["a" * 500])
    until(lambda: slow_engine._scheduler.running == 2)
    assert not engine.closed
    engine.close()
    assert engine.closed
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        waiting.result(10)
    with pytest.raises(EngineClosedError, match="create a new one"):
        engine.generate("x")
    engine.close()


def test_limits_of_the_server_are_errors_of_the_input(local: AdaFuseEngine) -> None:
    limits = ServingConfig(max_prompt_characters=20, max_output_tokens=5, max_choices=2)
    with served(create_app(local, limits)) as url, RemoteEngine(url) as remote:
        assert remote.generate("x").usage.completion_tokens["one"] <= 5
        for refused in (
            lambda: remote.generate(LONG),
            lambda: remote.generate_batch(["x"] * 3),
            lambda: remote.encode_text(LONG),
            lambda: remote.score("x", ["a" * 15, "b" * 15]),
        ):
            with pytest.raises(InvalidInputError, match="this server"):
                refused()
        with pytest.raises(InvalidOptionError, match=r"^max_new_tokens must be at most 5"):
            remote.generate("x", max_new_tokens=6)


def test_a_key_and_the_size_of_requests_are_those_of_the_server(local: AdaFuseEngine) -> None:
    app = create_app(local, ServingConfig(max_body_bytes=2000), api_keys=[OTHER_KEY, KEY])
    with served(app) as url, RemoteEngine(url, f" {KEY}\n") as remote:
        assert remote.generate("x").text == local.generate("x").text
        with pytest.raises(InvalidInputError, match=r"at most 2,000 bytes"):
            remote.generate("x" * 3000)


# Servers that cannot be used --------------------------------------------------------------------


def app_of(handle: Callable[[HttpRequest], Any]) -> Starlette:
    return Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])


async def not_json(_: HttpRequest) -> Response:
    return PlainTextResponse("hello")


async def first_protocol(_: HttpRequest) -> Response:
    known = {"members": [], "strategy": "adafuse", "config": {}, "can_enforce": False}
    return JSONResponse({"protocol": 1, **known})


async def nothing(_: HttpRequest) -> Response:
    return PlainTextResponse("no", 404)


async def nobody_behind(_: HttpRequest) -> Response:
    return PlainTextResponse("bad gateway", 502)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("app", "key", "kind", "says"),
    [
        (app_of(not_json), None, ServerError, "answers in an unknown form"),
        (app_of(first_protocol), None, ServerError, "answers in an unknown form. It must be"),
        (app_of(nothing), None, ServerError, "answers with the status 404"),
        (app_of(nobody_behind), None, ServerNotReadyError, "answers with the status 502"),
        (
            build_app(Service(ServingConfig()), [OTHER_KEY]),
            KEY,
            ServerError,
            "refuses the key.*ADAFUSE_API_KEY",
        ),
        (build_app(Service(ServingConfig()), [OTHER_KEY]), None, ServerError, "needs a key"),
        (
            build_app(Service(ServingConfig())),
            KEY,
            ServerNotReadyError,
            "is not ready: the members are loading; try again later",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error_at_once(
    app: Starlette, key: str | None, kind: type[ServerError], says: str
) -> None:
    with served(app) as url, pytest.raises(ServerError, match=says) as found:
        RemoteEngine(url, key)
    assert type(found.value) is kind
    assert url in str(found.value)
    assert KEY not in str(found.value)


@pytest.mark.quick
def test_a_server_that_is_not_there_is_an_error_at_once() -> None:
    with served(app_of(nothing)) as url:
        pass
    with pytest.raises(ServerNotReadyError, match=f"{url} does not answer"):
        RemoteEngine(url)


def test_an_engine_can_wait_for_a_server(local: AdaFuseEngine) -> None:
    with served(app_of(nothing)) as url:
        pass
    began = time.monotonic()
    with pytest.raises(ServerNotReadyError, match="does not answer"):
        RemoteEngine(url, ready_timeout=0.3)
    assert time.monotonic() - began >= 0.3

    service = Service(ServingConfig())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(RemoteEngine, url, ready_timeout=30)
        time.sleep(0.1)
        with served(build_app(service), port=int(url.rpartition(":")[2])):
            time.sleep(0.3)
            assert not waiting.done()
            service.open(local)
            with waiting.result(10) as engine:
                assert engine.members == local.members


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("127.0.0.1:8000",), "must begin with http://"),
        (("http://",), "must begin with http://"),
        (("http://a:b@c",), "no user name"),
        (("http://c:99999999",), "must begin with http://"),
        ((5,), "must be text"),
        (("http://c/v1/",), "leave out /v1$"),
        (("http://c/adafuse/v1",), "leave out /adafuse/v1$"),
        (("http://c", "k\ney"), "printable"),
    ],
)
def test_addresses_and_keys_that_cannot_be_used_are_refused(
    arguments: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        RemoteEngine(*arguments)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("option", "value"),
    [("connect_timeout", 0), ("ready_timeout", -1), ("ready_timeout", "1")],
)
def test_times_that_cannot_be_waited_are_refused(option: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=option):
        RemoteEngine("http://127.0.0.1:1", **{option: value})


def test_a_server_that_dies_in_mid_stream_is_an_error_until_it_is_back(
    local: AdaFuseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAFUSE_API_KEY", KEY)
    sent: list[str | None] = []

    async def info(request: HttpRequest) -> Response:
        sent.append(request.headers.get("authorization"))
        answer = wire.Info(
            protocol=2, members=local.member_info, strategy="adafuse", config={}, can_enforce=False
        )
        return Response(answer.model_dump_json())

    async def breaks(_: HttpRequest) -> Response:
        async def lines() -> Any:
            head = wire.Head(stream="1", size=1, members=local.members)
            yield head.model_dump_json() + "\n" + '{"index": 0, "ev'
            await asyncio.sleep(0.05)
            raise OSError

        return StreamingResponse(lines())

    app = Starlette(routes=[Route(wire.INFO, info), Route(wire.OPEN, breaks, methods=["POST"])])
    with served(app) as url:
        engine = RemoteEngine(url)
        assert sent == [f"Bearer {KEY}"]
        stream = engine.stream("x")
        with pytest.raises(ServerError, match=f"{url} closed the connection"):
            next(stream)
    with pytest.raises(ServerError, match=f"{url} does not answer"):
        engine.generate("x")
    with served(create_app(local), port=int(url.rpartition(":")[2])):
        assert engine.generate("x").text == local.generate("x").text
    with (
        AdaFuseEngine([FakeBackend("three", rule(0))]) as other,
        served(create_app(other), port=int(url.rpartition(":")[2])),
        pytest.raises(ServerError, match="now has other members \\(three\\)"),
    ):
        engine.generate("x")
    engine.close()


@pytest.mark.parametrize(("size", "indices"), [(0, ()), (2, (0, 0)), (1, (7,)), (1, (-1,))])
def test_a_stream_of_a_wrong_shape_is_an_error(
    local: AdaFuseEngine, size: int, indices: tuple[int, ...]
) -> None:
    whole = StreamEvent(text="a", round=None, generation=local.generate("x"))
    wrong = [wire.Head(stream="1", size=size, members=local.members).model_dump_json()]
    wrong += [wire.Events().pack(index, whole).model_dump_json() for index in indices]

    async def info(_: HttpRequest) -> Response:
        known = wire.Info(
            protocol=wire.PROTOCOL,
            members=local.member_info,
            strategy="adafuse",
            config={},
            can_enforce=False,
        )
        return PlainTextResponse(known.model_dump_json())

    async def stream(_: HttpRequest) -> Response:
        return PlainTextResponse("\n".join([*wrong, ""]))

    app = Starlette(routes=[Route(wire.INFO, info), Route(wire.OPEN, stream, methods=["POST"])])
    with (
        served(app) as url,
        RemoteEngine(url) as engine,
        pytest.raises(ServerError, match="unknown form"),
    ):
        engine.generate("x")


def test_a_server_that_stops_ends_streams_with_an_error(slow_engine: AdaFuseEngine) -> None:
    app = create_app(slow_engine, ServingConfig(drain_seconds=0))
    with served(app) as url, RemoteEngine(url) as engine:
        stream = engine.stream("x")
        next(stream)
        app.state.service.begin_drain()
        with pytest.raises(ServerError, match="stopped before the response was complete"):
            list(stream)
        with pytest.raises(ServerNotReadyError, match="the server stops"):
            engine.generate("x")


def test_an_engine_can_be_pickled_without_its_key(
    remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteEngine(remote.url, KEY, strategy="single") as engine:
        assert KEY not in repr(engine)
        data = pickle.dumps(engine)
        assert KEY.encode() not in data
    with pickle.loads(data) as copy:
        assert repr(copy) == f"RemoteEngine({remote.url!r}, members=[one, two])"
        assert copy.generate("x", use="one").text


def test_a_forked_child_connects_by_itself(remote: RemoteEngine) -> None:
    expected = remote.generate("x").text
    assert in_child(lambda: remote.generate("x").text == expected)
    assert remote.generate("x").text == expected
