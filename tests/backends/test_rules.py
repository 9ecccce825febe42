"""All members keep the rules of `BackendTests`, and each fault fails the test of its rule."""

import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adafuse_llm.backends import FakeBackend, Next, TokenTree
from adafuse_llm.backends.fake import END, FakeCodec
from adafuse_llm.backends.llamacpp import backend as llamacpp
from adafuse_llm.backends.llamacpp import context
from adafuse_llm.backends.logits import backend as logits_backend
from adafuse_llm.testing import BackendTests
from tests.backends import gguf_members
from tests.support.compare import SINGLE_TOLERANCE, TOLERANCE
from tests.support.inference_servers import APIS, InferenceServer
from tests.support.models import Recipe, backend, model, reference, tokenizer
from tests.support.paths import ROOT

VOCABULARY = (*string.ascii_letters, *" .,:\n<>/|_", "the", " and", "er")


def rule(text: str) -> dict[str, float]:
    chance = random.Random(text[-40:])
    weights = {token: chance.random() ** 4 for token in (END, *VOCABULARY)}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


FAKE = FakeBackend("fake", rule, VOCABULARY, is_complete=True)


class OfFakes(BackendTests):
    texts = ("The ferry to orrin leaves at nine", " and the post.", "\n  two, ", "a", " ")
    odd_texts = ()
    kind: type[FakeBackend] = FakeBackend
    window: int | None = None

    def member(self) -> FakeBackend:
        return self.kind("fake", rule, VOCABULARY, self.window, is_complete=True)

    def logits(self, ids: Sequence[int]) -> Any:
        tree = TokenTree(ids)
        return [p for _, p in sorted(FAKE._after(tree, tree.root).items())]


def remembering(key: Callable[[TokenTree, Sequence[int]], Any]) -> type[FakeBackend]:
    """A backend that remembers its distributions by a key of the tree and the path to a node."""

    class Remembering(FakeBackend):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.known: dict[Any, dict[int, float]] = {}

        def _after(self, tree, node):
            right = super()._after(tree, node)
            if tree.adjustment is not None:
                return right
            return self.known.setdefault(key(tree, tree.tokens(node)), right)

    return Remembering


ByAllTokens = remembering(lambda tree, path: (*tree.ids, *path))


class TestFakes(OfFakes):
    window = 4


class TestCachingWithoutLogits(OfFakes):
    kind = ByAllTokens

    def logits(self, ids: Sequence[int]) -> Any:
        return None


class TestTreeOfAModel(BackendTests):
    recipe = Recipe("llama", "bytelevel", seed=71)
    tolerance = TOLERANCE
    steps = 30

    def member(self) -> Any:
        return backend(self.recipe)

    def logits(self, ids: Sequence[int]) -> Any:
        return reference(self.recipe).logits(ids)


class TestScoresInParts(TestTreeOfAModel):
    """Texts are scored two tokens at a time, and the logits in between are dropped."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logits_backend, "PART_BYTES", 1)
        monkeypatch.setattr(logits_backend, "MIN_PART", 2)


class TestPathsOfAModel(TestTreeOfAModel):
    recipe = Recipe("mamba", "sentencepiece", seed=72, layers=1)
    tolerance = SINGLE_TOLERANCE


@pytest.mark.gguf
class TestGGUF(BackendTests):
    tolerance = gguf_members.TOLERANCE
    steps = 20

    def member(self) -> Any:
        return gguf_members.members()[0]

    def logits(self, ids: Sequence[int]) -> Any:
        return gguf_members.plain_logits("wren", ids)


@pytest.mark.gguf
class TestGGUFWithoutRoom(TestGGUF):
    """Requests lose their cells to each other, and go on."""

    @pytest.fixture(autouse=True)
    def _narrow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "MAX_SEQUENCES", 16)
        monkeypatch.setattr(llamacpp, "PART_NODES", 4)

    def member(self) -> Any:
        return gguf_members.gguf(context=256)


class TestServers(BackendTests):
    steps = 15

    @pytest.fixture(autouse=True, params=APIS)
    def _served(self, request: pytest.FixtureRequest, load: Any) -> Iterator[None]:
        self.server = InferenceServer(request.param)
        self.loaded = load(self.server)
        yield
        self.loaded.close()

    def member(self) -> Any:
        return self.loaded

    def logits(self, ids: Sequence[int]) -> Any:
        return self.server.logprobs(ids).tolist()


class KeepsStateAfterFailures(ByAllTokens):  # type: ignore[misc, valid-type]
    known: dict[Any, dict[int, float]]

    def evaluate(self, queries):
        try:
            return super().evaluate(queries)
        except IndexError:
            self.known = dict.fromkeys(self.known, dict.fromkeys(range(len(VOCABULARY) + 1), -4.0))
            raise


class NeverFrees(FakeBackend):
    def release(self, tree):
        super().release(tree)
        self.last = tree


def changing(change: Callable[[Next], dict[str, Any]]) -> type[FakeBackend]:
    class Changing(FakeBackend):
        def evaluate(self, queries):
            return [
                replace(each, next=tuple(replace(right, **change(right)) for right in each.next))
                for each in super().evaluate(queries)
            ]

    return Changing


class ReadsControlTokens(FakeCodec):
    def encode_continuation(self, context, text):
        first, *others = text.split(END)
        ids = super().encode_continuation(context, first)[0]
        for other in others:
            ids += [self.end_id, *super().encode_continuation(context, other)[0]]
        return ids, True


class WritesControlTokens(FakeBackend):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.codec = ReadsControlTokens(VOCABULARY, is_complete=True)


class OtherTexts(FakeCodec):
    def token_text(self, token):
        return "other"


class KnowsOtherTexts(FakeBackend):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.codec = OtherTexts(VOCABULARY, is_complete=True)


class HasNoMethod(FakeBackend):
    evaluate = property()  # raises AttributeError


FAULTS: dict[str, tuple[type[FakeBackend], str, str]] = {
    "state after commits": (remembering(lambda tree, path: (id(tree), *path)), "walk", "expected"),
    "similar prefixes": (
        remembering(lambda tree, path: (*tree.ids, *path)[:-1]),
        "walk",
        "expected",
    ),
    "end": (changing(lambda _: {"end_logprob": -1.0}), "walk", "end_logprob"),
    "state after failures": (KeepsStateAfterFailures, "failures", "expected"),
    "references": (NeverFrees, "release", "still refers"),
    "mass": (changing(lambda _: {"mass": 0.0}), "masks", "mass"),
    "word ends": (changing(lambda _: {"word_end_logprob": -1.0}), "masks", "word_end_logprob"),
    "draws": (changing(lambda right: {"drawn": right.tokens[0]}), "draws", "draws are wrong"),
    "control tokens": (WritesControlTokens, "prompts", "ends a response"),
    "texts of tokens": (KnowsOtherTexts, "texts", "token_text"),
    "no method": (HasNoMethod, "texts", "has no evaluate"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_the_test_of_its_rule(name: str) -> None:
    class Tests(OfFakes):
        kind = FAULTS[name][0]

    with pytest.raises(AssertionError, match=FAULTS[name][2]):
        getattr(Tests(), f"test_{FAULTS[name][1]}")()


def test_the_member_in_contributing_passes(tmp_path: Path, monkeypatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    recipe = Recipe("llama", "bytelevel", seed=71, layers=1)
    tokenizer(recipe.kind).save_pretrained(tmp_path / "path/to/model")
    model(recipe).save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    names["TestPlainMember"].steps = 10
    applied = names["TestPlainMember"].check_all()
    assert {"test_walk", "test_texts", "test_draws", "test_adjustments"} <= {*applied}
