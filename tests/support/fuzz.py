"""Random decodes and what must hold for each of them, for tests and for ``benchmarks.fuzz``.

A case is made from a seed and a number alone, so that a violation can be repeated. Its members have
no model: their distributions depend on the last characters of the text.
"""

import functools
import itertools
import json
import math
import random
import string
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from adafuse_llm import AdaFuseEngine, Generation, MemberError, RuntimeConfig
from adafuse_llm.backends.fake import END, FakeCodec
from adafuse_llm.strategies.registry import find_strategy
from tests.support.compare import approximately, as_data
from tests.support.recorded import (
    RecordedFake,
    check_prompt_is_exact,
    check_reply_is_exact,
    counted_tokens,
    forget,
    used,
)

PIECES = (
    *(" ", "  ", "    ", "        ", "\n", "\n\n", "\n    ", "\t", "\r\n", ".\n", ". "),
    *("The", " the", " light", "light", " a", "a", "ing", " ferry", "x", " x", " =", "1", "12"),
    *("(", ")", "):", " if", "if", " not", "not", ",", ", ", "!", "?"),
    *("caf", "\u00e9", " caf\u00e9"),
    *("\u4e2d", "\u4e2d\u6587", "\U0001f600", "\u200d", "\u0301", "\u00a0", "</s>", "<|end|>"),
)
"""Texts that members without a model may write as one token."""

PARTS = (*PIECES, "def f(x):", "Answer:", "  \n", "\u05e9\u05dc\u05d5\u05dd", "\U0001d53c", "\x85")
"""Texts that make up prompts."""

STRATEGIES = ("adafuse", "single", "mixture")
"""Strategies. In each, a limit or a stop sequence changes nothing in the rounds before it."""

CHARACTERS = sorted({*"".join((*PIECES, *PARTS)), *string.printable})

# Members --------------------------------------------------------------------------------------


def _member(chance: random.Random, name: str, common: int) -> RecordedFake:
    """A random member; `common` is the seed of the preferences that it shares with others."""
    own = chance.randrange(2**30)
    sharpness = chance.choice([1.0, 1.5, 3.0, 10.0])  # of two neighboring preferences; 1 gives ties
    end = chance.choice([0.05, 0.2, 0.4])
    pieces = [p for p in PIECES if len(p) > 1 and chance.random() < 0.6]
    # a member that tells the texts of all its tokens can write the spaces of a prompt itself
    is_complete = chance.random() < 0.5
    known = {*pieces, *(p for p in PIECES if len(p) == 1)}

    @functools.lru_cache(4096)
    def distribution(tail: str) -> Mapping[str, float]:
        shared = random.Random(zlib.crc32(f"{common} {tail}".encode()))
        single = random.Random(zlib.crc32(f"{own} {tail}".encode()))
        texts = [*shared.choices(PIECES, k=3), single.choice(PIECES), *shared.choices(PIECES, k=2)]
        first = [text if text in known else text[0] for text in texts]
        if shared.random() < end:
            first.insert(shared.randrange(3), END)
        weights = {text: sharpness**-at for at, text in reversed([*enumerate(first)])}
        if is_complete:  # some token always continues the spaces of a prompt
            weights |= {text: 1e-4 for text in sorted(known - {*weights}) if text[0] == " "}
        total = math.fsum(weights.values())
        return {text: weight / total for text, weight in weights.items()}

    made = RecordedFake(name, lambda text: distribution(text[-5:]))
    # Ties go to the lower id, so ids must not depend on the order in which texts turn up.
    made.codec = FakeCodec([*pieces, *CHARACTERS], is_complete=is_complete)
    return made


FAULTS = ("evaluate", "encode_continuation", "decode_continuation")
"""Methods of a member, or of its codec, that may fail."""


# Cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One random decode, or several.

    Attributes:
        common: seed of the preferences that members share.
        rooms: how many tokens the windows of members have for a response; None without a window.
        chance: source of the choices that a check makes.
    """

    kind: str
    strategy: str
    common: int
    members: tuple[int, ...]
    rooms: tuple[int | None, ...]
    prompts: tuple[str, ...]
    options: Mapping[str, Any]
    chance: random.Random = field(repr=False, compare=False)

    def engine(self, **runtime: Any) -> AdaFuseEngine:
        """An engine of new members."""
        made: list[RecordedFake] = []
        for number, (seed, room) in enumerate(zip(self.members, self.rooms, strict=True)):
            fake = _member(random.Random(seed), f"m{number}", self.common)
            if room is not None:
                longest = max(len(fake.codec.encode_prompt(text)) for text in self.prompts)
                fake.context_window = longest + room
            made.append(fake)
        return AdaFuseEngine(made, strategy=self.strategy, runtime=RuntimeConfig(**runtime))


def make_case(seed: int, number: int, kind: str | None = None) -> Case:
    """The case with this number; equal arguments give equal cases."""
    chance = random.Random(f"{seed}/{number}")
    kind = kind or chance.choices([*KINDS], [share for share, _ in KINDS.values()])[0]
    strategy = "adafuse" if chance.random() < 0.6 else chance.choice(STRATEGIES[1:])
    count = 1 if strategy == "single" else chance.choice([1, 2, 2, 2, 3])
    common, *members = (chance.randrange(2**30) for _ in range(1 + count))
    prompts = tuple(_prompt(chance) for _ in range(chance.randint(2, 4)))
    tight = kind not in ("exact", "reply")
    rooms = tuple(
        chance.randint(1, 25) if tight and chance.random() < 0.1 else None for _ in members
    )
    options = _options(chance, strategy, count)
    return Case(kind, strategy, common, tuple(members), rooms, prompts, options, chance)


def _prompt(chance: random.Random) -> str:
    """A prompt of at most 60 characters that has more than spaces."""
    text = "".join(chance.choices(PARTS, k=chance.randint(1, 6)))
    if chance.random() < 0.4:
        text = text.rstrip(" ") + " " * chance.choice([0, 1, 1, 2, 3, 4, 4, 8, 9])
    return (text if text.strip(" ") else "x" + text)[-50:].lstrip(" ") or "x"


def _options(chance: random.Random, strategy: str, members: int) -> dict[str, Any]:
    used = find_strategy(strategy).options
    drawn: dict[str, Any] = {
        "margin_threshold": chance.choice([0.0, 0.2, 0.5, 0.7, 1.0]),
        "max_words": chance.randint(1, 4),
        "branching_factor": chance.randint(1, 4),
        "max_word_tokens": chance.choice([1, 2, 4, 16]),
        "max_word_letters": chance.choice([1, 2, 256]),
        "weights": (1.0, *(chance.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(members - 1))),
    }
    options = {k: v for k, v in drawn.items() if k in used and chance.random() < 0.5}
    if "temperature" in used and chance.random() < 0.4:
        options["temperature"] = chance.choice([1e-6, 0.3, 0.7, 1.0, 2.0])
        options["seed"] = chance.getrandbits(64)
        cuts = {"top_p": chance.choice([0.1, 0.5, 0.9, 1.0]), "top_k": chance.choice([1, 2, 5, 50])}
        options |= {k: v for k, v in cuts.items() if chance.random() < 0.5}
    return {**options, "max_new_tokens": chance.randint(1, 14)}


# Checks ---------------------------------------------------------------------------------------


def _same(left: Generation, right: Generation) -> None:
    """Fail unless two generations are equal, whatever they cost, and have only finite numbers."""
    json.dumps(left.model_dump(mode="json"), allow_nan=False)
    one, two = as_data(left), as_data(right)
    is_same = one == two or one == approximately(two)
    assert is_same, f"{_short(left)} differs from {_short(right)}"


def _short(generation: Generation) -> str:
    rounds = [(r.text, r.winner, len(r.candidates)) for r in generation.rounds]
    return f"{generation.text!r} ({generation.finish_reason}, {rounds})"


def _check_exact(case: Case) -> None:
    """Members hold the prompt and the response."""
    with case.engine(drafting=case.chance.random() < 0.5) as engine:
        done = engine.generate(case.prompts[0], **case.options)
        check_prompt_is_exact(engine.backends, case.prompts[0], done)


def _check_reply(case: Case) -> None:
    """A reply to messages shows no whitespace before its first character."""
    asked = [{"role": "user", "content": case.prompts[0] + "?"}]
    with case.engine() as engine:
        done = engine.generate(messages=asked, **case.options)
        check_reply_is_exact(engine.backends, done)
        keys = [(c.text.lstrip(), c.ends) for c in done.rounds[0].candidates]
        assert len(set(keys)) == len(keys), f"whitespace tells candidates apart: {keys}"
        shown = "".join(event.text for event in engine.stream(messages=asked, **case.options))
        assert shown == done.text, f"the stream shows {shown!r}, not {done.text!r}"


def _check_cap(case: Case) -> None:
    """No member writes more tokens than `max_new_tokens`, and the text is a longer one, cut."""
    prompt, options = case.prompts[0], {**case.options}
    cap = options.pop("max_new_tokens")
    with case.engine() as engine:
        full = engine.generate(prompt, **options, max_new_tokens=cap + 20)
        forget(engine.backends)
        cut = engine.generate(prompt, **options, max_new_tokens=cap)
        most = max(cut.usage.completion_tokens.values())
        assert most <= cap, f"{cut.usage.completion_tokens} tokens of at most {cap}: {cut.text!r}"
        for member in used(engine.backends):
            written = counted_tokens(member, prompt)
            assert written <= cap, f"{member.name} wrote {written} tokens of at most {cap}"
        if not any(case.rooms):
            assert full.text.startswith(cut.text), f"{cut.text!r} is no beginning of {full.text!r}"
            if cut.text != full.text:
                assert cut.finish_reason == "length", f"{_short(cut)} is {_short(full)}, cut"
            if max(full.usage.completion_tokens.values()) < cap:
                _same(cut, full)
        events = engine.stream(prompt, **options, max_new_tokens=cap)
        shown = "".join(event.text for event in events)
        assert shown == cut.text, f"the stream shows {shown!r}, not {cut.text!r}"


def _check_stops(case: Case) -> None:
    """The text ends before the first stop sequence, and nothing of it is shown."""
    prompt = case.prompts[0]
    with case.engine() as engine:
        full = engine.generate(prompt, **case.options)
        stops = _stops(case.chance, full.text)
        done = engine.generate(prompt, stop=stops, **case.options)
        events = list(engine.stream(prompt, stop=stops, **case.options))
    wanted, reason = full.text, full.finish_reason
    texts = list(itertools.accumulate(each.text for each in full.rounds))
    for text in texts:
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            wanted, reason = text[: min(found)], "stop_sequence"
            break
    assert done.text == wanted, f"{done.text!r} is not {wanted!r}; stops {stops}"
    assert done.finish_reason == reason, f"{done.finish_reason} is not {reason}; stops {stops}"
    shown = ""
    for event in events:
        shown += event.text
        assert wanted.startswith(shown), f"{shown!r} is shown of {wanted!r}; stops {stops}"
    assert shown == wanted, f"{shown!r} is shown of {wanted!r}; stops {stops}"


def _stops(chance: random.Random, text: str) -> list[str]:
    """Stop sequences, most of which are in `text`."""
    stops = [chance.choice(PIECES)]
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(text) + 1)
        stops.append(text[at : at + chance.randint(1, 4)] or "zzz")
    return stops


def _check_drafts(case: Case) -> None:
    """Drafts change nothing."""
    with case.engine(drafting=True) as engine, case.engine(drafting=False) as plain:
        for prompt in case.prompts[:2]:
            _same(engine.generate(prompt, **case.options), plain.generate(prompt, **case.options))


def _check_batch(case: Case) -> None:
    """Requests of a batch give what they give alone."""
    with case.engine(max_requests=case.chance.choice([1, 2, 16])) as engine:
        alone = [engine.generate(prompt, **case.options) for prompt in case.prompts]
        batch = engine.generate_batch(list(case.prompts), **case.options)
    for one, two in zip(alone, batch, strict=True):
        _same(one, two)


def _check_cancel(case: Case) -> None:
    """A cancelled request gives a beginning of the text; the engine stays usable."""
    prompt, options = case.prompts[0], {**case.options, "max_new_tokens": 14}
    with case.engine() as engine:
        full = engine.generate(prompt, **options)
        at = case.chance.randrange(len(full.rounds))
        if case.chance.random() < 0.3:  # the caller leaves the stream
            shown = ""
            stream = engine.stream(prompt, **options)
            for event in itertools.islice(stream, at + 1):
                shown += event.text
            stream.close()
            assert full.text.startswith(shown), f"{shown!r} is no beginning of {full.text!r}"
        else:
            cancel = threading.Event()
            if case.chance.random() < 0.1:
                cancel.set()
            for event in engine.stream(prompt, cancel=cancel, **options):
                if event.round is not None and event.round.index == at:
                    cancel.set()
                done = event.generation
            assert done is not None
            assert done.finish_reason in ("cancelled", full.finish_reason)
            assert full.text.startswith(done.text), f"{done.text!r} of {full.text!r}"
            assert "".join(each.text for each in done.rounds) == done.text
            if done.finish_reason != "cancelled":
                _same(done, full)
        _same(engine.generate(prompt, **options), full)


def _check_faults(case: Case) -> None:
    """A faulty member is named in a `MemberError`; the next request is right."""
    prompt, options = case.prompts[0], case.options
    fault, after = case.chance.choice(FAULTS), case.chance.choice([0, 0, 1, 2, 3, 5, 8])
    with case.engine() as engine:
        full = engine.generate(prompt, **options)
        victim = case.chance.choice(engine.backends)
        owner = victim if fault == "evaluate" else victim.codec
        works, calls = getattr(owner, fault), itertools.count()

        def fail(*given: Any) -> Any:
            if next(calls) >= after:
                raise LookupError("it is broken")
            return works(*given)

        with mock.patch.object(owner, fault, fail):
            try:
                _same(engine.generate(prompt, **options), full)
            except MemberError as error:
                assert next(calls) > after, f"no fault happened, but {error}"
                assert error.member == victim.name, f"{error} names the wrong member"
        _same(engine.generate(prompt, **options), full)


KINDS: Mapping[str, tuple[int, Callable[[Case], None]]] = {
    "exact": (4, _check_exact),
    "reply": (3, _check_reply),
    "cap": (4, _check_cap),
    "stops": (3, _check_stops),
    "drafts": (2, _check_drafts),
    "batch": (2, _check_batch),
    "cancel": (2, _check_cancel),
    "faults": (3, _check_faults),
}
"""How often cases of each kind occur, and what checks them."""


def violation(seed: int, number: int, kind: str | None = None) -> tuple[str, str]:
    """Check a case. Return its kind, and what it violates; nothing if all holds."""
    case = make_case(seed, number, kind)
    try:
        KINDS[case.kind][1](case)
    except Exception as error:  # an error of the engine is a violation, too
        lines = f"{type(error).__name__}: {error}".splitlines()
        return case.kind, " ".join(line.strip() for line in lines)[:400]
    return case.kind, ""
