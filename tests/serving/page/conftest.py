"""The page of the server, in a tab of a browser."""

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("playwright")

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.serving import create_app
from tests.support.chat_page import MEMBERS, Front, Tab, Writer
from tests.support.serving import served


@pytest.fixture(scope="module")
def members() -> list[Writer]:
    return [Writer(name) for name in MEMBERS]


@pytest.fixture(scope="module")
def engine(members) -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine(members, AdaFuseConfig(max_words=1, max_new_tokens=2000)) as made:
        yield made


@pytest.fixture(scope="module")
def site(engine) -> Iterator[tuple[Front, str]]:
    front = Front(create_app(engine))
    with served(front) as address:
        yield front, f"{address}/"


@pytest.fixture
def front(site, engine, members) -> Iterator[Front]:
    yield site[0]
    site[0].app = create_app(engine)
    for member in members:
        member.reset()


@pytest.fixture(scope="module")
def tab(browser) -> Tab:
    return Tab(browser.new_context().new_page())


@pytest.fixture
def visit(tab, site, front) -> Iterator[Callable[..., Tab]]:
    """Open the page; afterwards, it has reported no problem, and asked no other server."""

    def opened() -> Tab:
        tab.open(site[1])
        return tab

    yield opened
    own = site[1], "data:", "about:"
    elsewhere = {each for each in tab.addresses if not each.startswith(own)}
    tab.leave()
    assert elsewhere == set()
    network = "Failed to load resource"  # refusals and cut connections, which tests want
    assert [each for each in tab.problems if network not in each] == []
