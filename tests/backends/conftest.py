"""Members on servers that run until the end of a test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm import ServerMember
from adafuse_llm.backends.servers.backend import ServerBackend
from adafuse_llm.loading.members import load_members
from tests.support.inference_servers import RECIPE, InferenceServer
from tests.support.models import model, tokenizer
from tests.support.serving import served

Load = Callable[..., ServerBackend]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of `RECIPE`, and the configuration of its model."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer(RECIPE.kind).save_pretrained(path)
    model(RECIPE).config.save_pretrained(path)
    return path


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    """Load the member of a server, which is a server to start or an address."""
    with ExitStack() as stack:

        def load(
            server: InferenceServer | str, source: Path = folder, **settings: Any
        ) -> ServerBackend:
            url = server if isinstance(server, str) else stack.enter_context(served(server.app()))
            settings = {"url": url, "tokenizer": str(source), **settings}
            (loaded,), _ = load_members([ServerMember(**settings)])
            assert isinstance(loaded, ServerBackend)
            stack.callback(loaded.close)
            return loaded

        yield load
