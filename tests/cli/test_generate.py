"""`adafuse generate`: text, colours, traces, JSON."""

import json
import math
import re

import pytest

from adafuse_llm import AdaFuseEngine, Generation, Round

pytestmark = pytest.mark.quick


def test_the_text_alone_goes_into_a_pipe(adafuse, fakes):
    result = adafuse("generate", "Founder:")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Ada Brook did\n"
    assert result.stderr == ""


def test_the_text_is_what_the_engine_says(adafuse, members, models):
    flags = ["--max-new-tokens", 12, "-o", "branching_factor=2"]
    result = adafuse("generate", "the mill", *members, *flags)
    assert result.exit_code == 0, result.output
    with AdaFuseEngine.from_pretrained(models) as engine:
        whole = engine.generate("the mill", max_new_tokens=12, branching_factor=2)
    assert result.stdout == f"{whole.text}\n"


def test_a_response_that_was_closed_is_said(adafuse, members):
    pytest.importorskip("llguidance")
    result = adafuse(
        "generate", "the mill", *members, "--max-new-tokens", 4, "-o", "regex=[a-z]{2,}"
    )
    assert result.exit_code == 0, result.output
    assert re.fullmatch("[a-z]{2,}\n", result.stdout)
    assert "reached the length limit, so it was completed" in result.stderr
    result = adafuse("generate", "the mill", *members, "-o", "regex=[a-z]")
    assert result.stderr == ""


def test_control_sequences_of_a_model_reach_a_pipe_but_no_terminal(adafuse, fakes, monkeypatch):
    real = AdaFuseEngine.stream

    def stream(*arguments, **options):
        for event in real(*arguments, **options):
            yield event.model_copy(update={"text": f"{event.text}\x1b[2J"})

    monkeypatch.setattr(AdaFuseEngine, "stream", stream)
    assert "\x1b[2J" in adafuse("generate", "x:").stdout
    assert "\x1b[2J" not in adafuse("generate", "x:", env={"FORCE_COLOR": "1"}).stdout


def test_stdin_less_one_newline(adafuse, fakes, monkeypatch):
    seen = []
    real = AdaFuseEngine.stream

    def stream(self, prompt=None, **options):
        seen.append(prompt)
        return real(self, prompt, **options)

    monkeypatch.setattr(AdaFuseEngine, "stream", stream)
    adafuse("generate", "-", input="é\n\nFounder:\n")
    adafuse("generate", "-", input="Founder:\n\n")
    assert seen == ["é\n\nFounder:", "Founder:\n"]


def test_json_gives_each_round_then_the_generation(adafuse, members):
    result = adafuse("generate", "the mill", *members, "--json", "--max-new-tokens", 20)
    *rounds, end = [json.loads(line) for line in result.stdout.splitlines()]
    generation = Generation.model_validate(end["generation"])
    assert generation.finish_reason == "length"
    assert [Round.model_validate(line["round"]) for line in rounds] == list(generation.rounds)


def test_the_trace_shows_what_every_member_thinks_of_every_candidate(adafuse, fakes):
    result = adafuse("generate", "Founder:", "--trace")
    assert result.stdout.count("round ") == 3
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1] == "Ada Brook did"
    brook = next(line for line in lines if '" Brook"' in line)
    assert brook.split() == [">", '"', 'Brook"', "0.223", "0.916", "0.570", "all"]
    assert "● wren   ■ heron" in lines[0]
    assert any("(end)" in line for line in lines)


def test_chat_sends_messages(adafuse, fakes, monkeypatch):
    seen = []
    real = AdaFuseEngine.stream

    def stream(self, **options):
        seen.append(options["messages"])
        return real(self, **options)

    monkeypatch.setattr(AdaFuseEngine, "stream", stream)
    result = adafuse("generate", "Who?", "--chat", "--system", "Be brief.")
    assert result.stdout == "Ada Brook did\n"
    assert seen == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    ]


def test_spans_have_the_colour_of_the_member_that_wins(adafuse, fakes):
    env = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = adafuse("generate", "Founder:", env=env).stdout
    wren, agreed = "\x1b[38;5;74m", "\x1b[1m"
    assert f"{wren}● wren" in shown
    assert f"{wren} Brook\x1b" in shown
    assert f"{agreed} did\x1b" in shown


def test_without_colour_brackets_name_the_winner(adafuse, fakes):
    env = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm-256color"}
    shown = adafuse("generate", "Founder:", env=env).stdout
    assert "w: wren" in shown
    assert " [w:Brook]" in shown
    assert "[w:did]" not in shown


def test_a_page_shows_the_text_and_its_rounds(adafuse, fakes, tmp_path):
    path = tmp_path / "page.html"
    for flags in ([], ["--json"], ["--trace"], ["--chat"]):
        result = adafuse("generate", "Founder <b>:", "--html", path, *flags)
        assert result.exit_code == 0, result.output
        shown = path.read_text()
        path.unlink()
        for part in ("Founder &lt;b&gt;:", "Brook", "■ heron", "Round 0"):
            assert part in shown
    missing = adafuse("generate", "x", "--html", tmp_path / "no" / "x.html")
    assert missing.exit_code == 2
    assert "--html" in missing.stderr


def test_a_choice_shows_the_probability_of_every_text(adafuse, fakes, tmp_path):
    flags = ["--choice", "Ada Brook did", "--choice", "Ada Stone"]
    assert adafuse("generate", "Founder:", *flags).stdout == "Ada Brook did\n"
    shown = adafuse("generate", "Founder:", *flags, "--trace").stdout.splitlines()
    # wren gives Brook 0.8 and Stone 0.2, heron 0.4 and 0.6; everything else is equally likely
    brook, stone = math.sqrt(0.8 * 0.4), math.sqrt(0.2 * 0.6)
    expected = [f"{100 * each / (brook + stone):.1f}" for each in (brook, stone)]
    rows = [line.split() for line in shown if "(end)" in line]
    assert [row[-2] for row in rows] == expected
    page = tmp_path / "page.html"
    adafuse("generate", "Founder:", *flags, "--html", page)
    assert "Probability of each option" in page.read_text()


DRAWN = ("generate", "Founder:", "--temperature", 2, "--seed", 7, "--n", 3)


def test_several_responses_are_shown_below_headings_with_their_seeds(adafuse, fakes):
    result = adafuse(*DRAWN, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    generation = Generation.model_validate(json.loads(line)["generation"])
    responses = [generation, *generation.alternatives]
    assert responses[0].seed == 7
    assert len({each.seed for each in responses}) == 3
    headings = [f"Response {n} of 3 · seed {each.seed}" for n, each in enumerate(responses, 1)]
    shown = "\n\n".join(
        f"{heading}\n{each.text}" for heading, each in zip(headings, responses, strict=True)
    )
    assert adafuse(*DRAWN).stdout == f"{shown}\n"
    trace = adafuse(*DRAWN, "--trace").stdout
    assert [trace.count(heading) for heading in headings] == [1, 1, 1]
    assert trace.count("\nround 0 ") == 3
    env = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "200"}
    terminal = adafuse(*DRAWN, env=env).stdout
    assert terminal.count("forward passes") == 3


def test_a_reply_can_be_begun(adafuse, fakes, monkeypatch):
    seen = []
    real = AdaFuseEngine.stream

    def stream(self, **options):
        seen.append((options["messages"], options.pop("continue_final_message")))
        return real(self, **options)

    monkeypatch.setattr(AdaFuseEngine, "stream", stream)
    adafuse("generate", "Who?", "--chat", "--prefill", "It was ")
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was "}]
    assert seen == [(turns, True)]
    refused = adafuse("generate", "x:", "--prefill", "y")
    assert refused.exit_code == 2
    assert "--prefill needs --chat" in refused.stderr


def test_reasoning_is_apart_from_the_answer(adafuse, fakes, monkeypatch, tmp_path):
    real = AdaFuseEngine.stream

    def stream(*arguments, **options):
        for event in real(*arguments, **options):
            text = event.text.replace("Ada Brook", "Ada</think>Brook").replace("Ada", "Ada</think>")
            generation = event.generation and event.generation.model_copy(
                update={"text": "Ada</think> Brook did", "reply_prefix": "<think>"}
            )
            change = {"text": text, "generation": generation, "reply_prefix": "<think>"}
            yield event.model_copy(update=change)

    monkeypatch.setattr(AdaFuseEngine, "stream", stream)
    assert adafuse("generate", "Founder:").stdout == "Ada</think> Brook did\n"
    env = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = adafuse("generate", "Founder:", env=env).stdout
    assert "\x1b[2;3mAda</think>\x1b[0m" in shown
    assert "\x1b[2;3m Brook" not in shown
    told = json.loads(adafuse("generate", "Founder:", "--json").stdout.splitlines()[-1])
    assert (told["reasoning"], told["answer"]) == ("Ada", "Brook did")
