"""The reference on real members, which reads long sequences with a cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from adafuse_llm import AdaFuseEngine, Generation, RuntimeConfig
from adafuse_llm.backends import Backend
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.testing import BackendTests
from tests.reference import Options, ReferenceMember, decode
from tests.support.compare import assert_same

TURNS = cycle((True, False))


@dataclass
class CachedMember(ReferenceMember):
    """A reference member that does not read the beginning of a sequence again.

    The cache keeps all tokens in every layer, whatever the layer's window is. The mask of
    transformers hides what is outside the window.
    """

    _cache: Any = field(default=None, repr=False)
    _held: list[int] = field(default_factory=list, repr=False)
    _logprobs: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)
    _spaced: list[int] = field(default_factory=list, repr=False)

    def forward(self, ids: Sequence[int]) -> Any:
        return _Rows(self, ids)

    def row(self, ids: Sequence[int]) -> Any:
        key = tuple(ids)
        if key not in self._rows:
            self._rows[key] = self._next(list(key))
        return self._rows[key]

    def logprobs(self, ids: Sequence[int]) -> Any:
        key = tuple(ids)
        if key not in self._logprobs:
            self._logprobs[key] = super().logprobs(ids)
        return self._logprobs[key]

    def likeliest(
        self, ids: Sequence[int], count: int, allowed: Sequence[int] | None = None
    ) -> list[int]:
        if allowed is not None:
            return super().likeliest(ids, count, allowed)
        row = self.logits(ids)  # sorting a whole row of 262,144 values takes longer than a pass
        (likely,) = np.nonzero(row >= np.partition(row, -count)[-count])
        order = np.argsort(-row[likely], kind="stable")
        return [int(token) for token in likely[order[:count]]]

    def spaced(self) -> Sequence[int]:
        if not self._spaced:  # the texts of 262,144 tokens take long
            before = self.tokenizer.encode("a", add_special_tokens=False)
            every = super().spaced()
            texts = self.tokenizer.batch_decode([[*before, token] for token in every])
            self._spaced = [
                token for token, text in zip(every, texts, strict=True) if text[1:2] == " "
            ]
        return self._spaced

    def _next(self, ids: list[int]) -> Any:
        shared = 0
        while shared < min(len(ids) - 1, len(self._held)) and ids[shared] == self._held[shared]:
            shared += 1
        if self._cache is None:
            self._cache = DynamicCache()
        if shared < len(self._held):
            self._cache.crop(shared - len(self._held))
        self.passes += 1
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([ids[shared:]]),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._held = ids
        return output.logits[0, -1].numpy()

    def forget_rows(self) -> None:
        """Free the rows of earlier calls, but keep the cache."""
        self._rows.clear()
        self._logprobs.clear()

    def forget(self) -> None:
        """Free all that is known of earlier requests."""
        self.forget_rows()
        for known in (self._texts, self._continuing, self._can_write):
            known.clear()
        self._cache, self._held = None, []


@dataclass
class GgufMember(CachedMember):
    """A reference member that llama.cpp runs: one sequence, in calls of 8 to 32 tokens.

    Results of calls of these sizes are equal in every bit, so those of `LlamaCppBackend` with
    ``repeatable=True`` are, too.
    """

    @property
    def vocabulary(self) -> int:
        return int(self.model._model.vocabulary_size)

    def _next(self, ids: list[int]) -> Any:
        from adafuse_llm.backends.llamacpp.context import REPEATABLE_TOKENS, CacheFullError, Entry

        shared = 0
        while shared < min(len(ids) - 1, len(self._held)) and ids[shared] == self._held[shared]:
            shared += 1
        try:
            self.model.cut(0, shared)
            for start in range(shared, len(ids), REPEATABLE_TOKENS[1]):
                part = enumerate(ids[start : start + REPEATABLE_TOKENS[1]], start)
                entries = [Entry(token, at, [0], at == len(ids) - 1) for at, token in part]
                row = self.model.run(entries)
        except CacheFullError:  # cells of removed tokens stay in use
            self.model.clear()
            self._held = []
            return self._next(ids)
        self.passes += 1
        self._held = ids
        return row[-1]


@dataclass
class _Rows:
    """The rows of logits after each token of `ids`, evaluated when they are read."""

    member: CachedMember
    ids: Sequence[int]

    def __getitem__(self, index: int) -> Any:
        return self.member.row(self.ids[: index + 1])


def reference_of(backend: Any, model: Any, tokenizer: Any) -> CachedMember:
    """The reference's member of a backend. It shares the weights and the encoding."""
    kind = CachedMember if isinstance(backend, HuggingFaceBackend) else GgufMember
    codec, window = backend.codec, backend.context_window
    return kind(backend.name, model, tokenizer, codec, backend.end_ids, window)


def check(
    backends: Sequence[Any],
    members: Sequence[CachedMember],
    request: Mapping[str, Any],
    tolerance: float,
    **options: Any,
) -> Generation:
    """Decode with the engine, in every second case with drafts, and with the reference. Fail where
    they differ.
    """
    prompt, messages = request.get("prompt"), request.get("messages")
    expected = decode(members, prompt, Options(**options), messages=messages)
    runtime = RuntimeConfig(drafting=next(TURNS))
    with AdaFuseEngine(backends, strategy="adafuse", runtime=runtime) as engine:
        actual = engine.generate(**request, **options)
    assert_same(actual, expected, tolerance)
    return actual


def check_rules(
    make: Callable[[], Backend],
    logits: Callable[[Sequence[int]], Any] | None,
    limit: float,
    length: int = 20,
) -> tuple[str, ...]:
    """Check all rules of a backend, up to a difference of log-probabilities.

    Walks are shorter than those with tiny members, because a pass takes a hundred times as long.

    Returns:
        The names of the tests that apply.
    """

    class Rules(BackendTests):
        tolerance, steps = limit, length

        def member(self) -> Backend:
            return make()

        def logits(self, ids: Sequence[int]) -> Any:
            return None if logits is None else logits(ids)

    return Rules.check_all()
