"""Set-up of the tests of grammars."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _many_grammars(untried: None) -> None:
    """Try no grammar in a process of its own, because these tests have thousands."""
