"""One engine of the embedded members, its servers, and OpenAI's client."""

from collections.abc import Iterator

import openai
import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import ServingConfig, create_app
from tests.support.serving import served


@pytest.fixture(scope="session")
def engine() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine.from_embedded() as made:
        yield made


@pytest.fixture(scope="session")
def address(engine: AdaFuseEngine) -> Iterator[str]:
    limits = ServingConfig(max_output_tokens=400, max_choices=4)
    with served(create_app(engine, limits)) as url:
        yield url


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made
