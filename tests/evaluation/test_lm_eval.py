"""The engine as a harness model, compared with the harness's own model and brute force."""

import json
import logging
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adafuse_llm import AdaFuseEngine, InvalidInputError, InvalidOptionError, MissingDependencyError
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from tests.reference import Options, decode, mean_nll
from tests.support.models import Recipe, backend, model, reference, tokenizer
from tests.support.scripted import scripted_engine

pytest.importorskip("lm_eval")

from adafuse_llm.evaluation.lm_eval import AdaFuseLM, generation_options

ONE, OTHER = Recipe("llama", "bytelevel", 41), Recipe("gpt2", "sentencepiece", 42)
CONTEXT = "Question: who keeps the light?\nAnswer:"
PAIRS = [
    (CONTEXT, " Anna"),
    ("The ferry to Orrin leaves", " at nine."),
    (CONTEXT, " the keeper of the light"),
    ("In winter the harbour ", "freezes."),
    ("", "The keeper said"),
]


def instances(*arguments):
    return [
        SimpleNamespace(args=each if isinstance(each, tuple) else (each,)) for each in arguments
    ]


def lm(*recipes, **options):
    return AdaFuseLM(AdaFuseEngine([backend(recipe) for recipe in recipes]), **options)


def test_one_member_alone_has_the_numbers_and_the_text_of_the_harness():
    from lm_eval.models.huggingface import HFLM

    known = tokenizer(ONE.kind)
    harness = HFLM(pretrained=model(ONE), tokenizer=known, device="cpu", max_length=1024)
    harness.tokenizer.pad_token = harness.tokenizer.eos_token
    ours, quiet = lm(ONE, branching_factor=1, max_words=1, batch_size=3), {"disable_tqdm": True}
    theirs = [score for score, _ in harness.loglikelihood(instances(*PAIRS), **quiet)]
    found = [score for score, _ in ours.loglikelihood(instances(*PAIRS), **quiet)]
    assert found == pytest.approx(theirs, abs=1e-4)
    request = (CONTEXT, {"until": ["\n"], "max_gen_toks": 10, "do_sample": False})
    (text,) = harness.generate_until(instances(request), **quiet)
    (written,) = ours.generate_until(instances(request), **quiet)
    assert written.startswith(text)  # AdaFuse finishes the last word


@pytest.mark.quick
def test_log_likelihoods_are_fused_over_whole_continuations():
    ours = lm(ONE, OTHER, weights="3;1").loglikelihood(instances(*PAIRS[:4]), disable_tqdm=True)
    for (context, text), (found, _) in zip(PAIRS, ours, strict=False):
        total = 0.0
        spaces = len(context) - len(context.rstrip(" "))
        for recipe, weight in ((ONE, 3), (OTHER, 1)):
            member = reference(recipe)
            ids = member.codec.encode_prompt(context.rstrip(" "))
            tokens, exact = member.codec.encode_continuation(ids, " " * spaces + text)
            assert exact
            total += weight * len(tokens) * mean_nll(member, ids, tokens, ends=False)
        assert found == pytest.approx(-total / 4, abs=1e-6)


@pytest.mark.quick
def test_a_continuation_is_greedy_if_the_ensemble_writes_it():
    members = [reference(ONE), reference(OTHER)]
    written = decode(members, CONTEXT, Options(max_new_tokens=12)).text
    first = written.split()[0]
    texts = [f" {first}", written, f" {first}x", " Zebra"]
    ensemble = lm(ONE, OTHER)
    found = ensemble.loglikelihood(instances(*((CONTEXT, text) for text in texts)), True)
    assert [greedy for _, greedy in found] == [True, True, False, False]
    hot = lm(ONE, OTHER, temperature=5.0)  # nothing is drawn
    assert hot.loglikelihood(instances((CONTEXT, written)), True)[0][1]
    unchecked = lm(ONE, OTHER, check_greedy=False)
    ((likely, greedy),) = unchecked.loglikelihood(instances((CONTEXT, texts[0])), True)
    assert (likely, greedy) == (pytest.approx(found[0][0]), False)


# Windows --------------------------------------------------------------------------------------


def word_by_word(text):
    return {"w": 0.5, " ": 0.25, END: 0.25}


def small(window):
    return AdaFuseLM(AdaFuseEngine([FakeBackend("one", word_by_word, context_window=window)]))


def test_a_context_that_is_too_long_is_cut_at_its_beginning(caplog):
    ensemble = small(12)
    with caplog.at_level(logging.WARNING):
        assert ensemble._prompt("aaaa bbbb cccc dd", 4) == {"prompt": "cccc dd"}
    assert "only the last 7 are used" in caplog.text
    assert ensemble._prompt("cccc dd", 4) == {"prompt": "cccc dd"}
    assert ensemble.generate_until(instances(("www " * 9 + "www", {"max_gen_toks": 3})), True)
    assert ensemble.loglikelihood(instances(("www " * 9 + "www", "w")), True)[0][
        0
    ] == pytest.approx(math.log(0.5))


def test_a_text_that_no_member_can_write_has_no_likelihood(caplog):
    found = small(None).loglikelihood(instances(("w", "x")), True)
    assert found == [(-math.inf, False)]
    assert "no member can write 'x'" in caplog.text


# Options --------------------------------------------------------------------------------------


DRAWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"temperature": 0.0}),
        ({"until": ["a", ""]}, {"stop": ("a",), "temperature": 0.0}),
        ({"max_gen_toks": 3}, {"max_new_tokens": 3, "temperature": 0.0}),
        ({"max_tokens": "5"}, {"max_new_tokens": 5, "temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, **DRAWN}, DRAWN),
        ({"num_beams": 1, **DRAWN}, DRAWN),
    ],
)
def test_generation_options_of_the_harness(given, options):
    assert generation_options(given) == {"stop": (), **options}


def test_repeated_requests_draw_different_responses_and_a_run_draws_the_same_again():
    sampled = {"do_sample": True, "max_gen_toks": 8}
    requests = instances(*[(CONTEXT, sampled)] * 4, (CONTEXT, {"max_gen_toks": 8}))
    ensemble = lm(ONE, OTHER, batch_size=5)
    torch.manual_seed(1)
    first = ensemble.generate_until(requests, True)
    assert len(set(first[:4])) > 1
    assert ensemble.generate_until(requests[3:], True) == [first[0], first[4]]
    torch.manual_seed(2)
    assert ensemble.generate_until(requests, True)[:4] != first[:4]
    seeded = {**sampled, "seed": 9}
    one, two = (
        made.generate_until(instances((CONTEXT, seeded)), True)
        for made in (ensemble, lm(ONE, OTHER, temperature=0.5))
    )
    assert one == two


def test_what_cannot_be_used_is_an_error(monkeypatch):
    with pytest.raises(InvalidOptionError, match="max_word"):
        lm(ONE, max_word=3)
    with pytest.raises(InvalidInputError, match="either"):
        lm(ONE, config="a.yaml")
    with pytest.raises(InvalidInputError, match="no perplexity"):
        lm(ONE).loglikelihood_rolling(instances("a"))
    with pytest.raises(InvalidOptionError, match="num_beams"):
        lm(ONE).generate_until(instances((CONTEXT, {"num_beams": 4})), True)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "adafuse_llm.evaluation.lm_eval")
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[eval\]"):
        __import__("adafuse_llm.evaluation.lm_eval")


def test_models_are_loaded_like_on_the_command_line(monkeypatch, tmp_path):
    loaded = []

    def load(paths, **options):
        loaded.append((paths, options))
        return AdaFuseEngine([FakeBackend("one", word_by_word)], options["config"])

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", load)
    path = tmp_path / "tuned.yaml"
    path.write_text("models: [org/one]\ndtype: float64\nmax_words: 2\nmax_new_tokens: 9\n")
    given = {"batch_size": "auto", "device": "cuda:9"}
    AdaFuseLM.create_from_arg_string("models=path/a;path/b,strategy=single,use=one", given)
    AdaFuseLM.create_from_arg_string(f"config={path},max_words=1", {})
    AdaFuseLM(batch_size=2)
    (paths, options), (tuned, others), (embedded, _) = loaded
    assert [each.path for each in paths] == ["path/a", "path/b"]
    assert (options["strategy"], options["config"].use) == ("single", ("one",))
    assert options["runtime"].max_requests == 16
    assert ([each.path for each in tuned], others["dtype"]) == (["org/one"], "float64")
    assert (others["config"].max_words, others["config"].max_new_tokens) == (1, 9)
    assert [Path(each.path).name for each in embedded] == ["wren", "heron", "finch"]


# Conversations --------------------------------------------------------------------------------


def test_conversations_reach_every_member_in_its_own_template_and_begun_replies_go_on():
    seen = set()

    def script(prompt):
        seen.add("im_start" if "<|im_start|>" in prompt else "INST" if "[INST]" in prompt else "?")
        return "Yes, it is."

    turns = [{"role": "user", "content": "Is it?"}]
    begun = [*turns, {"role": "assistant", "content": "Yes,"}]
    with scripted_engine(script, max_new_tokens=8) as engine:
        ensemble = AdaFuseLM(engine)
        context = ensemble.apply_chat_template(turns)
        assert ensemble.generate_until(instances((context, {})), True) == ["Yes, it is."]
        ((likely, greedy),) = ensemble.loglikelihood(instances((context, "Yes, it is.")), True)
        assert likely > -10
        assert greedy
        half = ensemble.apply_chat_template(begun, add_generation_prompt=False)
        for each in (half, f"{context}Yes,"):
            assert ensemble.generate_until(instances((each, {})), True) == [" it is."]
    assert seen >= {"im_start", "INST"}
    assert ensemble.chat_template(True) == "each member's own"
    assert ensemble.tokenizer_name == "adafuse:ink,quill"


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_cancels_the_requests_that_run(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    asked = []

    def interrupt(text):
        asked.append(text)
        if len(asked) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return {" a": 0.9, END: 0.1}

    ensemble = AdaFuseLM(AdaFuseEngine([FakeBackend("oak", interrupt)]), max_words=1)
    endless = instances((CONTEXT, {"until": [], "max_gen_toks": 3000}))
    with pytest.raises(KeyboardInterrupt):
        ensemble.generate_until(endless, disable_tqdm=True)
    assert len(asked) < 2000


def test_local_tasks_run_offline_through_the_harness(tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = [
        {"q": "who keeps it", "choices": ["Otto", "Anna"], "gold": 1},
        {"q": "where is it", "choices": ["Vell", "Orrin"], "gold": 0},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "Question: {{q}}\nAnswer:",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    generate = {
        "output_type": "generate_until",
        "doc_to_target": " {{choices[gold]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
    }
    tasks = [{"task": "choice", **shared, **choice}, {"task": "generate", **shared, **generate}]
    with scripted_engine(lambda asked: "Anna." if "who keeps" in asked else "Orrin.") as engine:
        manager = TaskManager(include_defaults=False)
        ensemble = AdaFuseLM(engine, batch_size=4)
        found = simple_evaluate(ensemble, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    assert found["results"]["choice"]["acc,none"] == 0.5  # it knows the first answer
    assert found["results"]["generate"]["exact_match,none"] == 0.5
