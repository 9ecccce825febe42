"""Suites: rows, jobs, tables and claims from records written by hand; tiny real members."""

from pathlib import Path

import pytest

from adafuse_llm import AdaFuseEngine, InvalidInputError, Usage
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.report.charts import Bar, Point, Series, bar_chart, line_chart
from benchmarks.paper.layout import PAPER_TASKS, Part, Row, Sizes, Suite, paper
from benchmarks.paper.metrics import load_metric
from benchmarks.paper.page import suite_charts, suite_page
from benchmarks.paper.report import Claim, Report, make_report, verdicts
from benchmarks.paper.run import Job, Runner, Work, jobs_of, load_work
from benchmarks.paper.runner import Record
from benchmarks.paper.sheets import Sheet, markdown, sheets
from benchmarks.paper.statistics import holm
from benchmarks.paper.tasks import Question, load_task
from tests.support.models import CHATML, Recipe, backend
from tests.support.paths import BENCHMARKS, ROOT

RESULTS = ROOT / "docs" / "results"
STORED = RESULTS / "embedded-suite.json"

ABOUT = {
    "suite": "paper",
    "command": "python -m benchmarks.paper",
    "date": "2026-11-21T20:00:00+00:00",
    "version": "0",
    "machine": "x86_64",
    "models": (),
    "members": ("one", "two"),
    "max_requests": 16,
    "absent": {},
    "processor_seconds": 90.0,
}


def written(line, right, *, prompt=100, cached=0, decoding=10, rounds=None):
    """A record of a question that was answered rightly or not."""
    processed = prompt - cached + decoding
    counts = {"one": processed, "two": 0}
    usage = Usage(
        prompt_tokens={"one": prompt, "two": 0},
        completion_tokens={"one": 5, "two": 5},
        forward_passes={"one": 4, "two": 3},
        tokens_processed=counts,
        cached_tokens={"one": cached, "two": 0},
    )
    return Record(
        line=line,
        question=f"question {line}",
        answer="yes" if right else "no",
        label=("yes",),
        metrics={"exact_match": 100.0 * right},
        finish_reason="stop",
        seconds=0.5,
        latency=1.0,
        usage=usage,
        rounds=rounds,
    )


def spoken(text, *proposers, others=()):
    """A round of one candidate that some proposed, and candidates of others."""
    candidates = [
        {"text": text, "stops": False, "proposers": proposers, "nll": {"one": 0.1}, "score": 0.1},
        *(
            {"text": each, "stops": False, "proposers": ("two",), "nll": {}, "score": 1.0}
            for each in others
        ),
    ]
    return {
        "index": 0,
        "candidates": candidates,
        "winner": 0,
        "text": text,
        "margins": {"one": [0.9], "two": [0.7 if proposers == ("one",) else 0.2]},
        "elapsed": 0.1,
    }


ROUNDS = ({**spoken("yes, indeed", "one", others=["no"])}, {**spoken(" so", "one", "two")})


@pytest.fixture(scope="module")
def report():
    """One member that is right in 2 of 40, a peer in 20 and one in 38; AdaFuse in 38."""
    return reported()


def reported(*, unite=20, tasks=("nq",), metrics=("exact_match",), **lost):
    """The report, with as many right answers of UniTE and lost answers of rows by their name."""
    questions = [Question(n, f"question {n}", ("yes",)) for n in range(1, 41)]
    works = {
        task: Work(
            task=load_task(task),
            questions=questions,
            numbers=range(1, 41),
            metrics=[load_metric(metric)],
            header="",
            form="{question}",
            options={},
            identity={},
        )
        for task, metric in zip(tasks, metrics, strict=True)
    }
    rows = (
        Row(name="one alone", strategy="single", use=("one",), kind="member"),
        Row(name="UniTE", strategy="unite", kind="peer"),
        Row(name="vote", strategy="vote", kind="peer"),
        Row(name="DeePEn", strategy="deepen", kind="peer"),
        Row(name="AdaFuse", kind="adafuse"),
    )
    part = Part(name="table-1", title="Table 1", about="About.", rows=rows, size="table")
    right = {"one alone": 2, "UniTE": unite, "vote": 38, "AdaFuse": 38}
    decoding = {"one alone": 5, "UniTE": 30, "vote": 5, "AdaFuse": 20}
    answers = {
        (task, row.key, False): [
            written(
                n,
                n <= right[row.name],
                cached=50 if row.name == "UniTE" else 0,
                decoding=decoding[row.name],
                rounds=ROUNDS if row.name == "AdaFuse" else None,
            )
            for n in range(1, 41)
        ]
        for task in tasks
        for row in rows
        if row.name in right
    }
    for row in rows:
        for place in range(lost.get(row.name, 0)):
            failed = {"finish_reason": "error", "error": "MemberOutOfMemoryError: x", "answer": ""}
            records = answers["nq", row.key, False]
            records[place] = records[place].model_copy(update={**failed, "usage": None})
    refused = {"deepen": "it needs embeddings"}
    return make_report(Suite(), [part], works, answers, refused=refused, about=ABOUT)


def test_rows_of_the_same_decisions_have_the_same_key():
    assert Row(name="a").key == Row(name="b", options={"branching_factor": 3, "max_words": 3}).key
    assert Row(name="a", options={"branching_factor": 1}).key == "adafuse branching_factor=1"
    three = {"branching_factor": 3}
    assert Row(name="a", strategy="mixture", options=three).key == "mixture branching_factor=3"
    assert Row(name="a", strategy="single", use=("x",)).key == "single by x"
    assert Row(name="a", strategy="unite").key == "unite"


def test_rows_of_different_decisions_have_different_keys():
    rows = [
        Row(name="the task's limit"),
        Row(name="the usual limit", options={"max_new_tokens": 256}),
        Row(name="no stop", options={"stop": ()}),
        Row(name="all", options={"use": None}),
        Row(name="two", use=("a", "b")),
        Row(name="one", use=("a+b",)),
        Row(name="a path", use=("org/a",)),
        Row(name="no path", use=("org_a",)),
        Row(name="spaced", use=("org a",)),
    ]
    assert len({row.key for row in rows}) == len(rows)
    assert len({Job("nq", row, 1).path(Path("out")) for row in rows}) == len(rows)
    assert Job("nq", rows[0], 1).path(Path("out")) == Path("out/nq/adafuse.jsonl")


@pytest.mark.quick
def test_nothing_is_claimed_of_answers_that_were_lost():
    report = reported(UniTE=3)
    claims = {claim.theirs: claim for claim in report.claims}
    lost = claims["UniTE"]
    assert (lost.verdict, lost.lost, lost.comparison) == ("failed", (0, 3), None)
    assert claims["one alone"].verdict == "above"
    assert claims["one alone"].adjusted == pytest.approx(2 * 2 / 2**36)  # of two rivals
    assert "not compared with UniTE (3 answers failed)" in verdicts(report)[1]
    made = {sheet.title: sheet for sheet in sheets(report)}
    assert ("UniTE", "42.5 (3 failed)") in made["Table 1"].rows
    tests = made["Table 1: nq, intervals, cost and tests"]
    row = dict(zip(tests.columns, tests.rows[1], strict=True))
    assert (row["failed"], row["p, peer"], row["p, member"], row["gain"]) == ("3", "-", "-", "-")
    assert "the same command repeats the question" in tests.note
    claimed = made["Is AdaFuse above? nq"].rows[1]
    assert claimed[1:5] == ("UniTE", "-", "-", "-")
    assert claimed[-1] == "not tested: 3 answers failed"
    assert "42.5 (3 failed)" in suite_page(report)
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_nothing_is_claimed_where_our_own_answers_were_lost_or_the_best_rivals():
    ours = reported(AdaFuse=1)
    assert {claim.verdict for claim in ours.claims} == {"failed"}
    assert ours.claims[0].lost == (1, 0)
    best = reported(vote=1).section("table-1").best("nq", "peer")
    assert best.name == "UniTE"  # of those that can be compared


def test_parts_share_what_they_have_in_common(report):
    works, _ = load_work(Suite(questions=Sizes(table=4, sweep=2, time=1)), None)
    suite = Suite(questions=Sizes(table=4, sweep=2, time=1))
    jobs = {job.name: job for job in jobs_of(paper(("one", "two")), suite, works)}
    assert jobs["embedded", "adafuse", False].questions == 4  # Table 1 asks most
    assert jobs["embedded", "adafuse branching_factor=2", False].questions == 2
    assert jobs["embedded", "adafuse", True].questions == 2  # one that is not counted before
    assert len({job.path(Path("out")) for job in jobs.values()}) == len(jobs)


def test_tokens_count_prompts_whether_they_were_kept_or_not(report):
    cells = {line.name: line.cells["nq"] for line in report.sections[0].lines}
    assert (cells["UniTE"].tokens, cells["UniTE"].decoding_tokens) == (130, 30)
    assert (cells["AdaFuse"].tokens, cells["AdaFuse"].decoding_tokens) == (120, 20)


def test_claims_say_above_whom_and_at_what_cost(report):
    verdict = {claim.theirs: claim.verdict for claim in report.claims}
    assert verdict == {"one alone": "above", "UniTE": "above", "vote": "not shown"}
    member, peers = verdicts(report)
    assert member == (
        "AdaFuse and the best member: above, with more tokens than one alone "
        "(+90.0 points, Holm's p < 0.001, +14.3 % tokens)."
    )
    assert peers == (
        "AdaFuse and its peers: above, with no more tokens than UniTE (+45.0 points, Holm's "
        "p < 0.001, -7.7 % tokens); not shown to differ from vote (+0.0 points, Holm's p = 1.000, "
        "+14.3 % tokens)."
    )
    first = report.claims[0]
    assert first.comparison.p_value == pytest.approx(2 / 2**36)
    assert first.adjusted == pytest.approx(3 * 2 / 2**36)


def test_a_verdict_needs_a_low_p_value_after_the_adjustment_for_all_rivals():
    report = reported(unite=32)
    claim = next(claim for claim in report.claims if claim.theirs == "UniTE")
    assert claim.comparison is not None
    assert (claim.comparison.p_value, claim.adjusted) == pytest.approx((2 / 2**6, 2 * 2 / 2**6))
    assert (claim.comparison.verdict, claim.verdict) == ("above", "not shown")
    assert "not shown to differ from UniTE (+15.0 points, Holm's p = 0.062" in verdicts(report)[1]
    stored = claim.model_dump() | {"verdict": "above"}  # as files from before have it
    assert Claim.model_validate(stored) == claim
    assert claim.model_dump()["verdict"] == "not shown"


def test_the_questions_of_all_tasks_are_tested_together():
    report = reported(tasks=("nq", "triviaqa"), metrics=("exact_match", "f1"))
    pooled = {claim.theirs: claim for claim in report.claims if claim.task == "all tasks"}
    comparison = pooled["UniTE"].comparison
    assert comparison is not None
    assert (comparison.questions, comparison.test) == (80, "random subsets")
    assert (comparison.ours, comparison.theirs) == (95.0, 50.0)
    assert pooled["one alone"].tokens == (120, 105)
    assert "AdaFuse and its peers, all tasks: above" in verdicts(report)[-1]
    (sheet,) = [each for each in sheets(report) if each.title == "Is AdaFuse above? all tasks"]
    assert sheet.note.endswith("Every question counts once, with the main metric of its task.")
    binary = reported(tasks=("nq", "triviaqa"), metrics=("exact_match", "exact_match"))
    assert {claim.comparison.test for claim in binary.claims} == {"McNemar's exact test"}
    lost = reported(tasks=("nq", "triviaqa"), metrics=("exact_match", "f1"), UniTE=3)
    assert [claim.lost for claim in lost.claims if claim.theirs == "UniTE"] == [
        (0, 3),
        (0, 0),
        (0, 3),
    ]


def test_corpus_metrics_are_not_tested_together():
    pytest.importorskip("sacrebleu")
    report = reported(tasks=("nq", "triviaqa"), metrics=("exact_match", "chrf"))
    assert {claim.task for claim in report.claims} == {"nq", "triviaqa"}


def test_what_a_strategy_cannot_is_left_out(report):
    section = report.section("table-1")
    assert section is not None
    assert section.absent == {"DeePEn": "it needs embeddings"}
    best = section.best("nq", "peer")
    assert best is not None
    assert best.name == "vote"
    versus = {line.name: line.cells["nq"].versus for line in section.lines}
    assert "best peer" not in versus["vote"]
    assert versus["AdaFuse"]["best peer"].difference.value == 0
    assert versus["UniTE"]["best member"].difference.value == pytest.approx(45)


def test_rounds_are_words_and_brackets(report):
    assert report.words == {"nq": {"AdaFuse": {1: 40, 2: 40}}}
    assert report.sure == {"nq": {"AdaFuse": 75.0}}
    (trace,) = report.traces
    assert trace.bracketed == "[yes, indeed]one [so]all"


@pytest.mark.quick
def test_tables_have_a_cell_per_column(report):
    made = {sheet.title: sheet for sheet in sheets(report)}
    for sheet in made.values():
        assert {len(row) for row in sheet.rows} == {len(sheet.columns)}
    scores = made["Table 1"]
    assert scores.columns == ("system", "nq")
    assert scores.rows[-1] == ("AdaFuse", "95.0")
    tests = made["Table 1: nq, intervals, cost and tests"]
    row = dict(zip(tests.columns, tests.rows[-1], strict=True))
    assert row["gain"] == "+0.0 %"
    assert row["p, peer"] == "1.000"
    assert row["p, member"] == "< 0.001"
    assert (row["seconds"], row["tokens"], row["passes"]) == ("0.500", "120", "7.0")


def test_a_report_is_plain_data(report):
    assert report.time == "80 s, 90 s of processor time"
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_markdown_is_text_and_not_marks():
    sheet = Sheet("x", "t", ("a|b", "c"), (("*d*", "[1]"),), "note")
    assert markdown(sheet).splitlines() == [
        r"| a\|b | c |",
        "|---|---:|",
        r"| \*d\* | \[1\] |",
        "",
        "note",
    ]


def test_holms_method_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.quick
def test_lines_and_bars_are_placed_in_percent():
    points = [Point(1, 50, "a", 40, 60), Point(3, 100, "b"), Point(2, 0, "c")]
    chart = line_chart([Series(points)], most=100, labels={1: "one", 3: "three"})
    assert chart is not None
    (line,) = chart["lines"]
    assert line["points"] == "0.0,50.0 100.0,0.0 50.0,100.0"
    assert (line["dots"][0]["top"], line["dots"][0]["tall"]) == (40.0, 20.0)
    assert [(each["x"], each["shown"]) for each in chart["labels"]] == [(0, "one"), (100, "three")]
    assert line_chart([Series([])]) is None
    (short, long) = bar_chart([Bar("a", 1, "1", 0.5, 2), Bar("b", 4, "4")])
    assert (short["share"], short["whisker"]) == (25, {"left": 12.5, "width": 37.5})
    assert (long["share"], long["whisker"]) == (100, None)


def test_what_a_suite_cannot_read_is_an_error_with_the_file(tmp_path):
    (tmp_path / "nq.jsonl").write_text('{"question": "who?"}\n')
    with pytest.raises(InvalidInputError, match=r"nq\.jsonl: line 1 .* it has no \"answer\""):
        load_work(Suite(), tmp_path)
    (tmp_path / "nq.jsonl").write_text('{"question": "who?", "answer": "x"}\n')
    (tmp_path / "nq.prompt.txt").write_bytes(b"\xff")
    with pytest.raises(InvalidInputError, match=r"nq\.prompt\.txt is not UTF-8 text"):
        load_work(Suite(), tmp_path)
    with pytest.raises(InvalidInputError, match="--metric chrf: none of the tasks"):
        load_work(Suite(), None, metrics=["chrf"])
    with pytest.raises(InvalidInputError, match="task embedded has its own questions"):
        load_work(Suite(), tmp_path, tasks=["embedded"])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(name="x", use=("lama",)), "row 'x': option 'use': there is no member 'lama'"),
        (Row(name="x", options={"weights": (1, 2, 3)}), "one value per member"),
    ],
)
def test_a_row_that_does_not_fit_the_members_is_an_error_before_anything_is_decoded(
    tmp_path, row, message
):
    works, _ = load_work(Suite(questions=Sizes(table=1, sweep=1, time=1)), None)
    with AdaFuseEngine([FakeBackend(name, lambda text: {}) for name in ("one", "two")]) as engine:
        runner = Runner(lambda: engine, tmp_path, works, Suite(), identity={})
        with pytest.raises(InvalidInputError, match=message):
            runner.refusal(Job("embedded", row, 1))
        optional = row.model_copy(update={"optional": True})
        assert message in (runner.refusal(Job("embedded", optional, 1)) or "")
    assert not list(tmp_path.iterdir())


def says(name, reply):
    """Writes this reply to whatever is asked."""

    def rule(text):
        written = text.rpartition("step by step\n")[2]
        return {reply[len(written)] if len(written) < len(reply) else END: 1.0}

    return FakeBackend(name, rule)


def test_a_majority_vote_is_on_answers_and_not_on_texts(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "9+9?", "answer": "18"}\n')
    suite = Suite(max_new_tokens={"gsm8k": 40})
    works, _ = load_work(suite, tmp_path, tasks=["gsm8k"])
    members = [says("a", "So it is 17."), says("b", "9+9=18"), says("c", "The answer is 18.0")]
    with AdaFuseEngine(members) as engine:
        runner = Runner(lambda: engine, tmp_path / "out", works, suite, identity={})
        (record,) = runner.records(Job("gsm8k", Row(name="vote", strategy="vote"), 1))
    assert (record.pred, record.metrics["number"]) == ("9+9=18", 100)


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the paper's benchmark files are absent")
def test_the_papers_benchmarks_are_six_tasks():
    works, absent = load_work(Suite(), BENCHMARKS, metrics=["chrf"])
    assert absent == {}
    assert tuple(works) == PAPER_TASKS
    assert [len(work.questions) for work in works.values()] == [3610, 2500, 6000, 1319, 1012, 1012]
    assert all(work.header for work in works.values())
    assert works["flores_de_en"].metrics[0].name == "chrf"


ONE = Recipe("llama", "bytelevel", seed=1, template=CHATML)
TWO = Recipe("gpt2", "unigram", seed=2, template=CHATML)


def test_tiny_members_run_a_suite_and_run_it_again(tmp_path):
    suite = Suite(
        questions=Sizes(table=2, sweep=1, time=1),
        max_new_tokens={"embedded": 4},
        max_requests=2,
        parts=("table-1",),
    )
    rows = (Row(name="AdaFuse"), Row(name="UniTE", strategy="unite", kind="peer"))
    parts = [Part(name="table-1", title="Table 1", about="", rows=rows, size="table")]
    works, absent = load_work(suite, None)
    assert absent == {}
    said = []
    with AdaFuseEngine([backend(ONE), backend(TWO)]) as engine:
        for folder in ("first", "second"):
            runner = Runner(lambda: engine, tmp_path / folder, works, suite, identity={})
            answers = {job.name: runner.records(job) for job in jobs_of(parts, suite, works)}
            said.append({name: [each.pred for each in found] for name, found in answers.items()})
            assert [runner.missing(job) for job in jobs_of(parts, suite, works)] == [0, 0]
    assert said[0] == said[1]
    assert {len(each) for each in said[0].values()} == {2}
    about = ABOUT | {"members": (ONE.name, TWO.name)}
    made = make_report(suite, parts, works, answers, refused={}, about=about)
    assert made.words["embedded"]["AdaFuse"]
    assert made.traces[0].rounds


@pytest.mark.parametrize("form", [suite_page, suite_charts])
def test_a_page_asks_for_nothing_from_elsewhere(report, form):
    page = form(report)
    assert "https:" not in page
    assert "<script" not in page
    assert page.count("<svg") >= page.count("<polyline")


def test_the_stored_results_are_those_of_a_whole_suite():
    stored = Report.model_validate_json(STORED.read_text(encoding="utf-8"))
    assert stored.members == ("wren", "heron", "finch")
    assert [part.name for part in stored.sections] == [part.name for part in paper(("a", "b"))]
    assert stored.processor_seconds < 45 * 60
    for sheet in sheets(stored):
        assert {len(row) for row in sheet.rows} == {len(sheet.columns)}


@pytest.mark.parametrize("name", ["embedded", "long"])
def test_a_browser_shows_every_label_of_the_stored_results(new_tab, tmp_path, name):
    stored = Report.model_validate_json(
        (RESULTS / f"{name}-suite.json").read_text(encoding="utf-8")
    )
    path = tmp_path / "suite.html"
    path.write_text(suite_page(stored), encoding="utf-8")
    for scheme, width in (("light", 1100), ("dark", 390)):
        tab = new_tab(color_scheme=scheme, viewport={"width": width, "height": 900})
        problems: list[str] = []
        tab.on("console", lambda message, problems=problems: problems.append(message.text))
        tab.on("request", lambda request, problems=problems: problems.append(request.url))
        tab.goto(path.as_uri())
        assert problems == [path.as_uri()]
        assert not tab.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert tab.evaluate(OVERLAPPING) == []
        colours = tab.evaluate(COLOURS)
        assert (colours["ink"] > colours["paper"]) == (scheme == "dark")


OVERLAPPING = """() => {
  const found = [];
  for (const group of document.querySelectorAll(".places, .scale, .bars, .legend")) {
    const boxes = [...group.children].filter(e => e.textContent.trim()).map(e => {
      const range = document.createRange();
      range.selectNodeContents(e);
      return [e.textContent.trim(), range.getBoundingClientRect()];
    });
    for (const [text, box] of boxes) {
      if (box.left < 0 || box.right > innerWidth) found.push(`${text} is cut`);
    }
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([two, b]) => {
      const beside = a.right <= b.left + .5 || b.right <= a.left + .5;
      const below = a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
      if (!beside && !below) found.push(`${one} is over ${two}`);
    }));
  }
  return found;
}"""
COLOURS = """() => {
  const style = getComputedStyle(document.querySelector("main"));
  const sum = colour => colour.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0);
  return {ink: sum(style.color), paper: sum(style.backgroundColor)};
}"""
