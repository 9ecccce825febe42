"""Compare members on real inference servers with the same checkpoints in this process.

The servers are vLLM, from the environment of ``make test-vllm``, which the environment variable
``ADAFUSE_VLLM`` names, and the llama-server in the package xllamacpp. They run on this machine, one
after the other. What is not installed is not measured.

``python -m docs.generated`` makes a table of the counts in ``docs/results/servers.json``, which
``--output`` wrote.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx

from adafuse_llm import AdaFuseEngine, MemberSpec
from adafuse_llm.backends import ListsFewTokens
from benchmarks.real.members import real_files, real_folders
from benchmarks.speed.measure import Outcome, Report, System, take_turns
from benchmarks.speed.members import prompt_of
from benchmarks.speed.peers import add_up, outcome_of

PROMPTS: Final = 3
PROMPT: Final = 200
"""Number of prompts, and their length in tokens of the embedded members."""

WAYS: Final = (("adafuse", 1), ("adafuse", 3), ("mixture", 1))
"""Strategies, and values of B."""

BLOCK: Final = "32"
"""Tokens of a block of vLLM's cache. The default is 16 on GPUs. CPUs have 128, and at least 32."""

COUNTS: Final = ("calls", "prompts", "tokens in prompts", "tokens computed")
"""What is counted for each committed token."""

_CACHE = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{.*\} (\S+)$", re.MULTILINE)


def compare(report: Report, response: int, repeats: int) -> None:
    """Measure SmolLM2-135M-Instruct on each server that can be started here, and in this process.

    Args:
        report: receives the results.
        response: length of the responses in tokens.
        repeats: timed runs of each system.
    """
    from tests.support.llama_server import llama_server
    from tests.support.vllm_server import ENVIRONMENT, vllm_server

    folder, file = real_folders()["smollm"], real_files()["smollm"]
    if folder.exists() and Path(ENVIRONMENT, "bin", "vllm").exists():
        near = MemberSpec(str(folder), name="smollm", dtype="float32")
        with vllm_server(folder, "--block-size", BLOCK) as url:
            _measure(report, "vLLM, float32", url, near, response, repeats)
    if file.exists() and find_spec("xllamacpp"):
        near = MemberSpec(str(file), name="smollm", context=2048)
        with llama_server(file) as url:
            _measure(report, "llama-server, Q4_1", url, near, response, repeats)
    if not report.rows:
        report.figures.append(
            ("members on servers", "not measured: run make real, and make test-vllm")
        )


def _measure(
    report: Report, server: str, url: str, near: MemberSpec, response: int, repeats: int
) -> None:
    with (
        AdaFuseEngine.from_pretrained([near]) as local,
        AdaFuseEngine.from_pretrained([MemberSpec(url=url, name="smollm")]) as far,
    ):
        for number, (strategy, branches) in enumerate(WAYS):
            member = far.backends[0]
            assert isinstance(member, ListsFewTokens), "it is on a server"
            if strategy == "mixture" and not member.tells_word_ends():
                continue
            options = {"max_new_tokens": response, "branching_factor": branches}
            prompts = [prompt_of(PROMPT, PROMPTS * number + each) for each in range(PROMPTS)]
            systems: dict[str, System] = {
                name: _answering(AdaFuseEngine(each.backends, strategy=strategy), prompts, options)
                for name, each in (("in this process", local), (server, far))
            }
            point = f"{server}, {strategy}, B = {branches}"
            counts = _counts(url, systems[server])  # first, before the caches know the prompts
            report.figures += [(f"{point}: {what}", f"{counts[what]:.1f}") for what in COUNTS]
            rows = take_turns("servers", point, systems, repeats, warm={server})
            report.rows += rows.values()
            same = rows["in this process"].outcome.text == rows[server].outcome.text
            slower = rows[server].median / rows["in this process"].median
            report.figures.append((f"{point}: the same texts", "yes" if same else "no"))
            report.figures.append((f"{point}: time / in this program", f"{slower:.1f}"))


def _answering(
    engine: AdaFuseEngine, prompts: Sequence[str], options: Any
) -> Callable[[], Outcome]:
    def run() -> Outcome:
        return add_up([outcome_of(engine.generate(prompt, **options)) for prompt in prompts])

    return run


def _counts(url: str, system: System) -> Mapping[str, float]:
    """Return `COUNTS` of a run."""
    before = _computed(url)
    with _calls() as counts:
        committed = sum(system().tokens.values())
    counts["tokens computed"] += _computed(url) - before
    return {what: counts[what] / committed for what in COUNTS}


def _computed(url: str) -> int:
    """Return how many tokens a vLLM has read that were not in its prefix cache; 0 for others."""
    answer = httpx.get(f"{url}/metrics")
    found = _CACHE.findall(answer.text if answer.status_code == 200 else "")
    return sum(round(float(value)) * (1 if name == "queries" else -1) for name, value in found)


@contextmanager
def _calls() -> Iterator[Counter[str]]:
    """Count `COUNTS`, but "tokens computed" only as far as answers tell them (llama-server)."""
    from adafuse_llm.backends.servers.connection import Connection

    counts, lock, post = Counter[str](), threading.Lock(), Connection.post

    def counted(server: Connection, path: str, body: Any) -> Any:
        prompts: Sequence[Sequence[int]] = body["prompt"]
        answer = post(server, path, body)
        answers = answer if isinstance(answer, list) else [answer]
        with lock:
            counts.update({"calls": 1, "prompts": len(prompts)})
            counts["tokens in prompts"] += sum(map(len, prompts))
            counts["tokens computed"] += sum(
                each.get("timings", {}).get("prompt_n", 0) for each in answers
            )
        return answer

    with patch.object(Connection, "post", counted):
        yield counts
