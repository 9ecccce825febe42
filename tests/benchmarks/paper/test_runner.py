"""Records of answers: their order, their contents, and their summaries."""

from __future__ import annotations

import threading
import time

import pytest

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidInputError,
    InvalidOptionError,
    RuntimeConfig,
    Usage,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.evaluation.files import Results
from benchmarks.paper.metrics import load_metric
from benchmarks.paper.runner import (
    Evaluation,
    Record,
    System,
    answer_all,
    compared,
    in_order,
    lost,
    merged,
    read_records,
    singly,
    tokens,
    unanswered,
)
from benchmarks.paper.tasks import Question, load_task
from tests.support.scripted import scripted_engine

pytestmark = pytest.mark.quick

METRICS = [load_metric("exact_match"), load_metric("f1")]
NQ = load_task("nq")


def questions(*texts):
    return [Question(n, text, (text.split()[-1],)) for n, text in enumerate(texts, start=1)]


def echo(name, wrong=(), **options):
    """Answer a question with its last word, or with "no" if the word is in `wrong`."""

    def rule(text):
        question, _, answer = text.rpartition("Question: ")[2].partition("\nAnswer:")
        if "boom" in question:
            raise RuntimeError("boom")
        word = question.split()[-1]
        reply = " no" if word in wrong else f" {word}"
        return {reply[len(answer)] if len(answer) < len(reply) else END: 1.0}

    return FakeBackend(name, rule, **options)


def ensemble(*members, requests=4, **config):
    return AdaFuseEngine(
        members, AdaFuseConfig(**config), runtime=RuntimeConfig(max_requests=requests)
    )


def test_records_are_in_order_and_complete():
    items = questions("is it ada", "is it bo", "is it cy")
    with ensemble(echo("one"), echo("two", wrong={"bo"})) as engine:
        records = list(answer_all(engine, NQ, items, METRICS))
    assert [record.line for record in records] == [1, 2, 3]
    first, second, _ = records
    assert (first.pred, first.answer, first.label) == ("ada", "ada", ("ada",))
    assert first.metrics == {"exact_match": 100, "f1": 100}
    assert second.metrics["exact_match"] == 100 * (second.pred == "bo")
    assert first.finish_reason == "stop"
    assert first.error is None
    assert min(first.latency, first.seconds) > 0
    assert first.usage is not None
    assert first.usage.forward_passes.keys() == {"one", "two"}
    assert first.rounds is None


def test_simultaneous_answers_equal_sequential_answers():
    words = [f"is it w{number}" for number in range(23)]
    found = []
    for requests in (1, 5):
        with ensemble(echo("one"), requests=requests) as engine:
            records = answer_all(engine, NQ, questions(*words), METRICS, rounds=True)
            found.append([(each.line, each.pred, len(each.rounds or ())) for each in records])
    assert found[0] == found[1]
    assert [line for line, *_ in found[0]] == list(range(1, 24))


def test_requests_run_at_the_same_time():
    meeting = threading.Barrier(4, timeout=10)

    def meet(number):
        meeting.wait()
        return number

    assert list(in_order(meet, range(8), 4)) == list(range(8))


def test_a_slow_answer_does_not_change_the_order():
    def work(number):
        time.sleep(0.05 if number == 0 else 0)
        return number

    assert list(in_order(work, range(20), 3)) == list(range(20))


def test_a_question_that_fails_counts_as_wrong_and_does_not_stop_others():
    items = questions("is it ada", "boom bo", "x" * 200 + " cy", "is it di")
    with ensemble(echo("one", context_window=150)) as engine:
        records = list(answer_all(engine, NQ, items, METRICS))
    assert [record.finish_reason for record in records] == ["stop", "error", "error", "stop"]
    assert "MemberError: member 'one' failed" in (records[1].error or "")
    assert "ContextWindowError" in (records[2].error or "")
    assert records[1].metrics == {"exact_match": 0, "f1": 0}
    summary = Evaluation.of(records, METRICS, task="nq", system="ensemble")
    assert (summary.answers, summary.failed, summary.scores["exact_match"].value) == (4, 2, 50)
    assert summary.finish_reasons == {"stop": 2, "error": 2}
    assert [record.is_lost for record in records] == [False, True, False, False]
    assert (summary.lost, lost(records)) == (
        1,
        1,
    )  # a prompt that does not fit will not fit next time
    assert [each.number for each in unanswered(questions(*"abcdef"), records)] == [2, 5, 6]
    again = records[1].model_copy(update={"error": None, "answer": "bo"})
    assert merged(records, [again]) == [records[0], again, *records[2:]]


def test_invalid_options_are_a_single_error():
    with ensemble(echo("one")) as engine, pytest.raises(InvalidOptionError):
        list(answer_all(engine, NQ, questions("a"), METRICS, system=System("x", {"max_word": 1})))


def test_cancelling_leaves_only_complete_records():
    cancel = threading.Event()
    with ensemble(echo("one"), requests=1) as engine:
        records = []
        for record in answer_all(
            engine, NQ, questions(*(f"is w{n}" for n in range(50))), METRICS, cancel=cancel
        ):
            records.append(record)
            cancel.set()
    assert 1 <= len(records) < 50
    assert all(record.answer == f"w{record.line - 1}" for record in records)


def coin(name):
    """Answer every question with " yes" or " no", which are equally likely."""

    def rule(text):
        answer = text.rpartition("Answer:")[2]
        return {" yes": 0.5, " no": 0.5} if not answer else {END: 1.0}

    return FakeBackend(name, rule, [" yes", " no"])


def test_every_question_has_its_own_seed():
    items = questions(*["is it so"] * 40)
    with ensemble(coin("one"), coin("two"), temperature=1.0, seed=3) as engine:
        records = list(answer_all(engine, NQ, items, METRICS))
        part = list(answer_all(engine, NQ, items[7:9], METRICS))
        alone = list(answer_all(singly(engine), NQ, items, METRICS, system=System.alone("one")))
        other = list(answer_all(engine, NQ, items, METRICS, system=System("s", {"seed": 4})))
        unseeded = [
            [each.seed for each in answer_all(engine, NQ, items, METRICS, system=System("s", free))]
            for free in [{"seed": None}] * 2
        ]
    answers = [record.answer for record in records]
    assert len({record.seed for record in records}) == 40
    assert 5 < answers.count("yes") < 35
    assert [(each.seed, each.answer) for each in part] == [
        (each.seed, each.answer) for each in records[7:9]
    ]
    assert [record.answer for record in alone] == answers  # equal members share the noise
    assert [record.answer for record in other] != answers
    assert not {*unseeded[0]} & {*unseeded[1]}


def test_without_sampling_a_record_has_no_seed_and_n_is_refused():
    with ensemble(echo("one"), seed=3) as engine:
        (record,) = answer_all(engine, NQ, questions("is it ada"), METRICS)
    assert record.seed is None
    with (
        ensemble(echo("one"), temperature=1.0, n=2) as engine,
        pytest.raises(InvalidOptionError, match="one response to each question; got 2"),
    ):
        list(answer_all(engine, NQ, questions("a"), METRICS))


def test_the_answer_is_read_after_the_reasoning():
    texts = {"is it ada": "<think>\nbo?\n</think>\n\nada"}
    with scripted_engine(lambda _: texts["is it ada"], max_new_tokens=40) as engine:
        (record,) = answer_all(engine, NQ, questions("is it ada"), METRICS, chat=True)
    assert record.pred == texts["is it ada"]
    assert record.answer == "ada"
    assert record.metrics["exact_match"] == 100
    for text in (record.pred, "bo?</think> Ada."):  # a chat template can open the reasoning
        assert NQ.same(text) == NQ.same("ada")


def test_a_single_member_decodes_greedily_without_a_cached_prompt():
    def script(prompt):
        return "right" if "easy" in prompt else "wrong"

    items = questions("a hard right", "an easy right")
    with scripted_engine(script, lambda prompt: "right", max_new_tokens=12) as engine:
        engine.generate("Question: a hard right\nAnswer:")  # the members cache this prompt
        ink, quill = (
            list(answer_all(singly(engine), NQ, items, METRICS, system=System.alone(name)))
            for name in ("ink", "quill")
        )
    assert [record.pred for record in ink] == ["wrong", "right"]
    assert [record.pred for record in quill] == ["right", "right"]
    assert ink[0].usage is not None
    assert ink[0].usage.cached_tokens == {"ink": 0}
    assert ink[0].usage.tokens_processed["ink"] >= ink[0].usage.prompt_tokens["ink"]


def made(line, right, group=None, **changes):
    return Record(
        line=line,
        question=f"q{line}",
        group=group,
        answer="x" if right else "y",
        label=("x",),
        metrics={},
        finish_reason="stop",
        **changes,
    )


def test_summaries_are_means_over_answers():
    usage = {
        "prompt_tokens": {"a": 1}, "completion_tokens": {"a": 1}, "forward_passes": {"a": 3},
        "tokens_processed": {"a": 9}, "cached_tokens": {"a": 0},
    }  # fmt: skip
    double = {name: {"a": 2 * of["a"]} for name, of in usage.items()}
    records = [
        made(1, True, "one", seconds=1.0, latency=2.0, usage=usage),
        made(2, False, "two", seconds=2.0, latency=4.0, usage=double),
        made(3, True, "two", error="failed"),
    ]
    summary = Evaluation.of(records, METRICS, task="t", system="s")
    assert summary.seconds == 1.0
    assert summary.latency == 2.0
    assert summary.tokens_processed == {"a": 13.5}
    assert summary.forward_passes == {"a": 4.5}
    assert summary.tokens == 13.5
    assert {name: score.value for name, score in summary.groups.items()} == {"one": 100, "two": 50}
    assert list(summary.scores) == ["exact_match", "f1"]


def test_tokens_include_cached_prompts():
    usage = Usage(
        prompt_tokens={"a": 50, "b": 40}, completion_tokens={"a": 1, "b": 1},
        forward_passes={"a": 2, "b": 2}, tokens_processed={"a": 12, "b": 45},
        cached_tokens={"a": 40, "b": 0},
    )  # fmt: skip
    assert tokens(usage) == 12 + 45 + 40
    summary = Evaluation.of([made(1, True, usage=usage)], METRICS, task="t", system="s")
    assert summary.tokens == tokens(usage)


def test_systems_are_compared_on_their_common_questions():
    ours = [made(n, n != 5) for n in range(1, 21)]
    theirs = [made(n, n % 2 == 0) for n in range(11, 31)]
    exact, f1 = compared(ours, theirs, METRICS)
    assert (exact.questions, exact.ours, exact.theirs) == (10, 100, 50)
    assert exact.p_value == pytest.approx(2 / 2**5)
    assert f1.test == "random subsets"


def test_a_later_result_replaces_the_earlier_one(tmp_path):
    results = Results(tmp_path / "out" / "results.jsonl")
    results.begin({"x": 1}, afresh=True)
    for line in ({"line": 1, "error": "MemberError: out"}, {"line": 2}):
        results.append(line)
    with results.path.open("ab") as file:
        file.write(b'{"line": 3')  # an incomplete line
    results.begin({"x": 1}, afresh=False)
    results.append({"line": 1, "pred": "a"})
    assert results.done({"x": 1}, range(1, 9)) == [{"line": 1, "pred": "a"}, {"line": 2}]
    results.tidy()
    assert results.path.read_text() == '{"line": 1, "pred": "a"}\n{"line": 2}\n'
    assert results.done({"x": 1}, range(1, 9)) == [{"line": 1, "pred": "a"}, {"line": 2}]
    with pytest.raises(InvalidInputError, match=r"another --output\.$"):
        results.done({"x": 2}, range(1, 9))
    with pytest.raises(InvalidInputError, match=r"x 1, not 2\. Delete it\.$"):
        Results(results.path, "Delete it.").done({"x": 2}, range(1, 9))


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (None, False),
        ("ContextWindowError: too long", False),
        ("CacheMemoryError: too large", False),
        ("MemberOutOfMemoryError: member 'a' failed", True),
        ("EngineClosedError: closed", True),
        ("KeyError: 'x'", True),
    ],
)
def test_an_answer_is_lost_if_the_run_failed_and_not_the_question(error, again):
    assert made(1, False, error=error).is_lost is again


def test_prompts_can_be_sent_as_messages():
    items = questions("is it ada")
    seen = []

    def rule(text):
        seen.append(text)
        return {END: 1.0}

    with ensemble(FakeBackend("one", rule)) as engine:
        list(answer_all(engine, NQ, items, METRICS))
        plain = min(seen, key=len)  # drafts are longer
        seen.clear()
        list(answer_all(engine, NQ, items, METRICS, chat=True))
        chat = min(seen, key=len)
        seen.clear()
        with_roles = engine.generate(messages=[{"role": "user", "content": plain}])
    assert plain == "Question: is it ada\nAnswer:"
    assert plain in chat
    assert chat != plain
    assert chat == min(seen, key=len)
    assert with_roles.finish_reason == "stop"


def test_different_test_sets_are_not_compared():
    other = made(1, True).model_copy(update={"question": "another"})
    with pytest.raises(InvalidInputError, match="line 1 is 'q1' in one and 'another'"):
        compared([made(1, True)], [other], METRICS)
    with pytest.raises(InvalidInputError, match="no question in common"):
        compared([made(1, True)], [made(2, True)], METRICS)


def test_records_are_read_without_an_incomplete_line(tmp_path):
    path = tmp_path / "results.jsonl"
    records = [made(1, True), made(2, False, error="failed")]
    text = "".join(record.model_dump_json(exclude_none=True) + "\n" for record in records)
    path.write_text(text + '{"line": 3')
    assert read_records(path) == records
    again = records[0].model_copy(update={"answer": "z"})
    path.write_text(text + again.model_dump_json(exclude_none=True) + "\n")
    assert read_records(path) == [again, records[1]]  # the later result counts
    path.write_text(text + '{"line": 3}\n')
    with pytest.raises(InvalidInputError, match="line 3, is not a result"):
        read_records(path)
    path.write_text("")
    with pytest.raises(InvalidInputError, match="no results"):
        read_records(path)
