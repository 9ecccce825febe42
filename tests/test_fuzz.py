"""Some random cases of every kind; ``python -m benchmarks.fuzz`` checks a hundred thousand."""

from __future__ import annotations

import pytest

from benchmarks import fuzz as command
from tests.support import fuzz

CASES = 6
MODEL_CASES = 1


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_random_cases_violate_nothing(kind: str) -> None:
    tally = fuzz.run(1, range(CASES), kinds=[kind], model_share=0.0)
    tally.add(fuzz.run(2, range(MODEL_CASES), kinds=[kind], model_share=1.0))
    assert tally.cases == {kind: CASES + MODEL_CASES}
    found = "\n".join(f"{each.command}: {each.what}" for each in tally.violations)
    assert not found, f"{len(tally.violations)} of {tally.cases.total()} cases:\n{found}"


@pytest.mark.quick
def test_a_case_is_determined_by_its_seed_and_number() -> None:
    first, again, other = (fuzz.make_case(5, number) for number in (7, 7, 8))
    assert first == again
    assert first != other
    assert first.chance.random() == again.chance.random()


@pytest.mark.quick
def test_the_command_reports_violations_and_how_to_repeat_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(case: fuzz.Case) -> None:
        assert case.number != 13, "it is the thirteenth"

    monkeypatch.setattr(fuzz, "check", check)
    assert command.main(["--cases", "13", "--seed", "4"]) == 0
    assert command.main(["--cases", "20", "--seed", "4"]) == 1
    shown = capsys.readouterr().out
    assert "python -m benchmarks.fuzz --seed 4 --case 13" in shown
    assert "it is the thirteenth" in shown
    assert command.main(["--case", "13", "--seed", "4"]) == 1
    assert command.main(["--case", "14", "--seed", "4"]) == 0
