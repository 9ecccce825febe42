"""A server among clients that send grammars to kill, block or fill it."""

from __future__ import annotations

import math
import sys
import threading
import time

import httpx
import pytest

pytest.importorskip("starlette", reason="needs the extra [serve]")
pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving.app import build_app
from adafuse_llm.serving.service import Service
from adafuse_llm.serving_config import ServingConfig
from adafuse_llm.text import isolation
from benchmarks import fuzz_grammars
from tests.support.hostile import SCHEMAS, SWELLING, chain
from tests.support.models import Recipe, backend
from tests.support.serving import served

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")


@pytest.mark.slow
def test_hostile_requests_harm_nobody() -> None:
    cases = 30
    report = fuzz_grammars.run(range(cases), 3, 3, alone=cases // 5)
    assert report.is_good, report.faults
    assert report.outcomes.total() == cases
    assert report.outcomes["400"] > cases // 10
    assert report.outcomes["200"] > cases // 10
    assert sum(map(len, report.beside)) > cases // 10
    assert not math.isnan(report.memory[-1])


def test_slow_grammars_do_not_hold_up_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slow trials run and wait; a chat is answered, and so is a request with a quick grammar."""
    monkeypatch.setattr(isolation, "MAX_WAIT_SECONDS", 500.0)  # also if the machine is busy
    engine = AdaFuseEngine([backend(Recipe("llama", "bytelevel", seed=1, layers=1))])
    service = Service(ServingConfig())
    service.open(engine)
    with engine, served(build_app(service, [])) as url:

        def post(**fields: object) -> httpx.Response:
            body = {"model": "adafuse", "prompt": "the", "max_tokens": 2, **fields}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=500)

        def refused(number: int) -> None:
            regex = SWELLING[0].replace("20", str(20 + number))
            statuses.append(post(adafuse={"regex": regex}).status_code)

        assert post(adafuse={"regex": "[a-c]+"}).status_code == 200
        statuses: list[int] = []
        threads = [threading.Thread(target=refused, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        assert post().status_code == 200
        assert post(adafuse={"regex": "[a-d]+"}).status_code == 200
        assert time.monotonic() - began < 4
        assert len(statuses) < len(threads)
        chained = post(adafuse={"json_schema": chain(SCHEMAS["references"], 1_200)})
        assert chained.status_code == 400
        assert "crashes" in chained.json()["error"]["message"]
        for thread in threads:
            thread.join()
        assert statuses == [400] * len(threads)
