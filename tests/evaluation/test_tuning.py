"""The search for the best settings, and the test on held-out questions."""

import json
import threading
from typing import Any

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    MemberOutOfMemoryError,
    RequestCancelledError,
    RuntimeConfig,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.evaluation.tuning import Question, Tuning, divide, read_questions, tune


def knows(name, known, sure=0.9):
    """Answer with the last word of a known question, and with an uncertain " no" otherwise."""

    def rule(text):
        question, _, answer = text.rpartition("Question: ")[2].partition("\nAnswer:")
        word = question.split()[-1]
        reply, weight = (f" {word}", sure) if known(word) else (" no", 0.4)
        if not reply.startswith(answer):
            reply = f" {word}" if f" {word}".startswith(answer) else " no"
        following = reply[len(answer)] if len(answer) < len(reply) else END
        return {following: weight, "~": 1 - weight - 0.05, "^": 0.05}

    return FakeBackend(name, rule)


def question(number, text, accepted):
    return Question(number, text, {"prompt": f"Question: {text}\nAnswer:"}, (accepted,))


def questions(count):
    return [question(n, f"is it w{n}", f"w{n}") for n in range(1, count + 1)]


def odd(word):
    return int(word[1:]) % 2 == 1


def complementary():
    """Return an engine: two members know half of the answers each, and one knows few."""
    members = [
        knows("odd", odd),
        knows("even", lambda word: not odd(word)),
        knows("idle", lambda word: word == "w7", sure=0.6),
    ]
    runtime = RuntimeConfig(max_requests=4)
    return AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=8), runtime=runtime)


def search(engine, items=None, **options):
    with engine:
        return tune(engine, items or questions(40), **{"trials": 6, **options})


def test_fusing_complementary_members_pays():
    found = search(complementary())
    assert isinstance(found, Tuning)
    assert (found.searched, found.held_out) == (20, 20)
    assert {name: trial.score for name, trial in found.alone.items()}["idle"] <= 5
    assert found.comparison is not None
    assert found.comparison.ours == 100
    assert found.comparison.theirs < 70
    assert found.comparison.p_value < 0.05
    assert found.pays
    assert found.out_of_reach.value == 0
    assert found.options == found.ensemble
    assert {"odd", "even"} <= set(found.ensemble["use"])
    assert "The ensemble beats its best member" in found.verdict
    assert found.verdict.endswith("p < 0.001).")
    assert Tuning.model_validate_json(found.model_dump_json()) == found


def test_a_member_that_the_ensemble_does_not_beat_is_recommended():
    members = [knows("all", lambda _word: True), knows("none", lambda _word: False)]
    engine = AdaFuseEngine(members, AdaFuseConfig(max_new_tokens=8))
    found = search(engine, trials=2)
    assert found.best_member == "all"
    assert not found.pays
    assert "no difference between the ensemble and its best member, all" in found.verdict
    assert found.options == {"use": ["all"]}


def test_the_search_does_not_see_held_out_questions():
    items = questions(40)
    seen = []
    engine = complementary()
    with engine:
        held = {each.number for each in divide(items)[1]}
        found = tune(
            engine, items, trials=3,
            on_answer=lambda name, answer: seen.append((name, answer.line)),
        )  # fmt: skip
    lines = [line for _, line in seen]
    first = next(place for place, line in enumerate(lines) if line in held)
    assert not held & set(lines[:first])
    assert set(lines[first:]) == held
    tested = {name for name, _ in seen[first:]}
    assert tested == {"+".join(found.ensemble["use"]), found.best_member}


def test_a_repeated_question_of_a_file_is_left_out_with_a_warning(caplog):
    lines = [json.dumps({"question": each, "answer": "x"}) for each in ("a", "b", " a", "b")]
    found = read_questions("\n".join(lines).encode(), "{question}")
    assert [each.number for each in found] == [1, 2]
    assert "2 lines with the question of an earlier line" in caplog.text


def test_the_division_is_always_the_same_and_keeps_equal_questions_together():
    items = [*questions(30), *(question(30 + n, f"is it w{n} ", "?") for n in range(1, 31))]
    search_part, test_part = divide(items)
    assert (len(search_part), len(test_part)) == (30, 30)
    assert sorted([*search_part, *test_part], key=lambda each: each.number) == items
    assert divide(items) == (search_part, test_part)
    assert search_part != items[:15] + items[30:45]
    texts = [{each.text.strip() for each in part} for part in (search_part, test_part)]
    assert not texts[0] & texts[1]


def test_every_setting_is_tried_once():
    fixed = {"use": ("odd", "even"), "margin_threshold": 0.7, "max_words": 3}
    found = search(complementary(), trials=12, fixed=fixed)
    assert sorted(each.options["branching_factor"] for each in found.trials) == [1, 2, 3, 4, 5]


def test_nothing_is_decoded_twice_and_the_same_search_tries_the_same_settings():
    answered: list[Any] = []
    lines: list[dict[str, Any]] = []
    options = {
        "trials": 12,
        "fixed": {"use": ("odd", "even"), "max_words": 1},
        "on_answer": lambda name, answer: answered.append((name, answer.line)),
    }
    found = search(complementary(), log=lines.append, **options)
    assert len(answered) == 20 * (2 + 12 + 2)
    assert len(lines) == len(answered)
    answered.clear()
    again = search(complementary(), known=lines, **options)
    assert not answered
    assert [t.options for t in again.trials] == [t.options for t in found.trials]
    assert again.comparison == found.comparison


@pytest.mark.quick
def test_a_cancelled_search_ends_at_once_and_its_log_is_used_again():
    cancel = threading.Event()
    lines: list[dict[str, Any]] = []

    def log(line):
        lines.append(line)
        if len(lines) == 9:  # of the first member's 20 answers
            cancel.set()

    with pytest.raises(RequestCancelledError, match="the search was cancelled"):
        search(complementary(), cancel=cancel, log=log)
    assert len(lines) >= 9
    again: list[Any] = []
    search(complementary(), known=lines, log=again.append)
    assert len({line["key"] for line in [*lines, *again]}) == len(lines + again)


def test_fixed_options_are_kept_members_restricted_and_options_of_the_engine_not_used():
    fixed = {"use": ("odd", "even"), "max_words": 2, "weights": (2.0, 1.0, 4.0)}
    found = search(complementary(), fixed=fixed, trials=4)
    assert set(found.alone) == {"odd", "even"}
    for trial in found.trials:
        assert trial.options["use"] == ["odd", "even"]
        assert trial.options["max_words"] == 2
        assert trial.options["weights"] == (2.0, 1.0, 4.0)
    skewed = AdaFuseConfig(max_new_tokens=8, max_words=1)
    other = search(AdaFuseEngine(complementary().backends, skewed), fixed=fixed, trials=4)
    assert [t.score for t in other.trials] == [t.score for t in found.trials]


def test_questions_are_answered_at_the_same_time(monkeypatch):
    together = threading.Barrier(4)
    real = AdaFuseEngine.generate

    def generate(self, prompt, **options):
        together.wait(timeout=60)  # fails unless four questions are asked at once
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "generate", generate)
    found = search(complementary(), trials=1)
    assert not any(trial.failed for trial in found.tested.values())


def test_an_error_of_a_question_counts_as_wrong_and_one_of_a_member_ends_the_search(monkeypatch):
    held = divide(questions(40))[1][0]
    answered: list[Any] = []
    lines: list[dict[str, Any]] = []
    real = AdaFuseEngine.generate

    def search_with(error):
        def generate(self, prompt, **options):
            if f"{held.text}\n" in prompt and len(options["use"]) > 1:
                raise error
            return real(self, prompt, **options)

        with monkeypatch.context() as patch:
            patch.setattr(AdaFuseEngine, "generate", generate)
            return search(complementary(), log=lines.append)

    found = search_with(ContextWindowError("too long"))
    assert (found.tested["ensemble"].failed, found.comparison.ours) == (1, 95)
    lines.clear()
    with pytest.raises(MemberOutOfMemoryError):
        search_with(MemberOutOfMemoryError("odd", "no memory"))
    again = search(complementary(), known=lines, on_answer=lambda _, a: answered.append(a.line))
    assert held.number in answered
    assert len(answered) <= 2 * 20  # only of the test
    assert again.pays


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"items": questions(19)}, InvalidInputError, "needs 20 .* got 19"),
        ({"trials": 0}, InvalidOptionError, "trials must be 1 or more"),
        ({"fixed": {"temperature": 0.5}}, InvalidOptionError, "without sampling"),
        ({"fixed": {"weights": (1, 2)}}, InvalidOptionError, "one value per member"),
        ({"fixed": {"use": ("even", "idle"), "weights": (1, 0, 0)}}, InvalidOptionError, "weight"),
        ({"fixed": {"use": ("odd",)}}, InvalidInputError, "at least two members; got odd"),
        ({"fixed": {"use": ("odd", "even", "nobody")}}, InvalidOptionError, "'nobody'"),
    ],
)
def test_an_impossible_search_is_an_error_before_anything_is_computed(options, error, message):
    options = {"on_answer": lambda *_: pytest.fail("something was decoded"), **options}
    with pytest.raises(error, match=message):
        search(complementary(), **options)
    with pytest.raises(InvalidInputError, match="'single' has no options to tune"):
        search(AdaFuseEngine(complementary().backends, strategy="single"))
