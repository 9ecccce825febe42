"""Compare members on real inference servers with the same checkpoints in this process.

The servers are vLLM, from the environment of ``make test-vllm``, and the llama-server in the
package xllamacpp. They run on this machine, one after the other. What is not installed is not
measured.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.speed.peers import add_up, outcome_of

PROMPTS: Final = (
    "The old lighthouse keeper climbed the stairs and",
    "Water boils at",
    "My favourite food",
)
WAYS: Final = (("adafuse", 1), ("adafuse", 3), ("mixture", 1))
"""Strategies, and values of B."""

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
        with vllm_server(folder) as url:
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
        for strategy, branches in WAYS:
            member = far.backends[0]
            assert isinstance(member, ListsFewTokens), "it is on a server"
            if strategy == "mixture" and not member.tells_word_ends():
                continue
            options = {"max_new_tokens": response, "branching_factor": branches}
            systems: dict[str, System] = {
                name: _answering(AdaFuseEngine(engine.backends, strategy=strategy), options)
                for name, engine in (("in this process", local), (server, far))
            }
            point = f"{strategy}, B = {branches}"
            rows = take_turns("servers", f"{server}, {point}", systems, repeats)
            report.rows += rows.values()
            before = _computed(url)
            with _calls() as counts:
                outcome = systems[server]()
            computed = _computed(url) - before
            committed = sum(outcome.tokens.values())
            per_token = [counts[each] / committed for each in ("calls", "prompts", "tokens")]
            figure = "{:.2f} calls, {:.2f} prompts, {:.1f} tokens in them".format(*per_token)
            if computed:
                figure += f", {computed / committed:.1f} of them computed"
            same = rows["in this process"].outcome.text == rows[server].outcome.text
            figure += f"; {'the same' if same else 'other'} texts"
            report.figures.append((f"{server}, {point}, per committed token", figure))


def _answering(engine: AdaFuseEngine, options: Any) -> Callable[[], Outcome]:
    def run() -> Outcome:
        return add_up([outcome_of(engine.generate(prompt, **options)) for prompt in PROMPTS])

    return run


def _computed(url: str) -> float:
    """Return how many tokens a vLLM has read that were not in its prefix cache; 0 for others."""
    answer = httpx.get(f"{url}/metrics")
    found = _CACHE.findall(answer.text if answer.status_code == 200 else "")
    return sum(float(value) * (1 if name == "queries" else -1) for name, value in found)


@contextmanager
def _calls() -> Iterator[Counter[str]]:
    """Count the calls to servers, their prompts, and the tokens of these prompts."""
    from adafuse_llm.backends.servers.connection import Connection

    counts, lock, post = Counter[str](), threading.Lock(), Connection.post

    def counted(server: Connection, path: str, body: Any) -> Any:
        prompts: Sequence[Sequence[int]] = body["prompt"]
        with lock:
            counts.update(calls=1, prompts=len(prompts), tokens=sum(map(len, prompts)))
        return post(server, path, body)

    with patch.object(Connection, "post", counted):
        yield counts
