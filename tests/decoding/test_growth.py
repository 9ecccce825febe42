"""The work of a round does not depend on how long the response already is."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends.fake import FakeBackend, FakeCodec
from adafuse_llm.decoding.draft import Lookup
from adafuse_llm.text.stops import Transcript
from adafuse_llm.tree.tokens import TokenTree

WORDS = (" the", " tide", " rose", " over", " slow", " stones")


def words(text: str) -> Mapping[str, float]:
    """Continue with one of two words, or with the rest of a word that is spelled in letters."""
    started = text[text.rfind(" ") :]
    rest = [word[len(started) :] for word in WORDS if word.startswith(started) and word != started]
    if rest and started in (" ", " s", " t"):
        return {rest[0]: 1.0}
    place = len(text) % len(WORDS)
    return {WORDS[place]: 0.7, WORDS[place - 1]: 0.3}


def count_work(monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Count what rounds decode, encode, look up, search and visit in trees.

    Returns:
        A list that each round extends by all counts so far.
    """
    work: Counter[str] = Counter()
    after: list[Counter[str]] = []
    push = Transcript.push

    def push_and_note(transcript: Transcript, span: str) -> str:
        after.append(Counter(work))
        return push(transcript, span)

    monkeypatch.setattr(Transcript, "push", push_and_note)

    def count(owner: Any, name: str, what: str, size: Any) -> None:
        function = getattr(owner, name)

        def counting(*args: Any) -> Any:
            work[what] += size(*args)
            return function(*args)

        monkeypatch.setattr(owner, name, counting)

    count(FakeCodec, "decode_continuation", "tokens decoded", lambda _, __, new: len(new))
    count(FakeCodec, "encode_continuation", "characters encoded", lambda _, __, new: len(new))
    count(Lookup, "after", "tokens indexed", lambda each, m, _: len(m.tree.ids) - each._read)
    count(
        Transcript, "_first", "characters searched", lambda t, _, before, *__: len(t.text) - before
    )
    count(TokenTree, "path", "nodes on paths", lambda tree, node: node.length - tree.root.length)
    return after


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_work_of_a_round_does_not_grow_with_the_response(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (" ", "stones", "tide", " the", " rose", " over", " slow")
    members = [FakeBackend("a", words, WORDS), FakeBackend("b", words, other)]
    after = count_work(monkeypatch)
    with AdaFuseEngine(members) as engine:
        engine.generate(
            "Dawn:", max_new_tokens=120, temperature=temperature, seed=1, stop=["night"]
        )
    quarter = len(after) // 4
    early, late = after[2 * quarter] - after[quarter], after[-1] - after[-1 - quarter]
    assert early.keys() == late.keys() >= {"tokens decoded", "characters encoded"}
    for what in early:
        assert late[what] < 1.5 * early[what], what
