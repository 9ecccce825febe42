"""LangChain's tests run without a network; two scripted members answer them."""

import pytest
import pytest_socket

from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
from tests.support.instruction_follower import answer
from tests.support.scripted import scripted_engine


@pytest.fixture(autouse=True)
def _offline():
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


@pytest.fixture(scope="session")
def obliging():
    with scripted_engine(answer) as engine:
        yield engine


@pytest.fixture
def chat(obliging):
    return ChatAdaFuse(engine=obliging)


@pytest.fixture
def llm(obliging):
    return AdaFuseLLM(engine=obliging)


@pytest.fixture(params=[AdaFuseLLM, ChatAdaFuse])
def kind(request):
    return request.param


@pytest.fixture
def model(kind, obliging):
    return kind(engine=obliging)
