"""The analysis of answers with several sentences, from records written by hand."""

import pytest

from benchmarks.paper.layout import Part, Row, Suite
from benchmarks.paper.long import (
    ALL_TASKS,
    Answered,
    Bin,
    Decisions,
    Sentences,
    bins_of,
    decisions,
    long_answers,
    total,
)
from benchmarks.paper.metrics import load_metric
from benchmarks.paper.page import suite_charts
from benchmarks.paper.report import Report, make_report
from benchmarks.paper.run import Work
from benchmarks.paper.runner import Record
from benchmarks.paper.sheets import markdown, sheets
from benchmarks.paper.tasks import Question, load_task

MEMBERS = ("wren", "heron", "finch")
REFERENCE = "The mill was founded by Ada Brook. It charges 8 crowns. It has 5 rooms."


def answered(line, answer=REFERENCE, *, label=REFERENCE, score=100.0, rounds=None, error=None):
    """A record of a question. Its answer is the text of its rounds, if it has some."""
    texts = [each["text"] for each in rounds or ()]
    return Record(
        line=line,
        question=f"question {line}",
        answer="".join(texts) if texts else answer,
        label=(label,),
        metrics={"f1": score},
        finish_reason="stop" if error is None else "error",
        error=error,
        rounds=rounds,
    )


def candidate(text, *proposers, stops=False, likely=()):
    """A candidate that some members proposed. The `likely` ones give it a lower NLL."""
    nll = {name: 0.1 if name in likely else 0.5 for name in MEMBERS}
    return {"text": text, "stops": stops, "proposers": proposers, "nll": nll, "score": 0.3}


def played(*candidates, text=None, forced=False):
    """A round, won by its first candidate."""
    return {
        "index": 0,
        "candidates": candidates,
        "winner": 0,
        "text": candidates[0]["text"] if text is None else text,
        "margins": {} if forced else {name: [0.5] for name in MEMBERS},
        "elapsed": 0.1,
        "forced": forced,
    }


def agreed(text, **options):
    """A unanimous round."""
    return played(candidate(text, *MEMBERS, **options))


def counted(*rounds, label=REFERENCE, stop=()):
    """The counts of one answer, in all its thirds together, without zeros."""
    found = total(decisions([answered(1, label=label, rounds=rounds)], MEMBERS, stop))
    return {name: count for name, count in found.model_dump().items() if count}


WREN = played(candidate("The mill", "wren"), candidate("A mill", "heron"))
"""A first round that is right, and owned by wren."""


def test_an_answer_that_all_agree_on_has_no_changes():
    assert counted(
        agreed("The mill was"),
        agreed(" founded by Ada"),
        agreed(" Brook. It"),
        agreed(" charges 8 crowns. It has"),
        agreed(" 5 rooms.", stops=True),
    ) == {"rounds": 5, "unanimous": 5, "judged": 5, "kept": 5}


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (" was founded", " was sold", {"right": 1, "kept": 2}),
        (" was sold", " was founded", {"wrong": 1, "kept": 1, "missed": 1}),
        (" was", " was founded", {"neutral": 1, "kept": 2}),
        (" is", " was sold", {"neutral": 1, "kept": 1, "unknown": 1}),
    ],
)
def test_a_change_is_judged_by_what_the_earlier_owner_proposed(new, old, expected):
    change = played(candidate(new, "heron"), candidate(old, "wren"))
    assert counted(WREN, change) == {"rounds": 2, "changes": 1, "judged": 2} | expected


@pytest.mark.quick
def test_a_change_is_relative_to_the_last_round_with_an_owner():
    ours = played(candidate(" founded", "wren"), candidate(" sold", "heron"))
    theirs = played(candidate(" by Ada", "heron"), candidate(" in 1909", "wren"))
    unchanged = counted(WREN, agreed(" was"), ours)
    assert "changes" not in unchanged
    changed = counted(WREN, agreed(" was"), agreed(" founded"), theirs)
    assert (changed["changes"], changed["right"]) == (1, 1)


def test_of_several_proposals_the_one_that_the_earlier_owner_finds_most_likely_counts():
    def change(likely):
        sold = candidate(" was sold", "wren", likely=["wren"] if likely == "sold" else ())
        founded = candidate(" was", "wren", likely=["wren"] if likely == "founded" else ())
        return played(candidate(" was founded", "heron"), sold, founded)

    assert counted(WREN, change("sold"))["right"] == 1
    assert counted(WREN, change("founded"))["neutral"] == 1


def test_a_change_is_not_judged_if_the_earlier_owner_proposed_nothing():
    change = played(candidate(" was founded", "heron"), candidate(" was", "finch"))
    found = counted(WREN, change)
    assert (found["changes"], found["judged"]) == (1, 2)
    assert not {"right", "wrong", "neutral"} & set(found)


def test_a_wrong_sentence_is_not_judged_further_but_the_next_one_is():
    found = counted(
        agreed("The mill was sold"),  # no candidate keeps to the reference
        agreed(" to Ada"),  # not judged
        agreed(" Brook."),  # not judged
        agreed(" It charges 8"),
        agreed(" crowns. It has 6 rooms."),  # leaves the reference in its second sentence
        agreed("", stops=True),  # three sentences have ended, so the response has to end
    )
    assert found == {"rounds": 6, "unanimous": 6, "judged": 4, "kept": 2, "unknown": 2}


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        (" Brook.", False, True),
        (" Brook. It charges 8", False, True),
        (" Brook. It charges 80", False, False),
        (" Brook. It charges 8 crowns. It has 5 rooms.", False, True),
        (" Brook. It charges 8 crowns. It has 5 rooms.", True, True),
        (" Brook. It charges 8 crowns. It has 5 rooms. It", False, False),
        (" Brook.", True, False),
        (" Brooke.", False, False),
        (" Brook", False, False),  # words are whole, and the reference has a period here
        ("\n Brook.  It\ncharges ", False, True),
    ],
)
def test_a_candidate_may_cross_the_ends_of_sentences(text, stops, kept):
    found = counted(agreed("The mill was founded by Ada"), agreed(text, stops=stops))
    assert found.get("kept", 0) == 1 + kept


def test_a_response_that_goes_on_after_the_reference_leaves_it():
    whole, end = agreed(REFERENCE), candidate("", "heron", stops=True)
    longer = counted(whole, played(candidate(" It is old.", "wren"), end), agreed(" It is"))
    assert longer == {"rounds": 3, "unanimous": 2, "judged": 2, "kept": 1, "missed": 1}
    ended = counted(whole, played(end, candidate(" It is old.", "wren")))
    assert ended == {"rounds": 2, "unanimous": 1, "judged": 2, "kept": 2}


def test_a_stop_sequence_ends_a_candidate():
    rounds = [agreed("8 crowns.\nMy Question:")]
    assert counted(*rounds, label="8 crowns.", stop=("\n",))["kept"] == 1
    assert counted(*rounds, label="8 crowns. It has rooms.", stop=("\n",))["unknown"] == 1
    assert counted(*rounds, label="8 crowns.", stop=("Question", "\n"))["kept"] == 1
    assert counted(*rounds, label="8 crowns.")["unknown"] == 1


def test_a_line_break_ends_a_sentence():
    label = "12 + 7 = 19\n19 - 4 = 15"
    found = counted(agreed("12 + 7 = 18\n"), agreed("19 - 4"), agreed(" = 15"), label=label)
    assert (found["judged"], found["kept"], found["unknown"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("rest", "expected"),  # of rounds after "It charges" and " 48"
    [
        ("6", {"judged": 3, "kept": 3}),
        ("7", {"judged": 3, "kept": 2, "unknown": 1}),
        (" crowns", {"judged": 2, "kept": 1, "unknown": 1}),  # 48 was the whole word
    ],
)
def test_only_a_word_that_the_next_round_continues_may_be_incomplete(rest, expected):
    found = counted(
        agreed("It charges"), agreed(" 48"), agreed(rest), label="It charges 486 crowns."
    )
    assert found == {"rounds": 3, "unanimous": 3} | expected


def test_a_wrong_sentence_stays_wrong_if_its_last_word_is_continued():
    label = "It charges 486 crowns."
    found = counted(agreed("It charged"), agreed(" 48"), agreed("6"), label=label)
    assert (found["judged"], found["unknown"]) == (1, 1)
    incomplete = played(candidate(" 5", "wren"), candidate(" 4", "heron"))  # nothing continues 4
    found = counted(agreed("It charges"), incomplete, agreed("0"), label=label)
    assert (found["judged"], found["kept"], found["unknown"]) == (2, 1, 1)


def test_text_that_continues_an_ended_sentence_is_not_judged():
    found = counted(agreed("It is old."), agreed("5"), label="It is old. It has 5 rooms.")
    assert found == {"rounds": 2, "unanimous": 2, "judged": 1, "kept": 1}


def test_forced_rounds_are_not_counted_but_their_text_is():
    forced = played(candidate("The mill"), forced=True)
    assert counted(forced, agreed(" was")) == {"rounds": 1, "unanimous": 1, "judged": 1, "kept": 1}


def test_text_that_a_limit_cut_is_continued_from_what_was_committed():
    cut = played(candidate(" was founded", *MEMBERS), text=" was")
    assert counted(WREN, cut, agreed(" founded"))["kept"] == 3


def test_rounds_are_divided_into_thirds_of_their_answer():
    words = [agreed(f" {word}") for word in REFERENCE.split()]
    records = [answered(1, rounds=words[:number]) for number in (1, 2, 4)]
    assert [each.rounds for each in decisions(records, MEMBERS)] == [2, 3, 2]
    assert [each.rounds for each in decisions(records[:1], MEMBERS)] == [0, 1, 0]


def test_bins_have_enough_questions_and_similar_sizes():
    assert bins_of([3] * 25 + [9] * 5 + [4] * 10 + [12] * 30) == [
        Bin(least=3, most=3, questions=25),
        Bin(least=4, most=12, questions=45),
    ]
    assert bins_of([3] * 25 + [9] * 5) == [Bin(least=3, most=9, questions=30)]
    assert bins_of([5, 2]) == [Bin(least=2, most=5, questions=2)]
    many = bins_of([n % 40 for n in range(1200)])
    assert [each.questions for each in many] == [210, 210, 210, 210, 210, 150]
    assert [each.words for each in many[:2]] == ["0-6", "7-13"]


def task(short, long, *, systems=("AdaFuse", "vote"), failed=None):
    """Twenty short and twenty long references, with the scores of every system on them."""
    return Answered(
        metric="f1",
        stop=(),
        records={
            name: [
                *(answered(n, label="8 crowns", score=score) for n, score in enumerate(short)),
                *(answered(n + 20, score=score) for n, score in enumerate(long)),
                *([answered(40, error="MemberOutOfMemoryError: x")] if failed == name else ()),
            ]
            for name in systems
        },
    )


@pytest.mark.quick
def test_scores_by_length_by_hand():
    found = long_answers({"one": task([100.0] * 20, [100.0, 0.0] * 10)}, MEMBERS)
    assert found is not None
    assert list(found.lengths) == ["one"]
    lengths = found.lengths["one"]
    assert [(each.words, each.questions) for each in lengths.bins] == [("2", 20), ("15", 20)]
    short, long = lengths.means["AdaFuse"]
    assert (short.value, short.error, short.bounds) == (100, 0, (100, 100))
    assert long.value == 50
    assert long.error == pytest.approx((50 * 50 * 20 / 19 / 20) ** 0.5)
    assert long.shown() == "50.0 ± 11.5"
    assert lengths.overall("AdaFuse") == 75


def test_all_tasks_together_have_the_questions_of_each():
    tasks = {
        "one": task([0.0] * 20, [100.0] * 20),
        "two": task([100.0] * 20, [100.0] * 20, failed="vote"),
    }
    found = long_answers(tasks, MEMBERS)
    assert found is not None
    assert set(found.lengths["two"].means) == {"AdaFuse"}  # the other one has a lost answer
    assert set(found.lengths[ALL_TASKS].means) == {"AdaFuse"}
    assert [each.value for each in found.lengths[ALL_TASKS].means["AdaFuse"]] == [50, 100]
    assert [each.questions for each in found.lengths[ALL_TASKS].bins] == [40, 40]


def test_only_tasks_with_several_sentences_are_analyzed():
    assert long_answers({"short": task([100.0] * 20, [])}, MEMBERS) is None
    assert long_answers({"rarely long": task([100.0] * 20, [0.0] * 4)}, MEMBERS) is None
    assert long_answers({}, MEMBERS) is None
    both = long_answers({"short": task([1.0], []), "long": task([], [1.0])}, MEMBERS)
    assert both is not None
    assert list(both.lengths) == list(both.sentences) == ["long"]


def test_sentences_are_right_wrong_or_missing():
    answers = [
        "It charges 8 crowns. It charges 8 crowns.  It has\n6 rooms.",
        "It has 5 rooms. The mill was founded by Ada Brook. It charges 8 crowns",
    ]
    records = [answered(n, answer) for n, answer in enumerate(answers)]
    found = long_answers({"one": Answered("f1", (), {"vote": records})}, MEMBERS)
    assert found is not None
    assert found.sentences["one"]["vote"] == Sentences(right=2.0, wrong=1.5, missing=1.0)


@pytest.fixture(scope="module")
def report():
    """A member that is wrong about short references, a peer, and AdaFuse with its rounds."""
    rows = (
        Row(name="wren alone", strategy="single", use=("wren",), kind="member"),
        Row(name="heron alone", strategy="single", use=("heron",), kind="member"),
        Row(name="vote", strategy="vote", kind="peer"),
        Row(name="AdaFuse", kind="adafuse"),
    )
    right = {"wren alone": 30, "heron alone": 10, "vote": 20, "AdaFuse": 40}
    labels = [REFERENCE if n > 20 else "It has 5 rooms. It is old." for n in range(1, 41)]
    change = played(candidate(" was founded", "heron"), candidate(" was sold", "wren"))
    answers = {
        ("nq", row.key, False): [
            answered(
                n,
                label if n <= right[row.name] else "It is old.",
                label=label,
                score=100.0 * (n <= right[row.name]),
                rounds=(WREN, change) if row.name == "AdaFuse" and label == REFERENCE else None,
            )
            for n, label in enumerate(labels, 1)
        ]
        for row in rows
    }
    work = Work(
        task=load_task("nq"),
        questions=[Question(n, f"question {n}", (label,)) for n, label in enumerate(labels, 1)],
        numbers=range(1, 41),
        metrics=[load_metric("f1")],
        header="",
        form="{question}",
        options={"stop": ("\n",)},
        identity={},
    )
    about = {
        **dict.fromkeys(("suite", "command", "version", "machine"), "x"),
        "date": "2026-11-21T20:00:00+00:00",
        "models": (),
        "members": MEMBERS,
        "max_requests": 16,
        "absent": {},
        "processor_seconds": 1.0,
    }
    part = Part(name="table-1", title="Table 1", about="", rows=rows, size="table")
    return make_report(Suite(), [part], {"nq": work}, answers, refused={}, about=about)


def test_a_report_of_long_answers_is_plain_data(report):
    assert Report.model_validate_json(report.model_dump_json()) == report
    thirds = report.long.decisions["nq"]["AdaFuse"]
    assert thirds[0] == Decisions(rounds=20, judged=20, kept=20)
    assert thirds[2] == Decisions(rounds=20, changes=20, right=20, judged=20, kept=20)
    assert list(report.long.decisions["nq"]) == ["AdaFuse"]


def test_tables_of_long_answers(report):
    made = {sheet.title: sheet for sheet in sheets(report)}
    for sheet in made.values():
        assert {len(row) for row in sheet.rows} == {len(sheet.columns)}
        assert markdown(sheet)
    lengths = made["Score by length of the reference answer, nq"]
    assert lengths.columns == ("system", "7 words", "15 words")
    assert lengths.rows[0] == ("questions", "20", "20")
    assert lengths.rows[1] == ("wren alone", "100.0 ± 0.0", "50.0 ± 11.5")
    rounds = made["What rounds decide inside an answer, nq"]
    every = dict(zip(rounds.columns, rounds.rows[-1], strict=True))
    assert (every["rounds of"], every["rounds"], every["changes"]) == ("all", "40", "20 (50.0 %)")
    assert (every["right"], every["wrong"], every["kept"]) == ("20", "0", "100.0 %")
    middle = dict(zip(rounds.columns, rounds.rows[1], strict=True))
    assert (middle["rounds of"], middle["unanimous"], middle["kept"]) == ("middle third", "-", "-")
    facts = made["Sentences per answer, nq"]
    assert facts.rows[2] == ("vote", "1.00", "0.50", "1.50")


def test_the_chart_of_lengths_has_the_best_systems_and_adafuse(report):
    chart = suite_charts(report).partition("Score by length of the reference answer (nq)")[2]
    chart = chart.partition("</figure>")[0]
    for name in ("wren alone", "vote", "AdaFuse"):
        assert f"</svg> {name}</li>" in chart
    assert "heron alone" not in chart
    assert 'title="wren alone: 50.0 ± 11.5"' in chart
    assert chart.count("<polyline") == 3
