"""Members on inference servers, against servers with a tiny real model."""

import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from adafuse_llm.backends import Query, TokenTree
from adafuse_llm.backends.servers import connection
from adafuse_llm.backends.servers.backend import ServerBackend
from adafuse_llm.backends.servers.llama_server import LEAST, unbiased
from adafuse_llm.loading.members import load_members
from tests.support.inference_servers import APIS, RECIPE, InferenceServer
from tests.support.models import Recipe, backend, tokenizer
from tests.support.serving import served
from tests.support.waiting import wait_until

KEY = "s3cret-key"
PROMPT = "The ferry to Orrin"
OTHER = Recipe("qwen2", "unigram", seed=5)

every_api = pytest.mark.parametrize("api", APIS)
with_regex = pytest.mark.parametrize("api", ["vllm", "sglang"])

Load = Callable[..., ServerBackend]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 3.0)


def evaluate(loaded: ServerBackend, tree: TokenTree, *scored: int) -> tuple[float, ...]:
    """Return the log-probabilities of tokens after a prompt."""
    nodes = tuple(tree.child(tree.root, token) for token in scored)
    return loaded.evaluate([Query(tree, (), nodes, 2)])[0].logprobs


def ask(loaded: ServerBackend) -> Any:
    """Send a new request."""
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    try:
        return loaded.evaluate([Query(tree, (tree.root,), (), 2)])[0]
    finally:
        loaded.release(tree)


@every_api
def test_a_pass_is_one_round_trip_with_all_nodes_of_all_requests(api: str, load: Load) -> None:
    loaded = load(server := InferenceServer(api))
    assert loaded.is_remote and not loaded.knows_distributions
    assert (loaded.context_window, loaded.end_ids) == (1023, backend(RECIPE).end_ids)
    queries = []
    for text in (PROMPT, "In winter"):
        tree = TokenTree(loaded.codec.encode_prompt(text))
        nodes = (tree.root, tree.child(tree.root, 20), tree.grow([30, 31]))
        queries.append(Query(tree, nodes, nodes[1:], 3))
    before = server.counts.copy()
    results = loaded.evaluate(queries)
    made = server.counts - before
    assert [result.passes for result in results] == [1, 1]
    calls = made["/v1/completions"] + made["/generate"] + made["/completion"]
    assert calls <= (1 if api == "sglang" else 3)
    parts = {"vllm": 2, "sglang": 1, "llama-server": 2}[api]
    assert made["prompts"] <= parts * 8 + 8  # the nodes, and the parents of two nodes


def test_more_given_tokens_than_a_call_of_vllm_can_have_are_divided(load: Load) -> None:
    loaded = load(server := InferenceServer("vllm"))
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    row = server.logprobs(tree.ids)[:300].tolist()
    assert list(evaluate(loaded, tree, *range(300))) == pytest.approx(row, abs=1e-6)


def test_the_server_of_vllm_limits_the_likeliest_tokens(load: Load) -> None:
    loaded = load(InferenceServer("vllm", max_logprobs=5), name="few")
    assert loaded.listed_limit == 5
    with AdaFuseEngine([loaded]) as engine:
        assert engine.generate(PROMPT, max_new_tokens=4, branching_factor=5).text
        with pytest.raises(InvalidOptionError, match=r"member 'few' lists 5"):
            engine.generate(PROMPT, max_new_tokens=4, branching_factor=6)


@every_api
def test_what_a_server_cannot_give_is_an_error_before_any_compute(api: str, load: Load) -> None:
    loaded = load(server := InferenceServer(api), name="far")
    calls = sum(server.counts.values())
    engine = AdaFuseEngine([loaded])
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"temperature": 0.7}, InvalidOptionError, "cannot draw"),
        ({"regex": "[a-z]+"}, GrammarError, "use choices"),
    )
    for options, kind, says in refused:
        with pytest.raises(kind, match=f"member 'far' .*{says}"):
            engine.generate(PROMPT, **options)
    if api == "llama-server":
        with pytest.raises(InvalidInputError, match="'far'"):
            AdaFuseEngine([loaded], strategy="mixture").generate(PROMPT)
    assert sum(server.counts.values()) == calls
    assert engine.generate(PROMPT, choices=[" sails", " leaves"]).text in (" sails", " leaves")
    assert engine.score(PROMPT, [" sails"])


@with_regex
def test_the_end_of_a_word_has_the_probability_of_all_tokens_that_can_follow_it(
    api: str, load: Load
) -> None:
    loaded = load(server := InferenceServer(api))
    assert loaded.has_word_ends()
    texts = backend(RECIPE).token_texts
    ends = {token for token, text in enumerate(texts) if text[:1].isspace()} | loaded.end_ids
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    nodes = [tree.root, tree.child(tree.root, 20), tree.grow([30, 31])]
    (result,) = loaded.evaluate([Query(tree, tuple(nodes), (), 2, word_ends=True)])
    for node, summary in zip(nodes, result.next, strict=True):
        row = server.logprobs([*tree.ids, *tree.tokens(node)])
        want = row[sorted(ends)].logsumexp(-1).item()
        assert summary.word_end_logprob == pytest.approx(want, abs=1e-5)


@with_regex
def test_ends_of_words_are_told_if_the_server_follows_regular_expressions(
    api: str, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    loaded = load(server := InferenceServer(api))
    server.faults.append(JSONResponse({"error": "CUDA error"}, 500))
    assert [loaded.has_word_ends() for _ in range(2)] == [False, True]
    engine = AdaFuseEngine(
        [load(InferenceServer(api, ignores_regex=True), name="far")], strategy="mixture"
    )
    with pytest.raises(InvalidInputError, match=r"how likely a word ends.*'far'"):
        engine.generate(PROMPT)
    assert "do not permit those tokens that they should" in caplog.text


def test_the_likeliest_and_the_given_tokens_are_never_in_one_batch_of_vllm(load: Load) -> None:
    """vLLM 0.32 lists wrong tokens for a request if another one in its batch has given tokens."""
    loaded = load(InferenceServer("vllm", batch_seconds=0.02), name="far")
    prompts = (PROMPT, "In winter", "Anna counted", "The keeper said")
    near, far = (AdaFuseEngine([each], strategy="mixture") for each in (backend(RECIPE), loaded))
    want = [near.generate(prompt, max_new_tokens=6).text for prompt in prompts]
    assert [each.text for each in far.generate_batch(prompts, max_new_tokens=6)] == want
    with ThreadPoolExecutor() as threads:
        assert [*threads.map(lambda p: far.generate(p, max_new_tokens=6).text, prompts)] == want


def test_the_members_of_a_program_on_one_vllm_server_take_turns(load: Load) -> None:
    with served(InferenceServer("vllm", batch_seconds=0.02).app()) as url:
        one, two = (load(url, name=name) for name in ("one", "two"))
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(ask, two)
            time.sleep(0.01)  # so that the next call begins while this one runs
            assert one.has_word_ends()
            assert asked.result().next
        want = AdaFuseEngine([backend(RECIPE)]).generate(PROMPT, max_new_tokens=6).text
        engines = [AdaFuseEngine(each) for each in ([one, two], [one], [two])]
        assert engines[0].generate(PROMPT, max_new_tokens=6).text == want
        with ThreadPoolExecutor() as threads:
            for found in threads.map(lambda e: e.generate(PROMPT, max_new_tokens=6), engines[1:]):
                assert found.text == want


def test_settings_of_a_generation_config_that_do_not_apply_have_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    load(InferenceServer("vllm"))
    assert not caplog.text
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    asked = GenerationConfig(repetition_penalty=1.1, do_sample=True, top_k=20, eos_token_id=3)
    asked.save_pretrained(tmp_path)
    assert 3 in load(InferenceServer("vllm"), tmp_path, name="far").end_ids
    assert "member 'far': its generation config sets" in caplog.text
    assert "repetition_penalty=1.1, do_sample=True, " in caplog.text


def test_a_wrong_key_is_an_error_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: Load
) -> None:
    server = InferenceServer("vllm", key=KEY)
    keys = {"RIGHT_KEY": KEY, "WRONG_KEY": "wrong-and-private", "ODD_KEY": "private\nkey"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    for key, says in (
        (None, "api_key_env"),
        ("WRONG_KEY", "'WRONG_KEY'"),
        ("NO_KEY", "'NO_KEY'.*not set"),
        ("ODD_KEY", "characters"),
    ):
        with pytest.raises(LoadError, match=says) as caught:
            load(server, api_key_env=key)
        assert "private" not in f"{caught.value!r}{caught.value.__cause__!r}{caplog.text}"
    loaded = load(server, api_key_env="RIGHT_KEY")
    assert ask(loaded).next
    assert KEY not in f"{loaded!r}{vars(loaded)!r}{loaded.facts!r}"
    server.key = "another"
    with pytest.raises(MemberError, match="refuses the key") as failed:
        ask(loaded)
    assert KEY not in f"{failed.value!r}{caplog.text}"


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setenv("RIGHT_KEY", KEY)
    other = InferenceServer("vllm")
    with served(other.app()) as url, pytest.raises(LoadError, match="redirects"):
        load(InferenceServer("vllm", redirect=url), api="vllm", api_key_env="RIGHT_KEY")
    assert not other.keys


def test_errors_of_a_server_name_the_member_and_what_it_said(load: Load) -> None:
    loaded = load(server := InferenceServer("vllm"), name="far")
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


def test_a_request_goes_on_when_its_server_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 30.0)
    server = InferenceServer("vllm")
    with served(server.app()) as url:
        loaded = load(url, name="far")
        expected = ask(loaded)
        server.faults += [JSONResponse({"error": "Loading"}, 503), PlainTextResponse("no", 502)]
        assert ask(loaded) == expected
        assert "The call is repeated" in caplog.text
    port = int(url.rpartition(":")[2])
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, loaded)
        wait_until(lambda: "does not answer" in loaded.problem)
        assert not asked.done()
        with served(server.app(), port):
            assert asked.result(20) == expected
        assert not loaded.problem
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(MemberUnavailableError, match=r"'far' .*does not answer"):
        ask(loaded)
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 30.0)
    threading.Timer(0.5, loaded.close).start()
    with pytest.raises(MemberUnavailableError, match="it was closed"):
        ask(loaded)


def test_a_member_that_waits_for_another_engine_ends_as_soon_as_it_is_closed(load: Load) -> None:
    loaded = load(InferenceServer("vllm"))
    with loaded._server.turn, ThreadPoolExecutor() as threads:  # the other one repeats its calls
        asked = threads.submit(ask, loaded)
        time.sleep(0.2)
        loaded.close()
        with pytest.raises(MemberUnavailableError, match="it was closed"):
            asked.result(2)


@every_api
def test_another_model_behind_the_same_name_is_noticed(api: str, load: Load) -> None:
    loaded = load(server := InferenceServer(api), name="far")
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


@every_api
def test_wrong_tokenizers_models_and_addresses_are_refused(
    api: str, folder: Path, tmp_path: Path, load: Load
) -> None:
    server = InferenceServer(api)
    tokenizer("unigram").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"the server encodes .* and the tokenizer as"):
        load(server, tmp_path)
    with pytest.raises(LoadError, match="no model 'other'; its models are: tiny"):
        load(server, model="other")
    with pytest.raises(LoadError, match="does not answer"):
        load("http://127.0.0.1:9", api=api)
    with served(server.app()) as url, pytest.raises(LoadError, match=r"tokenizer=\.\.\."):
        load_members([ServerMember(url)])
    server.source = str(folder)
    with served(server.app()) as url:
        (loaded,), weights = load_members([ServerMember(url, weight=2.0)])
        assert weights == {loaded.name: 2.0}
        assert loaded.device == f"server {url}"
        loaded.close()


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


def test_a_server_of_another_kind_is_named(load: Load) -> None:
    with pytest.raises(LoadError, match=r"it is sglang, not vllm\. Leave out api='vllm'"):
        load(InferenceServer("sglang"), api="vllm")
    for path, answer, kind in (
        ("/ready", {"status": "ready"}, "adafuse"),
        ("/api/version", {"version": "1"}, "Ollama"),
    ):
        with served(Starlette(routes=[Route(path, lambda _, a=answer: JSONResponse(a))])) as url:
            for api in (None, "vllm", "llama-server"):
                with pytest.raises(LoadError, match=f"it is {kind}, n.*Load the files"):
                    load(url, api=api)


def raised(server: InferenceServer, tree: TokenTree, token: int, by: float) -> Any:
    """Raise the logit of a token after a prompt. The result is the row that the server has then."""
    plain = server.logprobs

    def changed(ids: Any) -> Any:
        row = plain(ids).clone()
        if list(ids) == list(tree.ids):
            row[token] += by
        return row.log_softmax(-1)

    server.logprobs = changed  # type: ignore[method-assign]
    return changed(tree.ids)


@every_api
def test_a_probability_of_zero_is_minus_infinity(api: str, load: Load) -> None:
    loaded = load(server := InferenceServer(api))
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    raised(server, tree, 40, -math.inf)
    assert evaluate(loaded, tree, 40) == (-math.inf,)


def test_llama_server_tells_the_probabilities_of_a_likely_part_of_a_character(load: Load) -> None:
    """The real server returns no probabilities if it draws such a part."""
    loaded = load(server := InferenceServer("llama-server"))
    texts = tokenizer(RECIPE.kind).convert_ids_to_tokens(range(400))
    part = texts.index("Ã")  # the first byte of é
    tree = TokenTree(loaded.codec.encode_prompt(PROMPT))
    row = raised(server, tree, part, 8.0)
    before = server.counts["/completion"]
    assert evaluate(loaded, tree, part) == pytest.approx([float(row[part])], abs=1e-6)
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
    assert evaluate(loaded, tree, given) == pytest.approx([float(row[given])], abs=1e-6)


def test_mixed_up_likeliest_tokens_of_vllm_are_an_error(load: Load) -> None:
    loaded = load(server := InferenceServer("vllm"), name="far")
    row = server.logprobs([1]).clone()
    row[2:] = -math.inf
    server.logprobs = lambda ids: row  # type: ignore[method-assign]
    with pytest.raises(MemberError, match=r"member 'far' .*wrong likeliest tokens"):
        ask(loaded)
