"""Load a server with many clients that stream at once, and check every text.

    python -m benchmarks.serving                          # 64 clients for 60 seconds
    python -m benchmarks.serving --clients 8 --seconds 5 --output serving.json

The benchmark starts ``adafuse serve`` with the embedded members in a process of its own, on the
loopback interface. Half of the requests are questions about the handbook, with passages; the others
continue passages. It first sends every request once, one at a time. Then each client sends one
random request after the other and reads the response as a stream. One request in ten leaves after
one of its spans.

Every response must be the same as the one that was asked for alone, and what a client has read
before it left must be the beginning of that response. No request may be lost: each one ends
with ``[DONE]``, or is one that left. The benchmark prints the time to the first text and to the end
(p50 and p95), the responses per second, and the resident memory of the server during the run. It
exits with 1 if a text differs, or a request is lost or left running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from adafuse_llm.documents import Retriever, question_messages, read_documents
from adafuse_llm.embedded import handbook_path, handbook_questions
from tests.support.serving import server_process

QUESTIONS = 40
LEAVING = 0.1
"""Share of the requests that leave before the end."""
MAX_TOKENS = 48
SAMPLES = 20
"""Number of times that memory is measured."""


@dataclass
class Load:
    """What the clients saw.

    Attributes:
        counts: number of requests by what became of them.
        first: seconds to the first text of each request.
        whole: seconds to the end of each request that stayed.
        memory: resident bytes of the server, at equal intervals.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """A request: its path and its body."""

    path: str
    body: dict[str, Any]


def requests_of_the_handbook() -> list[Asked]:
    """Return questions with the passages that were found for them, and passages to continue."""
    passages = read_documents([handbook_path()])
    index = Retriever(passages)
    options = {"max_tokens": MAX_TOKENS, "stream": True}
    questions = [each.question for each in handbook_questions()][:QUESTIONS]
    return [
        *(
            Asked(
                "/v1/chat/completions",
                {"messages": question_messages(question, index.search(question)), **options},
            )
            for question in questions
        ),
        *(
            Asked("/v1/completions", {"prompt": " ".join(passage.text.split()[:40]), **options})
            for passage in passages[:QUESTIONS]
        ),
    ]


async def spans(client: httpx.AsyncClient, asked: Asked) -> AsyncGenerator[str, None]:
    """Yield the texts of a streamed response, and then ``[DONE]``.

    Raises:
        RuntimeError: the server answers with an error, or the stream ends early.
    """
    async with client.stream("POST", asked.path, json=asked.body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                yield data
                return
            if data:
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RuntimeError(data)
                (choice,) = chunk["choices"]
                yield choice["text"] if "text" in choice else choice["delta"].get("content", "")
    raise RuntimeError("the stream ended without [DONE]")


async def one_request(
    client: httpx.AsyncClient,
    asked: Asked,
    expected: str,
    load: Load,
    *,
    leaves_after: int | None,
) -> None:
    """Send one request, and note what became of it."""
    began = time.perf_counter()
    text, parts = "", spans(client, asked)
    number = 0
    try:
        async for part in parts:
            if part == "[DONE]":
                load.whole.append(time.perf_counter() - began)
                load.counts["same" if text == expected else "different"] += 1
                return
            if part and not text:
                load.first.append(time.perf_counter() - began)
            text += part
            number += bool(part)
            if number == leaves_after:
                load.counts["left" if expected.startswith(text) else "different"] += 1
                return
    except (RuntimeError, httpx.HTTPError) as error:
        load.counts["lost"] += 1
        print(f"lost: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        await parts.aclose()


async def run(
    address: str, process: psutil.Process, clients: int, seconds: float, seed: int
) -> Load:
    """Ask every question alone, then with many clients at once."""
    asked, load = requests_of_the_handbook(), Load()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120) as client:
        alone = []
        for each in asked:
            texts = [part async for part in spans(client, each)]
            alone.append([text for text in texts[:-1] if text])
        end = time.monotonic() + seconds

        async def one_client(number: int) -> None:
            draw = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                chosen = draw.randrange(len(asked))
                expected = alone[chosen]
                leaves = draw.randint(1, len(expected)) if draw.random() < LEAVING else None
                await one_request(
                    client, asked[chosen], "".join(expected), load, leaves_after=leaves
                )

        async def watch() -> None:
            while time.monotonic() < end:
                load.memory.append(process.memory_info().rss)
                await asyncio.sleep(seconds / SAMPLES)

        await asyncio.gather(watch(), *(one_client(number) for number in range(clients)))
        load.counts["left running"] = await _running(client)
    return load


async def _running(client: httpx.AsyncClient) -> int:
    """Return the number of requests that the server still decodes, after a moment."""
    count = 0
    for _ in range(50):
        page = (await client.get("/metrics")).text
        found = re.search(r"^adafuse_requests_running ([\d.]+)$", page, re.MULTILINE)
        assert found is not None, "the server counts the requests that run"
        count = round(float(found[1]))
        if count == 0:
            break
        await asyncio.sleep(0.1)
    return count


def figures(load: Load, clients: int, seconds: float) -> dict[str, Any]:
    """Return what the benchmark prints."""
    third = max(len(load.memory) // 3, 1)
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": dict(load.counts),
        "answers_per_second": round(len(load.whole) / seconds, 1),
        "first_text_seconds": _spread(load.first),
        "whole_answer_seconds": _spread(load.whole),
        "memory_megabytes": [round(each / 1e6) for each in load.memory],
        "memory_growth_percent": round(
            100 * (median(load.memory[-third:]) / median(load.memory[third : 2 * third]) - 1), 1
        ),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=20)
    return {"p50": round(cuts[9], 3), "p95": round(cuts[18], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64, help="clients at once")
    parser.add_argument("--seconds", type=float, default=60, help="length of the run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clients' choices")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args()
    with server_process() as (address, process):
        load = asyncio.run(run(address, process, given.clients, given.seconds, given.seed))
    result = figures(load, given.clients, given.seconds)
    text = json.dumps(result, indent=2)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(any(load.counts[bad] for bad in ("different", "lost", "left running")))


if __name__ == "__main__":
    main()
