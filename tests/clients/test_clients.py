"""Clients with many dependencies, each as a program of its own against a server.

``make test-clients`` installs the clients in an environment of their own, `ENVIRONMENT`, so that
their versions do not bind ours.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from adafuse_llm.serving import create_app
from tests.support.deciding import deciding_engine
from tests.support.paths import ROOT
from tests.support.scripted import scripted_engine
from tests.support.serving import CALL, served

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("ADAFUSE_CLIENTS", ".venv-clients")).absolute()
SECONDS = 240


PRICE = '{"florins": 4}'
ANSWERS = {
    "Hello!": "Good day.",
    "31 * 44?": CALL,
    "1364": "It is 1364.",
    "price?": PRICE,
    "How many pens?": "Pens",
    "7 pens": "There are seven.",
}
"""Replies to prompts, by what comes last in the prompt."""

COUNT = {"command": "echo $((3 + 4)) pens", "description": "Count", "is_background": False}
COMMANDS = {"exec_command": {"cmd": COUNT["command"]}, "run_shell_command": COUNT, "bash": COUNT}
"""The tools of coding agents that run a command, with arguments."""

AGENTS = {
    "codex": "exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check",
    "opencode": "run",
    "pi": "--model adafuse/adafuse -p",
    "qwen": "--auth-type openai --yolo",
}
"""Coding agents, with what makes them answer one question."""

FILES = ("config.toml", "opencode.json", "models.json", "environment")
"""The files that the guide shows for them, in its order."""

OFFLINE = "PI_OFFLINE OPENCODE_DISABLE_AUTOUPDATE OPENCODE_DISABLE_MODELS_FETCH"
HOMES = "HOME PWD CODEX_HOME PI_CODING_AGENT_DIR XDG_CONFIG_HOME XDG_DATA_HOME XDG_CACHE_HOME"
"""Variables that keep them from other servers, and from the files of the person who tests."""


def reply(prompt):
    last = max(ANSWERS, key=prompt.rfind)
    tool = next((name for name in COMMANDS if f'"{name}"' in prompt), None)
    if last == "How many pens?" and tool:
        call = json.dumps({"name": tool, "arguments": COMMANDS[tool]})
        return f"<tool_call>\n{call}\n</tool_call>"
    return ANSWERS[last]


@pytest.fixture(scope="module")
def address():
    with scripted_engine(reply, window=65_536) as engine, served(create_app(engine)) as url:
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
def test_clients_in_python(address, program):
    run(ENVIRONMENT / "bin" / "python", HERE / program, address)


def test_typed_questions_of_openais_client():
    python = ENVIRONMENT / "bin" / "python"
    if subprocess.run(
        [python, "-c", "import openai; openai.OpenAI.decisions"], check=False
    ).returncode:
        pytest.skip("openai 3.57 or later is not installed")
    with served(create_app(deciding_engine())) as url:
        run(python, HERE / "openai_decisions.py", url)


def test_the_ai_sdk_of_vercel(address):
    modules = ENVIRONMENT / "node"
    if shutil.which("node") is None or not (modules / "node_modules").is_dir():
        pytest.skip("Node or the packages of the AI SDK are not installed")
    program = shutil.copy(HERE / "ai_sdk.mjs", modules)
    run("node", program, address)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_coding_agent_runs_a_command_with_the_settings_of_the_guide(address, agent, tmp_path):
    program = ENVIRONMENT / "node" / "node_modules" / ".bin" / agent
    if not program.exists():
        pytest.skip("Node or the coding agents are not installed")
    guide = (ROOT / "docs" / "guides" / "coding-agents.md").read_text(encoding="utf-8")
    blocks = guide.split("```")[1::2]
    place = [*AGENTS].index(agent)
    _, _, shown = blocks[place].replace("http://127.0.0.1:8000", address).partition("\n")
    (tmp_path / FILES[place]).write_text(shown, encoding="utf-8")
    done = subprocess.run(
        [program, *AGENTS[agent].split(), "How many pens?"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env={
            **os.environ,
            **dict.fromkeys(OFFLINE.split(), "1"),
            **dict.fromkeys(HOMES.split(), str(tmp_path)),
            **dict(re.findall(r"(OPENAI_\w+)=(\S+)", shown)),
        },
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There are seven." in done.stdout
