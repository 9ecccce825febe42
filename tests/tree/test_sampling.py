"""Requests that draw their responses: several at a time, seeds and refusals."""

from typing import Any

import pytest

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidOptionError
from adafuse_llm.backends import FakeBackend, Node, TokenTree
from adafuse_llm.decoding.draws import Draws
from adafuse_llm.tree.sampling import Sampling, token_codes

pytestmark = pytest.mark.quick

WORDS = (" a", " b", " c", " d", '"')
CHARACTERS = (*filter(str.isprintable, map(chr, range(128))), "\n", "\t")


def rule(text: str) -> dict[str, float]:
    return dict.fromkeys(WORDS, 0.17) | {"<end>": 0.15}


def engine(*names: str, **options: Any) -> AdaFuseEngine:
    members = [
        FakeBackend(name, rule, sorted({*WORDS, *CHARACTERS}), is_complete=True)
        for name in names or ("x", "y")
    ]
    return AdaFuseEngine(members, **options)


@pytest.mark.parametrize("regex", [None, "( [a-d]){1,9}"])
def test_several_responses_are_those_of_their_seeds(regex: str | None) -> None:
    with engine(config=AdaFuseConfig(regex=regex)) as made:
        first = made.generate("Say", temperature=1, seed=3, n=5)
        responses = [first, *first.alternatives]
        assert len({each.seed for each in responses}) == len(responses) == 5
        assert len({each.text for each in responses}) > 1
        for each in responses:
            again = made.generate("Say", temperature=1, seed=each.seed)
            assert (again.text, again.seed, again.alternatives) == (each.text, each.seed, ())
        assert first.seed == 3
        fewer = made.generate("Say", temperature=1, seed=3, n=2)
        assert fewer.alternatives[0].text == first.alternatives[0].text


def test_without_a_seed_every_response_has_a_seed_of_its_own() -> None:
    with engine() as made:
        seeds = {made.generate("Say", temperature=1, max_new_tokens=1).seed for _ in range(5)}
        assert len(seeds) == 5
        assert made.generate("Say", seed=4, max_new_tokens=1).seed is None


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "choices": ["a", "b"]}])
def test_several_responses_that_would_be_the_same_are_refused(options: dict[str, Any]) -> None:
    with engine() as made, pytest.raises(InvalidOptionError, match=r"'n'.*would be the same"):
        made.generate("Say", n=2, **options)


def test_a_score_draws_nothing() -> None:
    config = AdaFuseConfig(temperature=1, seed=1)
    with engine() as made, engine(config=config) as drawing:
        assert made.score("Say", [" a b"]).texts == drawing.score("Say", [" a b"]).texts


# Random numbers that depend on text only


def test_tokens_whose_texts_are_not_known_have_codes_of_their_own() -> None:
    assert len(set(token_codes(None, [0], 7))) == 7


def test_silent_tokens_count_on_after_a_commit() -> None:
    """Two tokens are the first bytes of a character, so the response stays as it is."""
    sampling, tree = Sampling(seed=1, temperature=1.0), TokenTree([1])
    draws = Draws(sampling, tree.root)
    first = tree.child(tree.root, 5)
    second = tree.child(first, 6)

    def shown(node: Node) -> str:
        return "\ufffd"

    places = [sampling.draw("", silent) for silent in range(3)]
    assert [draws.draw(node, shown) for node in (tree.root, first, second)] == places
    draws.commit(first, "\ufffd", shown)
    tree.commit(first)
    assert [draws.draw(node, shown) for node in (first, second)] == places[1:]
