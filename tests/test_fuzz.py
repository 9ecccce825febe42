"""Some random cases of every kind; ``python -m benchmarks.fuzz`` checks a hundred thousand."""

import pytest

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
