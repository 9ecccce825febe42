"""The image of the server: what it copies, and an answer of a container.

The environment variable ``DOCKER`` names the command, such as ``podman``. ``DOCKER_BUILD`` and
``DOCKER_RUN`` have more arguments for its ``build`` and ``run``.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from adafuse_llm.embedded import member_paths
from tests.support.paths import ROOT

DOCKERFILE = ROOT / "Dockerfile"
GUIDE = ROOT / "docs" / "guides" / "docker.md"
DOCKER = os.environ.get("DOCKER", "docker")
IMAGE = "adafuse-test"
BUILD_SECONDS = 1800
START_SECONDS = 120


@pytest.mark.quick
def test_the_builder_gets_all_that_is_copied_and_nothing_else() -> None:
    copies = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    copied = {source for line in copies for source in line.split()[:-1]}
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert copied == {*allowed}
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.quick
def test_the_cache_that_the_guide_mounts_belongs_to_the_user_of_the_image() -> None:
    (folder,) = re.findall(r"--volume adafuse-hub:(\S+?)`", GUIDE.read_text())
    (user,) = re.findall(r"^USER (\w+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert f"--owner={user} --group={user} {folder}" in DOCKERFILE.read_text()


def docker(*arguments: str, seconds: float = 60) -> str:
    done = subprocess.run(
        [DOCKER, *arguments], capture_output=True, text=True, check=False, timeout=seconds
    )
    assert done.returncode == 0, f"{DOCKER} {shlex.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    call = [DOCKER, "info"]
    if (
        not shutil.which(DOCKER)
        or subprocess.run(call, check=False, capture_output=True).returncode
    ):
        pytest.skip(f"{DOCKER} does not run here")
    more = shlex.split(os.environ.get("DOCKER_BUILD", ""))
    docker("build", "--tag", IMAGE, *more, str(ROOT), seconds=BUILD_SECONDS)
    yield IMAGE
    docker("image", "rm", IMAGE)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for path in member_paths()[:2]:
        shutil.copytree(path, tmp_path / path.name)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    return tmp_path


@pytest.mark.docker
@pytest.mark.timeout(BUILD_SECONDS + 4 * START_SECONDS)
def test_a_container_serves_the_models_of_a_volume(image: str, models: Path) -> None:
    names = sorted(path.name for path in models.iterdir())
    flags = [flag for name in names for flag in ("--model", name)]
    port, volume = ("--publish", "127.0.0.1::8000"), ("--volume", f"{models}:/models:ro")
    more = shlex.split(os.environ.get("DOCKER_RUN", ""))
    container = docker("run", "--detach", *port, *volume, *more, image, *flags)
    try:
        until_healthy(container)
        assert docker("exec", container, "id", "-u") == "1000"
        address = docker("port", container, "8000").splitlines()[0]
        with OpenAI(base_url=f"http://{address}/v1", api_key="none") as client:
            assert {each.id for each in client.models.list()} == {"adafuse", *names}
            turns: Any = [{"role": "user", "content": "What is 12 + 7?"}]
            answer = client.chat.completions.create(model="adafuse", messages=turns)
        assert answer.choices[0].message.content == "19"
        start = time.monotonic()
        docker("stop", "--time", "30", container)
        assert time.monotonic() - start < 25
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        docker("rm", "--force", container)


def until_healthy(container: str) -> None:
    check = json.loads(docker("inspect", IMAGE))[0]["Config"]["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    for _ in range(START_SECONDS):
        done = subprocess.run(
            [DOCKER, "exec", container, *check[1:]], capture_output=True, check=False
        )
        if done.returncode == 0:
            return
        time.sleep(1)
    raise AssertionError(docker("logs", container))
