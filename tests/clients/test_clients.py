"""Clients with many dependencies, each as a program of its own against a server.

``make test-clients`` installs the clients in an environment of their own, `ENVIRONMENT`, so that
their versions do not bind ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from adafuse_llm.serving import create_app
from tests.support.scripted import scripted_engine
from tests.support.serving import served

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("ADAFUSE_CLIENTS", ".venv-clients")).absolute()
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "31 * 44"}}\n</tool_call>'
SECONDS = 240


PRICE = '{"florins": 4}'
ANSWERS = {"Hello!": "Good day.", "31 * 44?": CALL, "1364": "It is 1364.", "price?": PRICE}
"""Replies to prompts, by what comes last in the prompt."""


def reply(prompt):
    return ANSWERS[max(ANSWERS, key=prompt.rfind)]


@pytest.fixture(scope="module")
def address():
    with scripted_engine(reply) as engine, served(create_app(engine)) as url:
        yield url


def run(*command):
    """Run a program, which prints ``done`` at its end."""
    environment = {**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.parametrize("program", ["litellm_calls.py", "openai_agents.py"])
def test_r3_v11_clients_in_python(address, program):
    run(ENVIRONMENT / "bin" / "python", HERE / program, address)


def test_r3_v11_the_ai_sdk_of_vercel(address):
    modules = ENVIRONMENT / "node"
    if shutil.which("node") is None or not (modules / "node_modules").is_dir():
        pytest.skip("Node or the packages of the AI SDK are not installed")
    program = shutil.copy(HERE / "ai_sdk.mjs", modules)
    run("node", program, address)
