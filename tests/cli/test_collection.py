"""Commands pause the garbage collector until their members are loaded."""

import gc

import pytest

from adafuse_llm.cli.collection import pause_collection, resume_collection

pytestmark = pytest.mark.quick


@pytest.fixture
def paused():
    """The collector as it is after the imports of a command."""
    frozen = gc.get_freeze_count()
    pause_collection()
    yield frozen
    gc.enable()
    gc.unfreeze()


def test_a_command_resumes_when_its_members_are_loaded(adafuse, fakes, paused):
    assert adafuse("generate", "Founder:").exit_code == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() > paused


def test_a_running_collector_stays_as_it_is():
    frozen = gc.get_freeze_count()
    resume_collection()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
