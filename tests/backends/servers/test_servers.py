"""Members on inference servers, against servers with a tiny real model."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from transformers import GenerationConfig

from adafuse_llm import (
    AdaFuseEngine,
    GrammarError,
    InvalidInputError,
    InvalidOptionError,
    LoadError,
    MemberError,
    MemberUnavailableError,
    ServerMember,
    UnsupportedModelError,
)
from adafuse_llm.backends import (
    Backend,
    Query,
    TokenTree,
)
from adafuse_llm.backends.servers import connection
from adafuse_llm.backends.servers.backend import ServerBackend
from adafuse_llm.backends.servers.llama_server import LEAST, unbiased
from adafuse_llm.loading.members import load_members
from adafuse_llm.testing import BackendTests
from tests.support.inference_servers import APIS, RECIPE, InferenceServer
from tests.support.models import Recipe, backend, model, tokenizer
from tests.support.serving import served

KEY = "s3cret-key"
PROMPT = "The ferry to Orrin"

every_api = pytest.mark.parametrize("api", APIS)
one_api = pytest.mark.parametrize("api", APIS[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of `RECIPE`, and the configuration of its model."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer(RECIPE.kind).save_pretrained(path)
    model(RECIPE).config.save_pretrained(path)
    return path


@pytest.fixture
def running() -> Iterator[Callable[[InferenceServer], str]]:
    """Run a server until the end of the test, and return its address."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(served(server.app()))


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.Connection.__init__, "__defaults__", (None, None, 3.0))


def member(url: str, folder: Path, **settings: Any) -> ServerBackend:
    settings = {"url": url, "tokenizer": str(folder), **settings}
    (loaded,), _ = load_members([ServerMember(**settings)])
    assert isinstance(loaded, ServerBackend)
    return loaded


Load = Callable[..., ServerBackend]


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    """Load the member of a server that runs until the end of the test."""
    with ExitStack() as stack:

        def load(server: InferenceServer, source: Path = folder, **settings: Any) -> ServerBackend:
            made = member(stack.enter_context(served(server.app())), source, **settings)
            stack.callback(made.close)
            return made

        yield load


def ask(loaded: ServerBackend, text: str = PROMPT) -> Any:
    tree = TokenTree(loaded.codec.encode_prompt(text))
    try:
        return loaded.evaluate([Query(tree, (tree.root,), (), 2)])[0]
    finally:
        loaded.release(tree)


class TestRules(BackendTests):
    steps = 15

    @pytest.fixture(autouse=True, params=APIS)
    def _served(self, request: pytest.FixtureRequest, folder: Path) -> Iterator[None]:
        self.server = InferenceServer(request.param)
        with served(self.server.app()) as url:
            self.loaded = member(url, folder)
            yield
            self.loaded.close()
            self.loaded.close()

    def member(self) -> ServerBackend:
        return self.loaded

    def logits(self, ids: Sequence[int]) -> Any:
        return self.server.logprobs(ids).tolist()


@every_api
def test_texts_and_scores_equal_those_of_the_model_in_this_process(api: str, load: Load) -> None:
    """A pair of a member on a server and one in this process, and the first one alone."""
    other = backend(Recipe("qwen2", "unigram", seed=5))
    here = backend(replace(RECIPE))
    loaded = load(InferenceServer(api), name=here.name)
    pairs: list[tuple[list[Backend], list[Backend]]]
    pairs = [([loaded], [here]), ([loaded, other], [here, other])]
    for members, local in pairs:
        with AdaFuseEngine(members) as far:
            near = AdaFuseEngine(local)
            for branching in (1, 3):
                options: Any = {"max_new_tokens": 8, "branching_factor": branching}
                options |= {"max_words": 1 + branching % 2, "margin_threshold": 0.7}
                got, want = far.generate(PROMPT, **options), near.generate(PROMPT, **options)
                assert got.text == want.text
                for one, two in zip(got.rounds, want.rounds, strict=True):
                    assert [c.text for c in one.candidates] == [c.text for c in two.candidates]
                    for a, b in zip(one.candidates, two.candidates, strict=True):
                        assert a.score == pytest.approx(b.score, abs=1e-4)


@every_api
def test_the_api_of_a_server_is_detected_and_its_only_model_is_used(
    api: str, folder: Path, running: Callable[[InferenceServer], str]
) -> None:
    url = running(InferenceServer(api, source=str(folder)))
    (loaded,), weights = load_members([ServerMember(url, weight=2.0)])
    assert isinstance(loaded, ServerBackend)
    assert loaded.is_remote
    assert not loaded.full
    assert loaded.device == f"server {url}"
    assert loaded.facts.model == "tiny"
    assert loaded.context_window == 1023
    assert loaded.end_ids == backend(RECIPE).end_ids
    assert weights == {loaded.name: 2.0}
    loaded.close()


@every_api
def test_a_pass_is_one_round_trip_with_all_nodes_of_all_requests(api: str, load: Load) -> None:
    server = InferenceServer(api)
    loaded = load(server)
    trees = [TokenTree(loaded.codec.encode_prompt(text)) for text in (PROMPT, "In winter")]
    for _ in range(2):
        queries = []
        before = server.counts.copy()
        for tree in trees:
            nodes = [tree.root, tree.child(tree.root, 20), tree.grow([30, 31])]
            queries.append(Query(tree, tuple(nodes), tuple(nodes[1:]), 3))
        results = loaded.evaluate(queries)
    made = server.counts - before
    assert [result.passes for result in results] == [1, 1]
    calls = made["/v1/completions"] + made["/generate"] + made["/completion"]
    assert calls <= (1 if api == "sglang" else 3)
    parts = {"vllm": 2, "sglang": 1, "llama-server": 2}[api]
    assert made["prompts"] <= parts * 8 + 8  # the nodes, and the parents of two nodes


def test_more_given_tokens_than_a_call_of_vllm_can_have_are_divided(load: Load) -> None:
    server = InferenceServer("vllm")
    loaded = load(server)
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    nodes = [tree.child(tree.root, token) for token in range(300)]
    result = loaded.evaluate([Query(tree, (tree.root,), tuple(nodes), 2)])[0]
    row = server.logprobs(tree.ids)
    assert list(result.logprobs) == pytest.approx(row[:300].tolist(), abs=1e-6)


def test_the_server_of_vllm_limits_the_likeliest_tokens(load: Load) -> None:
    loaded = load(InferenceServer("vllm", max_logprobs=5), name="few")
    assert loaded.listed_limit == 5
    with AdaFuseEngine([loaded]) as engine:
        assert engine.generate(PROMPT, max_new_tokens=4, branching_factor=5).text
        with pytest.raises(
            InvalidOptionError, match=r"6 likeliest tokens, but member 'few' lists 5"
        ):
            engine.generate(PROMPT, max_new_tokens=4, branching_factor=6)
    with pytest.raises(LoadError, match=r"lists 1 likeliest token; .*--max-logprobs 20"):
        load(InferenceServer("vllm", max_logprobs=1))


@every_api
def test_what_a_server_cannot_give_is_an_error_before_any_compute(api: str, load: Load) -> None:
    server = InferenceServer(api)
    loaded = load(server, name="far")
    calls = sum(server.counts.values())
    with AdaFuseEngine([loaded]) as engine:
        with pytest.raises(InvalidOptionError, match=r"member 'far' cannot draw tokens.*use="):
            engine.generate(PROMPT, temperature=0.7)
        with pytest.raises(
            InvalidOptionError, match=r"member 'far' cannot change its distrib.*use="
        ):
            engine.generate(PROMPT, repetition_penalty=1.2)
        with pytest.raises(GrammarError, match=r"member 'far' cannot follow.*use=.*or use choices"):
            engine.generate(PROMPT, regex="[a-z]+")
    if api == "llama-server":
        with (
            AdaFuseEngine([loaded], strategy="mixture") as engine,
            pytest.raises(InvalidInputError, match="'far'"),
        ):
            engine.generate(PROMPT)
    assert sum(server.counts.values()) == calls
    with AdaFuseEngine([loaded]) as engine:
        found = engine.generate(PROMPT, choices=[" sails", " leaves"])
        assert found.text in (" sails", " leaves")
        assert engine.score(PROMPT, [" sails"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_mixture_needs_few_tokens_of_servers(api: str, load: Load) -> None:
    here = backend(RECIPE)
    loaded = load(InferenceServer(api), name=here.name)
    other = backend(Recipe("qwen2", "unigram", seed=5))
    for others in ([], [other]):
        weights = [2, 1][: 1 + len(others)]
        got, want = (
            AdaFuseEngine([one, *others], strategy="mixture").generate(
                PROMPT, max_new_tokens=8, weights=weights
            )
            for one in (loaded, here)
        )
        assert got.text == want.text
        for one, two in zip(got.rounds, want.rounds, strict=True):
            scores = [c.score for c in one.candidates], [c.score for c in two.candidates]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("kind", ["bytelevel", "unigram"])
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_the_end_of_a_word_has_the_probability_of_all_tokens_that_can_follow_it(
    api: str, kind: Any, tmp_path: Path, running: Callable[[InferenceServer], str]
) -> None:
    recipe = replace(RECIPE, kind=kind)
    tokenizer(kind).save_pretrained(tmp_path)
    server = InferenceServer(api, recipe=recipe)
    loaded = member(running(server), tmp_path)
    assert loaded.has_word_ends()
    texts = backend(recipe).token_texts
    ends = {token for token, text in enumerate(texts) if text[:1].isspace()} | loaded.end_ids
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    nodes = [tree.root, tree.child(tree.root, 20), tree.grow([30, 31])]
    (result,) = loaded.evaluate([Query(tree, tuple(nodes), (), 2, word_ends=True)])
    for node, summary in zip(nodes, result.next, strict=True):
        row = server.logprobs([*tree.ids, *tree.tokens(node)])
        want = row[sorted(ends)].logsumexp(-1).item()
        assert summary.word_end_logprob == pytest.approx(want, abs=1e-5)
    loaded.close()


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_server_that_does_not_follow_regular_expressions_tells_no_ends_of_words(
    api: str, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    loaded = load(InferenceServer(api, ignores_regex=True), name="far")
    with (
        AdaFuseEngine([loaded], strategy="mixture") as engine,
        pytest.raises(InvalidInputError, match=r"how likely a word ends.*'far'"),
    ):
        engine.generate(PROMPT)
    assert "do not permit those tokens that they should" in caplog.text


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_ends_of_words_are_asked_for_again_after_an_error(api: str, load: Load) -> None:
    server = InferenceServer(api)
    loaded = load(server)
    server.faults.append(JSONResponse({"error": "CUDA error"}, 500))
    assert [loaded.has_word_ends() for _ in range(2)] == [False, True]


def test_the_likeliest_and_the_given_tokens_are_never_in_one_batch_of_vllm(load: Load) -> None:
    """vLLM 0.32 lists wrong tokens for a request if another one in its batch has given tokens."""
    server = InferenceServer("vllm", batch_seconds=0.02)
    loaded = load(server, name="far")
    prompts = (PROMPT, "In winter", "Anna counted", "The keeper said")
    near, far = (AdaFuseEngine([each], strategy="mixture") for each in (backend(RECIPE), loaded))
    want = [near.generate(prompt, max_new_tokens=6).text for prompt in prompts]
    assert [each.text for each in far.generate_batch(prompts, max_new_tokens=6)] == want
    with ThreadPoolExecutor() as threads:
        assert [*threads.map(lambda p: far.generate(p, max_new_tokens=6).text, prompts)] == want


def test_the_members_of_a_program_on_one_vllm_server_take_turns(
    folder: Path, running: Callable[[InferenceServer], str]
) -> None:
    url = running(InferenceServer("vllm", batch_seconds=0.02))
    one, two = (member(url, folder, name=name) for name in ("one", "two"))
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, two)
        time.sleep(0.01)  # so that the next call begins while this one runs
        assert one.has_word_ends()
        assert asked.result().next
    want = AdaFuseEngine([backend(RECIPE)]).generate(PROMPT, max_new_tokens=6).text
    assert AdaFuseEngine([one, two]).generate(PROMPT, max_new_tokens=6).text == want
    with ThreadPoolExecutor() as threads:
        engines = [AdaFuseEngine([each]) for each in (one, two)]
        for found in threads.map(lambda e: e.generate(PROMPT, max_new_tokens=6), engines):
            assert found.text == want
    one.close()
    two.close()


def test_settings_of_a_generation_config_that_do_not_apply_have_a_warning(
    folder: Path,
    tmp_path: Path,
    running: Callable[[InferenceServer], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = running(InferenceServer("vllm"))
    member(url, folder).close()
    assert not caplog.text
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    asked = GenerationConfig(repetition_penalty=1.1, do_sample=True, top_k=20, eos_token_id=3)
    asked.save_pretrained(tmp_path)
    loaded = member(url, tmp_path, name="far")
    assert 3 in loaded.end_ids
    loaded.close()
    assert "member 'far': its generation config sets" in caplog.text
    assert "repetition_penalty=1.1, do_sample=True, " in caplog.text
    assert "top_k=20, which members on servers do not follow" in caplog.text


@every_api
def test_a_wrong_key_is_an_error_that_does_not_show_it(
    api: str,
    folder: Path,
    running: Callable[[InferenceServer], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = InferenceServer(api, key=KEY)
    url = running(server)
    monkeypatch.setenv("RIGHT_KEY", KEY)
    monkeypatch.setenv("WRONG_KEY", "wrong-and-private")
    monkeypatch.setenv("ODD_KEY", "private\nkey")
    for name, message in (
        (None, "needs a key. Pass api_key_env"),
        ("WRONG_KEY", "refuses the key in the environment variable 'WRONG_KEY'"),
        ("NO_KEY", "'NO_KEY', which api_key_env names, is not set"),
        ("ODD_KEY", "contains characters that no key has"),
    ):
        with pytest.raises(LoadError, match=message) as caught:
            member(url, folder, api_key_env=name)
        assert "private" not in f"{caught.value!r}{caught.value.__cause__!r}{caplog.text}"
    loaded = member(url, folder, api_key_env="RIGHT_KEY")
    assert ask(loaded).next
    shown = (
        f"{loaded!r}{vars(loaded)!r}{loaded.facts!r}{ServerMember(url, api_key_env='RIGHT_KEY')!r}"
    )
    assert KEY not in shown
    server.key = "another"
    with pytest.raises(MemberError, match="refuses the key") as failed:
        ask(loaded)
    assert KEY not in f"{failed.value!r}{caplog.text}"
    loaded.close()


@one_api
def test_a_redirect_is_not_followed(
    api: str, running: Callable[[InferenceServer], str], monkeypatch: Any, load: Load
) -> None:
    monkeypatch.setenv("RIGHT_KEY", KEY)
    other = InferenceServer(api)
    server = InferenceServer(api, redirect=running(other))
    with pytest.raises(LoadError, match="redirects to another address"):
        load(server, api=api, api_key_env="RIGHT_KEY")
    assert not other.keys


@one_api
def test_a_busy_server_is_asked_again(
    api: str, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    server = InferenceServer(api)
    loaded = load(server, name="far")
    expected = ask(loaded)
    server.faults += [JSONResponse({"error": "Loading model"}, 503), PlainTextResponse("no", 502)]
    with caplog.at_level(logging.WARNING):
        assert ask(loaded) == expected
    assert "member 'far'" in caplog.text
    assert "The call is repeated" in caplog.text


@every_api
def test_errors_of_a_server_name_the_member_and_what_it_said(api: str, load: Load) -> None:
    server = InferenceServer(api)
    loaded = load(server, name="far")
    for fault, message in (
        (JSONResponse({"error": {"message": "CUDA error"}}, 500), "HTTP 500: CUDA error"),
        (JSONResponse({"detail": "odd"}, 400), "HTTP 400: odd"),
        (PlainTextResponse("<html>"), "answer is not JSON"),
        (JSONResponse({"choices": []}), "not the expected form"),
    ):
        server.faults += [fault] * 3
        with pytest.raises(MemberError, match=f"member 'far' failed: server .*{message}"):
            ask(loaded)
        server.faults.clear()
    assert ask(loaded).next


@one_api
def test_a_request_goes_on_when_its_server_is_back(
    api: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = InferenceServer(api)
    with served(server.app()) as url:
        loaded = member(url, folder, name="far")
        expected = ask(loaded)
    port = int(url.rpartition(":")[2])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask(loaded)))
    thread.start()
    time.sleep(0.5)
    assert not found
    with served(server.app(), port):
        thread.join(20)
        assert found == [expected]
    assert "does not answer" in caplog.text
    with pytest.raises(
        MemberUnavailableError, match=r"member 'far' failed: server .*does not answer"
    ):
        ask(loaded)
    loaded.close()


@every_api
def test_another_model_behind_the_same_name_is_noticed(api: str, load: Load) -> None:
    server = InferenceServer(api)
    loaded = load(server, name="far")
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    query = Query(tree, (tree.root,), (), 2)
    before = loaded.evaluate([query])
    server.recipe = replace(RECIPE, seed=72)
    with pytest.raises(MemberUnavailableError, match="runs another model under the name 'tiny'"):
        ask(loaded)  # a new request
    server.faults.append(JSONResponse({}, 503))
    with pytest.raises(MemberUnavailableError, match="runs another model"):
        loaded.evaluate([query])  # one that goes on after a loss
    server.recipe = RECIPE
    assert loaded.evaluate([query])[0].next == before[0].next


@one_api
def test_closing_ends_a_call_that_waits(api: str, folder: Path) -> None:
    with served(InferenceServer(api).app()) as url:
        loaded = member(url, folder, name="far")
    threading.Timer(0.5, loaded.close).start()
    with pytest.raises(MemberUnavailableError, match="it was closed"):
        ask(loaded)


@every_api
def test_wrong_tokenizers_models_and_addresses_are_refused(
    api: str,
    folder: Path,
    tmp_path: Path,
    running: Callable[[InferenceServer], str],
) -> None:
    url = running(InferenceServer(api))
    tokenizer("unigram").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"the server encodes .* and the tokenizer as"):
        member(url, tmp_path)
    with pytest.raises(LoadError, match="it has no model 'other'; its models are: tiny"):
        member(url, folder, model="other")
    with pytest.raises(LoadError, match=r"Pass the folder, hub id or GGUF file .*tokenizer=\.\.\."):
        load_members([ServerMember(url)])
    with pytest.raises(LoadError, match="does not answer"):
        member("http://127.0.0.1:9", folder, api=api)


def test_servers_with_faults_are_refused(load: Load) -> None:
    with pytest.raises(LoadError, match=r"logprob_token_ids.*Use vLLM 0.32 or newer"):
        load(InferenceServer("vllm", ignores_given=True))
    for fault in ("ignores_bias", "leaks_bias"):
        server = InferenceServer("llama-server")
        setattr(server, fault, True)
        with pytest.raises(LoadError, match=r"logit_bias.*Use another version of llama.cpp"):
            load(server)
    with pytest.raises(LoadError, match="neither vLLM, SGLang nor llama-server"):
        load(InferenceServer("another"))


def test_a_server_of_another_kind_is_named(folder: Path, load: Load) -> None:
    with pytest.raises(LoadError, match=r"it is sglang, not vllm\. Leave out api='vllm'"):
        load(InferenceServer("sglang"), api="vllm")
    models = {"data": [{"id": "pair", "owned_by": "adafuse-llm"}]}
    for path, answer, kind in (
        ("/v1/models", models, "an adafuse server"),
        ("/api/version", {"version": "1"}, "Ollama"),
    ):
        with served(Starlette(routes=[Route(path, lambda _, a=answer: JSONResponse(a))])) as url:
            for api in (None, "vllm", "llama-server"):
                with pytest.raises(LoadError, match=f"it is {kind}, n.*Load the files"):
                    member(url, folder, api=api)


def test_a_probability_of_zero_is_minus_infinity(
    monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    server = InferenceServer("vllm")
    loaded = load(server)
    plain = server.logprobs

    def cut(ids: Any) -> Any:
        row = plain(ids).clone()
        row[40] = -math.inf
        return row

    monkeypatch.setattr(server, "logprobs", cut)
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    query = Query(tree, (), (tree.child(tree.root, 40),), 2)
    assert loaded.evaluate([query])[0].logprobs == (-math.inf,)


def raised(server: InferenceServer, tree: TokenTree, token: int, by: float) -> Any:
    """Raise the logit of a token after a prompt. The result is the row that the server has then."""
    plain = server.logprobs

    def changed(ids: Any) -> Any:
        row = plain(ids).clone()
        row[token] += by * (list(ids) == list(tree.ids))
        return row.log_softmax(-1)

    server.logprobs = changed  # type: ignore[method-assign]
    return changed(tree.ids)


def test_llama_server_tells_the_probabilities_of_a_likely_part_of_a_character(load: Load) -> None:
    """The real server returns no probabilities if it draws such a part."""
    server = InferenceServer("llama-server")
    loaded = load(server)
    texts = tokenizer(RECIPE.kind).convert_ids_to_tokens(range(400))
    part = texts.index("Ã")  # the first byte of é
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    row = raised(server, tree, part, 8.0)
    before = server.counts["/completion"]
    found = loaded.evaluate([Query(tree, (), (tree.child(tree.root, part),), 2)])[0]
    assert found.logprobs == pytest.approx([float(row[part])], abs=1e-6)
    assert server.counts["/completion"] == before + 2  # no list of the whole vocabulary


@pytest.mark.quick
def test_biases_of_llama_server_are_taken_off_again() -> None:
    logits = np.random.default_rng(1).normal(scale=4, size=50)
    plain = logits - np.logaddexp.reduce(logits)
    order = np.argsort(-logits).tolist()
    biases = {order[30]: 40.0, order[49]: 40.0, order[3]: 75.0}
    raised = logits.copy()
    raised[list(biases)] += list(biases.values())
    chances = np.exp(raised - np.logaddexp.reduce(raised))
    listed = {t: float(chances[t]) for t in np.argsort(-chances)[:4].tolist()}
    known = {t: float(plain[t]) for t in order[:5]}
    assert unbiased(listed, biases, known) == pytest.approx({t: plain[t] for t in biases})
    assert not unbiased(listed, biases, {t: known[t] for t in order[1:5]}), "no token in both"
    listed[order[0]] = LEAST
    assert not unbiased(listed, biases, known), "float32 cannot represent so small a number"


def test_llama_server_lists_the_whole_vocabulary_beside_a_nearly_certain_token(load: Load) -> None:
    """With its bias, tokens without one have less than 1e-38."""
    loaded = load(server := InferenceServer("llama-server"))
    certain = tokenizer(RECIPE.kind).encode(" the", add_special_tokens=False)[-1]
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    row = raised(server, tree, certain, 30.0)
    given = int(row.topk(20).indices[-1])
    found = loaded.evaluate([Query(tree, (), (tree.child(tree.root, given),), 2)])[0]
    assert found.logprobs == pytest.approx([float(row[given])], abs=1e-6)


def test_mixed_up_likeliest_tokens_of_vllm_are_an_error(
    monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    server = InferenceServer("vllm")
    loaded = load(server, name="far")
    row = server.logprobs([1]).clone()
    row[2:] = -math.inf
    monkeypatch.setattr(server, "logprobs", lambda ids: row)
    with pytest.raises(MemberError, match=r"member 'far' .*wrong likeliest tokens"):
        ask(loaded)
