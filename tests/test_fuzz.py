"""Some random cases of every kind; ``python -m benchmarks.fuzz`` checks a hundred thousand."""

import pytest

from benchmarks import fuzz as command
from tests.support import fuzz


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_random_cases_violate_nothing(kind: str) -> None:
    found = {number: fuzz.violation(1, number, kind) for number in range(6)}
    assert found == dict.fromkeys(found, (kind, ""))


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
    def violation(seed: int, number: int) -> tuple[str, str]:
        return "cap", "it is the thirteenth" * (number == 13)

    monkeypatch.setattr(fuzz, "violation", violation)
    assert command.main(["--cases", "13", "--seed", "4"]) == 0
    assert command.main(["--cases", "20", "--seed", "4"]) == 1
    again = "python -m benchmarks.fuzz --seed 4 --case 13"
    assert f"it is the thirteenth\n    {again}" in capsys.readouterr().out
    assert command.main(["--case", "13", "--seed", "4"]) == 1
