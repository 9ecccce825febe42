"""The benchmarks run, and what they compare the engine with does what its description says.

Nothing is timed here.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.embedded import heldout_questions
from benchmarks import embedded_skills, gpu, peers, soak
from benchmarks.speed import branches as passes
from benchmarks.speed import comparisons, first_words, memory, real, start_up
from benchmarks.speed.__main__ import main as speed
from benchmarks.speed.measure import Outcome, Report, Row, Target, as_markdown, take_turns
from benchmarks.speed.members import embedded, make_engine, prompt_of, random_weights
from benchmarks.speed.peers import GaC, PaperLoop, UniTE, run_engine, run_generate
from benchmarks.speed.script import write_script

TOY = comparisons.Size(
    repeats=1,
    base=(20, 4),
    branches=(1, 3),
    prompts=(20,),
    responses=(4,),
    members=(1,),
    paper_rounds=1,
    questions=1,
    quote=("tiny", 40, 6),
    random=(("tiny", 20, 4, (1, 3)),),
    long=("tiny", 20, 60, 4),
    at_once=(2,),
    concurrent=("tiny", 10, 4, 3),
    prefix=(30, 4),
    operations=("tiny", (1, 16), (20, 100)),
    first_words=(first_words.Point("tiny", 30, 1),),
    first_memory=(),
)
PROMPT = prompt_of(40)
WITHOUT_ROWS = {"branches", "memory", "growth", "operations", "servers", "start_up"}
"""Comparisons that add only targets and figures. Most of them start processes."""


def greedy(member, tokens):
    return run_generate((member,), [member.encode(PROMPT)], [tokens])


@pytest.mark.quick
@pytest.mark.parametrize("ensemble", [UniTE, GaC])
def test_a_token_by_token_ensemble_of_one_is_greedy(ensemble):
    for member in embedded():
        alone = greedy(member, 12)
        run = ensemble((member,)).run(PROMPT, len(alone.text.encode()))
        assert run.text == alone.text
        assert run.passes == alone.passes
        assert run.processed == alone.processed


@pytest.mark.parametrize("ensemble", [UniTE, GaC])
def test_a_token_by_token_ensemble_reads_each_token_once(ensemble):
    members = embedded()
    run = ensemble(members).run(PROMPT, 30)
    assert len(run.text.encode()) >= 30
    for member in members:
        assert len(set(run.passes.values())) == 1
        assert run.processed[member.name] < run.prompt[member.name] + run.tokens[member.name]
        spoken = member.encode(PROMPT + run.text)
        assert member.tokenizer.decode(spoken).endswith(run.text)


@pytest.mark.parametrize(("ensemble", "strategy"), [(UniTE, peers.UniTE()), (GaC, peers.GaC())])
def test_the_engines_strategies_write_what_these_ensembles_write(ensemble, strategy):
    """Where both have the members read the same tokens: the engine takes those that a member itself
    would go on with, these take one encoding per text. So the prompts end within a sentence: after
    one come line breaks, which are cut in several ways.
    """
    members = embedded(2)
    backends = [member.backend for member in members]
    with AdaFuseEngine(backends, strategy=strategy) as engine:
        for seed in range(2):
            prompt = prompt_of(40, seed).rsplit(" ", 1)[0]
            written = engine.generate(prompt, max_new_tokens=30).text
            assert len(written) > 40
            assert ensemble(members).run(prompt, len(written.encode())).text.startswith(written)


@pytest.mark.quick
def test_the_papers_loop_with_one_member_says_its_greedy_words():
    member = embedded()[0]
    words = PaperLoop((member,), branches=1).run(PROMPT, 3).text.split()
    assert words == greedy(member, 40).text.split()[: len(words)]


def test_the_papers_loop_reads_the_prompt_again_and_again():
    members = embedded()
    once = sum(len(member.encode(PROMPT)) for member in members)
    narrow, wide = (PaperLoop(members, branches).run(PROMPT, 2) for branches in (1, 3))
    assert sum(narrow.processed.values()) > 2 * 4 * once
    assert sum(wide.processed.values()) > sum(narrow.processed.values())


def test_generate_is_as_long_as_it_is_told_to_be():
    for members in (embedded(2, endless=False), random_weights("tiny")):
        run = run_generate(members, [member.encode(PROMPT) for member in members], [5, 7])
        assert list(run.passes.values()) == [5, 7]


def test_scripted_members_say_their_script():
    members = comparisons._scripted("tiny", 400)
    text = " " + prompt_of(30, seed=1)
    lengths = write_script(members, PROMPT, text, (0.0, 0.0, 1.0))
    ids = [member.encode(PROMPT) for member in members]
    assert text.startswith(run_generate(members, ids, [n - 8 for n in lengths]).text)
    write_script(members, PROMPT, text)
    for branches in (1, 3):
        generation = make_engine(members, branching_factor=branches).generate(
            PROMPT, max_new_tokens=min(lengths) - 8
        )
        assert text.startswith(generation.text)
        if branches == 3:
            assert {1, 3} <= {len(each.text.split()) for each in generation.rounds}
            assert any(len(each.candidates) > 1 for each in generation.rounds)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", sorted(comparisons.COMPARISONS.keys() - WITHOUT_ROWS))
def test_every_comparison_runs(name):
    report = Report()
    comparisons.COMPARISONS[name](report, TOY)
    assert report.rows
    assert all(row.seconds and row.bytes for row in report.rows)
    json.dumps(report.as_json())
    assert as_markdown(report, {"machine": "any"})


def test_every_pass_and_token_is_counted_once():
    prompt, response = TOY.base
    with make_engine(embedded(), branching_factor=3, max_new_tokens=response) as engine:
        usage = engine.generate(prompt_of(prompt)).usage
    drafted, plain = (
        passes.prose(1, prompt, response, 3, drafting=drafting) for drafting in (True, False)
    )
    assert drafted.committed == plain.committed == sum(usage.completion_tokens.values())
    assert plain.passes.total() >= drafted.passes.total() > 0
    assert plain.tokens["never needed"] == 0
    assert drafted.tokens.total() > drafted.tokens["committed"] > 0


@pytest.mark.quick
def test_passes_are_counted_for_both_kinds_of_text(monkeypatch):
    counts = passes.Counts(2, Counter(grow=3), Counter(committed=2, asked=1))
    monkeypatch.setattr(passes, "prose", lambda *sizes, **options: counts)
    monkeypatch.setattr(passes, "answers", lambda *sizes, **options: counts)
    report = Report()
    comparisons.branches(report, TOY)
    assert len(report.figures) == 12
    assert "passes 1.500" in report.figures[0][1]
    assert "grow 1.500" in as_markdown(report, {})


def test_memory_is_measured():
    assert memory.growth(10, 20) < 100
    assert memory.peak(30, 2) >= 0
    assert memory.first_span("tiny", 30) >= 0
    assert memory.prefill("tiny", 30) >= 0
    member = embedded()[0]
    assert memory.row_bytes(member.model.config) == 5 * 2 * 192 * 4


@pytest.mark.quick
def test_the_first_span_is_the_engines_and_its_passes_are_repeated():
    members = random_weights("tiny")
    turns = first_words.Turns(members, first_words.Point("tiny", 30, 1, warm=False))
    systems = turns.systems()
    assert set(systems["members' prefill"]().passes.values()) == {1}
    for branches in (1, 3):
        span = systems[f"engine, B = {branches}"]()
        prompt = prompt_of(30, first_words.FIRST_SEED)
        event = next(make_engine(members, branching_factor=branches).stream(prompt))
        assert span.text == event.text
        again = systems[f"prefill and passes as B = {branches}"]()
        assert again.passes == span.passes
        assert max(again.passes.values()) > 1


@pytest.mark.quick
def test_a_part_of_a_start_excludes_the_parts_within_it(monkeypatch):
    now = iter([(3.0, 1.0), (5.0, 2.0), (6.0, 2.5), (10.0, 5.5), (10.5, 6.0)])
    monkeypatch.setattr(start_up, "moment", lambda: start_up.Seconds(*next(now)))
    watch = start_up.Stopwatch(started=1.0)
    with watch.part("weights"), watch.part("tokenizers"):
        pass
    assert watch.parts == {
        start_up.INTERPRETER: (2.0, 1.0),
        start_up.REST: (2.0, 1.0),
        "weights": (1.5, 1.0),
        "tokenizers": (4.0, 3.0),
    }


def test_each_system_is_run_once_before_it_is_timed():
    runs = []

    def system():
        runs.append("x")
        return Outcome("ab", {"m": 2}, {"m": 2}, {"m": 9}, {"m": 5}, {"part": 1.0})

    row = take_turns("c", "p", {"s": system}, 3)["s"]
    assert len(runs) == 4
    assert len(row.seconds) == len(row.parts["part"]) == 3
    assert (row.bytes, row.per_token, row.part("part")) == (2, 2.0, 1.0)


@pytest.mark.quick
def test_the_table_says_which_targets_are_met():
    row = Row("c", "p", "s", (1.0, 3.0, 2.0), Outcome("ab", {"m": 2}, {"m": 2}, {"m": 9}, {"m": 5}))
    targets = [Target("fast", 1.0, 1.1), Target("many", 3.0, 4.0, at_least=True)]
    assert [target.met for target in targets] == [True, False]
    table = as_markdown(Report([row], targets, [("a", "b")]), {"date": "today"})
    assert "| fast | 1 x | ≤ 1.1 x | yes |" in table
    assert "| many | 3 x | ≥ 4 x | **no** |" in table
    assert "2.000 (1.000 to 3.000)" in table


def test_the_command_writes_json_and_markdown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparisons, "QUICK", TOY)
    output, markdown = tmp_path / "speed.json", tmp_path / "speed.md"
    arguments = ["--quick", "--only", "random", "--output", str(output)]
    assert speed([*arguments, "--markdown", str(markdown)]) == 0
    assert {"header", "targets", "figures", "rows"} == set(json.loads(output.read_text()))
    assert markdown.read_text().strip() in capsys.readouterr().out


def test_parts_of_the_real_suite_are_kept(tmp_path, capsys, monkeypatch):
    """The file keeps the parts of earlier runs, and a missed aim is bold."""
    parts = {
        "pair": lambda size: [real.Line("time / sum", "mixture", [0.5, 0.7, 1.6], 0.6)],
        "many": lambda size: [real.Line("throughput", "mixture", [3.0], 3.0, at_least=True)],
    }
    monkeypatch.setattr(real, "PARTS", parts)
    output = tmp_path / "real.json"
    for name in parts:
        assert speed(["--suite", "real", "--only", name, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "| time / sum | mixture | **0.70** | 0.50 to 1.60 | ≤ 0.6 |" in shown.splitlines()
    assert "| throughput | mixture | 3.00 |  | ≥ 3 |" in shown.splitlines()
    assert set(json.loads(output.read_text())) == set(parts)


def test_a_part_of_another_suite_is_refused(capsys):
    with pytest.raises(SystemExit):
        speed(["--suite", "real", "--only", "base"])
    assert "--suite real has no base; it has pair, triple" in capsys.readouterr().err


def test_the_gpu_benchmark_runs_with_toy_members(capsys):
    sizes = ["--prompts", "20", "--response", "6", "--repeats", "1"]
    assert gpu.main(["--tiny", *sizes]) == 0
    assert "least time to read the weights" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_the_engine_reads_the_prompt_once():
    members = embedded()
    for branches in (1, 3):
        assert comparisons._prompt_readings(members, PROMPT, branches) == 1.0
    run = run_engine(make_engine(members), PROMPT, 8)
    assert run.parts["per word"] >= 0


def test_the_skills_benchmark_asks_the_questions_that_ship():
    shipped = heldout_questions()
    chosen = embedded_skills.choose_questions(300, seed=1, n_passages=3)
    assert {(each.text, each.passages) for each in chosen} == {
        (each.question, each.passages) for each in shipped
    }
    skills = list(dict.fromkeys(each.group for each in chosen))
    assert [each.group for each in chosen] == [skill for skill in skills for _ in range(300)]
    other = embedded_skills.choose_questions(2, seed=2, n_passages=3)
    assert not {each.text for each in other} & {each.text for each in chosen}


def test_the_skills_benchmark_says_how_many_questions_there_are(capsys):
    assert embedded_skills.main(["--per-skill", "301"]) == 2
    assert "the package has 1800 held-out questions" in capsys.readouterr().err


def test_s12_the_prefix_cache_does_not_change_the_tokens_per_word():
    def row(**cost):
        costs = {name: {"a": number} for name, number in cost.items()}
        return {"system": "ensemble", "skill": "dates", "right": True, "words": 5, **costs}

    without = row(forward_passes=9, tokens_processed=320, prompt_tokens=300, cached_tokens=0)
    cached = row(forward_passes=9, tokens_processed=30, prompt_tokens=300, cached_tokens=290)
    alone = {**without, "system": "a"}
    for answers in ([without, without], [without, cached], [cached, cached]):
        results = [{**each, "rounds": 2} for each in (*answers, alone)]
        cost = embedded_skills.summarize(results, ["a"])["cost"]["a"]
        assert cost["tokens_per_word"] == 20 / 5
        assert cost["forward_passes_per_word"] == 9 / 5
        assert cost["prompt_tokens_per_question"] == 300


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_short_soak_finds_nothing(monkeypatch, capsys):
    monkeypatch.setattr(soak, "EVENTS", 20)
    assert soak.main(["--minutes", "0.3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"]["whole"] > 20
    assert not found["examples"]
