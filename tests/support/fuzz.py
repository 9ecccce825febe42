"""Random decodes and what must hold for each of them, for tests and for ``benchmarks.fuzz``.

A case is made from a seed and a number alone, so that a violation can be repeated. Its members have
no model: their distributions depend on the last characters of the text.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import string
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from adafuse_llm import AdaFuseEngine, Generation, MemberError, RuntimeConfig
from adafuse_llm.backends.fake import END, FakeCodec, Rule
from adafuse_llm.strategies.registry import find_strategy
from tests.support.compare import as_data
from tests.support.recorded import (
    RecordedFake,
    check_prompt_is_exact,
    check_reply_is_exact,
    check_scores,
    counted_tokens,
    forget,
    trailing_spaces,
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

SPANS = ("adafuse", "single", "fixed-1", "fixed-2", "fixed-3")
"""Strategies whose NLL is that of the whole span."""

STRATEGIES = (*SPANS, "mixture")
"""Strategies. In each, a limit or a stop sequence changes nothing in the rounds before it."""

CHARACTERS = sorted({*"".join((*PIECES, *PARTS)), *string.printable})

KINDS: Mapping[str, int] = {
    "exact": 4,
    "reply": 3,
    "cap": 4,
    "stops": 3,
    "drafts": 2,
    "batch": 2,
    "cancel": 2,
    "faults": 3,
}
"""Kinds of cases, with how often they occur.

``exact``    members hold the prompt and the response; rounds agree with `score`
``reply``    a reply to messages shows no whitespace before its first character
``cap``      no member writes more tokens than `max_new_tokens`
``stops``    the text ends before the first stop sequence, and nothing of it is shown
``drafts``   drafting changes nothing
``batch``    requests of a batch give what they give alone
``cancel``   a cancelled request gives a beginning of the text; the engine stays usable
``faults``   a faulty member is named in a `MemberError`; the next request is right
"""

# Members --------------------------------------------------------------------------------------


def fake_member(
    chance: random.Random,
    name: str,
    common: int,
    *,
    end: float | None = None,
    rule: Rule | None = None,
    vocabulary: Sequence[str] | None = None,
) -> RecordedFake:
    """A random member without a model, which records its requests.

    Args:
        chance: source of its preferences.
        name: its name.
        common: seed of the preferences that it shares with other members.
        end: how likely the end of the response is among the preferences.
        rule: what it writes instead of its preferences.
        vocabulary: its tokens of several characters.
    """
    own = chance.randrange(2**30)
    sharpness = chance.choice([1.0, 1.5, 3.0, 10.0])  # of two neighboring preferences; 1 gives ties
    end = chance.choice([0.05, 0.2, 0.4]) if end is None else end
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

    made = RecordedFake(name, rule or (lambda text: distribution(text[-5:])))
    # Ties go to the lower id, so ids must not depend on the order in which texts turn up.
    texts = [*(pieces if vocabulary is None else vocabulary), *CHARACTERS]
    made.codec = FakeCodec(texts, is_complete=is_complete)
    return made


FAULTS = ("evaluate", "encode_continuation", "decode_continuation")
"""Methods of a member, or of its codec, that may fail."""


# Cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One random decode, or several.

    Attributes:
        kind: what is checked.
        strategy: name of the strategy.
        common: seed of the preferences that members share.
        members: seeds of the members.
        rooms: for each member, how many tokens its context window has for a response; None for a
            member without a window.
        prompts: prompts, at least two.
        options: options of every call.
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
            fake = fake_member(random.Random(seed), f"m{number}", self.common)
            if room is not None:
                longest = max(len(fake.codec.encode_prompt(text)) for text in self.prompts)
                if self.kind == "reply":
                    longest = max(len(fake.codec.encode_messages(self.messages)), longest)
                fake.context_window = longest + room
            made.append(fake)
        return AdaFuseEngine(made, strategy=self.strategy, runtime=RuntimeConfig(**runtime))

    @property
    def messages(self) -> list[dict[str, str]]:
        """A conversation with the first prompt."""
        return [{"role": "user", "content": self.prompts[0] + "?"}]


def make_case(seed: int, number: int, kinds: Sequence[str] = tuple(KINDS)) -> Case:
    """The case with this number; equal arguments give equal cases."""
    chance = random.Random(f"{seed}/{number}")
    (kind,) = chance.choices(kinds, [KINDS[name] for name in kinds])
    strategy = "adafuse" if chance.random() < 0.6 else chance.choice(STRATEGIES[1:])
    count = 1 if strategy == "single" else chance.choice([1, 2, 2, 2, 3])
    common, *members = (chance.randrange(2**30) for _ in range(1 + count))
    prompts = tuple(_prompt(chance) for _ in range(chance.randint(2, 4)))
    rooms = tuple(chance.randint(1, 25) if chance.random() < 0.1 else None for _ in members)
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

ABOUT = 1e-9
"""Largest difference of numbers that are computed in batches of another size."""


def same(left: Generation, right: Generation) -> None:
    """Fail unless two generations are equal, whatever they cost."""
    one, two = as_data(left), as_data(right)
    assert one == two or _close(one, two), f"{_short(left)} differs from {_short(right)}"


def _short(generation: Generation) -> str:
    rounds = [(r.text, r.winner, len(r.candidates)) for r in generation.rounds]
    return f"{generation.text!r} ({generation.finish_reason}, {rounds})"


def _close(one: Any, two: Any) -> bool:
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_close(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_close, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two) <= ABOUT
    return bool(one == two)


def joined(generation: Generation) -> str:
    """The committed text, with what a stop sequence cut off."""
    return "".join(each.text for each in generation.rounds)


def _check_exact(case: Case) -> None:
    with case.engine(drafting=case.chance.random() < 0.5) as engine:
        prompt = case.prompts[0]
        forget(engine.backends)
        done = engine.generate(prompt, **case.options)
        held = check_prompt_is_exact(engine.backends, prompt, done)
        if case.strategy in SPANS:
            options = {k: v for k, v in case.options.items() if k == "weights"}
            cut = done.finish_reason == "length"
            check_scores(engine, prompt, done, held, cut=cut, **options)


def _check_reply(case: Case) -> None:
    asked = case.messages
    with case.engine() as engine:
        forget(engine.backends)
        done = engine.generate(messages=asked, **case.options)
        check_reply_is_exact(engine.backends, done)
        keys = [(c.text.lstrip(), c.ends) for c in done.rounds[0].candidates]
        assert len(set(keys)) == len(keys), f"whitespace tells candidates apart: {keys}"
        shown = "".join(event.text for event in engine.stream(messages=asked, **case.options))
        assert shown == done.text, f"the stream shows {shown!r}, not {done.text!r}"


def _check_cap(case: Case) -> None:
    options = {**case.options}
    cap = options.pop("max_new_tokens")
    with case.engine() as engine:
        check_cap(engine, case.prompts[0], cap, **options)


def check_cap(engine: AdaFuseEngine, prompt: str, cap: int, **options: Any) -> Generation:
    """Decode with `cap` as a limit; fail if a member writes more tokens, or if the text is not that
    of a higher limit, cut.

    The second is checked for strategies that play round by round, and for members without context
    windows.

    Returns:
        The capped generation.
    """
    forget(engine.backends)
    full = engine.generate(prompt, **options, max_new_tokens=cap + 20)
    forget(engine.backends)
    cut = engine.generate(prompt, **options, max_new_tokens=cap)
    most = max(cut.usage.completion_tokens.values())
    assert most <= cap, f"{cut.usage.completion_tokens} tokens of at most {cap}: {cut.text!r}"
    for member in used(engine.backends):
        written = counted_tokens(member, trailing_spaces(prompt)) if member.is_lossless else 0
        assert written <= cap, f"{member.name} wrote {written} tokens of at most {cap}"
    if not any(each.context_window for each in engine.backends):
        assert full.text.startswith(cut.text), f"{cut.text!r} is no beginning of {full.text!r}"
        if cut.text != full.text:
            assert cut.finish_reason == "length", f"{_short(cut)} is {_short(full)}, cut"
        if max(full.usage.completion_tokens.values()) < cap:
            same(cut, full)
    shown = "".join(event.text for event in engine.stream(prompt, **options, max_new_tokens=cap))
    assert shown == cut.text, f"the stream shows {shown!r}, not {cut.text!r}"
    return cut


def _check_stops(case: Case) -> None:
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
    with case.engine(drafting=True) as engine, case.engine(drafting=False) as plain:
        for prompt in case.prompts[:2]:
            same(engine.generate(prompt, **case.options), plain.generate(prompt, **case.options))


def _check_batch(case: Case) -> None:
    with case.engine(max_requests=case.chance.choice([1, 2, 16])) as engine:
        alone = [engine.generate(prompt, **case.options) for prompt in case.prompts]
        batch = engine.generate_batch(list(case.prompts), **case.options)
    for one, two in zip(alone, batch, strict=True):
        same(one, two)


def _check_cancel(case: Case) -> None:
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
            done = engine.generate(
                prompt,
                cancel=cancel,
                on_round=lambda each: cancel.set() if each.index == at else None,
                **options,
            )
            assert done.finish_reason in ("cancelled", full.finish_reason)
            assert full.text.startswith(done.text), f"{done.text!r} of {full.text!r}"
            assert joined(done) == done.text
            if done.finish_reason != "cancelled":
                same(done, full)
        same(engine.generate(prompt, **options), full)


def _check_faults(case: Case) -> None:
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
                same(engine.generate(prompt, **options), full)
            except MemberError as error:
                assert next(calls) > after, f"no fault happened, but {error}"
                assert error.member == victim.name, f"{error} names the wrong member"
        same(engine.generate(prompt, **options), full)


_CHECKS: Mapping[str, Callable[[Case], None]] = {
    "exact": _check_exact,
    "reply": _check_reply,
    "cap": _check_cap,
    "stops": _check_stops,
    "drafts": _check_drafts,
    "batch": _check_batch,
    "cancel": _check_cancel,
    "faults": _check_faults,
}


def violation(seed: int, number: int, kinds: Sequence[str] = tuple(KINDS)) -> tuple[str, str]:
    """Check a case. Return its kind, and what it violates; nothing if all holds."""
    case = make_case(seed, number, kinds)
    try:
        _CHECKS[case.kind](case)
    except Exception as error:  # an error of the engine is a violation, too
        lines = f"{type(error).__name__}: {error}".splitlines()
        return case.kind, " ".join(line.strip() for line in lines)[:400]
    return case.kind, ""
