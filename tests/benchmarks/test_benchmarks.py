"""The benchmarks run at toy sizes. Nothing is timed here."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from adafuse_llm.embedded.tools import TOOLS
from adafuse_llm.results import Generation, Usage
from benchmarks import confidence, embedded, gpu, soak
from benchmarks.speed.__main__ import main as speed
from benchmarks.speed.comparisons import COMPARISONS, pass_cost
from benchmarks.speed.measure import Cost, Counts, Line, table
from training.dialogues import FORMS, Form, turns_of


@pytest.mark.slow
def test_all_comparisons_run_and_the_file_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, markdown = tmp_path / "speed.json", tmp_path / "speed.md"
    files = ["--output", str(output), "--markdown", str(markdown)]
    for name in COMPARISONS:
        assert speed(["--quick", "--only", name, *files]) == 0
    assert set(json.loads(output.read_text())) == {f"embedded: {name}" for name in COMPARISONS}
    shown = markdown.read_text()
    assert "| wren + heron + finch: CPU time / sum of `generate()` | mixture |" in shown
    assert shown.strip() in capsys.readouterr().out


@pytest.mark.quick
def test_costs_are_per_byte_and_lines_are_medians() -> None:
    assert Cost(3.0, 6.0, Counts(12)).per_byte == 0.25
    lines = [Line("time", "one", [0.5, 0.75, 1.5]), Line("time", "other", [2.0])]
    assert table(lines).splitlines()[2:] == [
        "| time | one | 0.75 | 0.50 to 1.50 |",
        "| time | other | 2.00 |  |",
    ]


@pytest.mark.quick
def test_a_further_token_adds_its_share_of_a_pass_by_size_and_prompts_are_free() -> None:
    usage = Usage(
        prompt_tokens={"one": 8, "two": 9},
        completion_tokens={"one": 5, "two": 5},
        forward_passes={"one": 10, "two": 4},
        tokens_processed={"one": 30, "two": 13},
        cached_tokens={"one": 0, "two": 0},
    )
    answer = Generation(text="12345678", rounds=(), finish_reason="stop", usage=usage)
    assert pass_cost(answer, {"one": 1, "two": 10}, 0.5) == (10 + 0.5 * 12 + 10 * 4) / 8


@pytest.mark.slow
def test_the_gpu_benchmark_runs_with_toy_members(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--tiny", "--prompts", "1", "--response", "6", "--repeats", "1"]) == 0
    assert "least time to read the weights" in capsys.readouterr().out


@pytest.mark.slow
def test_the_benchmark_of_the_confidence_fits_on_other_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--fit", "60", "--limit", "60"]
    assert confidence.main([*sizes, "--signals", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "fitted on 60, measured on 60" in shown
    assert "| wren alone | 81.7 [" in shown
    assert shown.count("| ensemble: ") == 6


class Scripted:
    """Gives the expected replies, except in turn `fails` of each case."""

    def __init__(self, form: Form, fails: int | None = None) -> None:
        self.replies = {
            str(messages): "no" if number == fails else text
            for case in embedded.heldout_cases(8)
            for number, (messages, text) in enumerate(turns_of(case, form, TOOLS))
        }

    def generate(self, messages: object, max_new_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(text=self.replies[str(messages)])


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_a_case_succeeds_if_all_its_turns_are_right(form: Form) -> None:
    engines = {name: Scripted(form) for name in embedded.SYSTEMS}
    engines["finch"] = Scripted(form, fails=1)
    asked = [job for job in embedded.jobs(0, 8) if job[0] == form]
    shown = embedded.tables([embedded.judge(engines, job) for job in asked])
    assert "| none | 100.0 | 100.0 | 100.0 | 100.0 |" in shown
    assert shown.endswith("| all | 100.0 | 100.0 | 25.0 | 100.0 |")


@pytest.mark.slow
def test_a_short_soak_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "0.3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"]["whole"] > 20
    assert not found["examples"]
