"""Checks of a codec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from adafuse_llm.backends.conformance.harness import Harness
from adafuse_llm.backends.conformance.violations import expect
from adafuse_llm.text.words import REPLACEMENT

SPELLINGS = ("</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<eos>", "<end_of_turn>")
"""Spellings of end-of-sequence tokens of well-known models."""


def continuations(harness: Harness) -> None:
    """Encode texts after several contexts, and decode their tokens."""
    codec = harness.backend.codec
    for context in _contexts(harness):
        for text in (*harness.subject.texts, *harness.subject.odd_texts):
            tokens, exact = codec.encode_continuation(context, text)
            _check_ids(f"encode_continuation(..., {text!r})", tokens)
            decoded = codec.decode_continuation(context, tokens)
            expect(
                decoded == text or not exact,
                f"The tokens of {text!r} decode to {decoded!r}, but encode_continuation says that "
                "they are exact.",
            )
            expect(
                exact or text not in harness.subject.texts,
                f"encode_continuation says that the tokens of {text!r} are not exact, and they "
                f"decode to {decoded!r}. Pass other texts if the vocabulary has no tokens for it.",
            )
        tokens, exact = codec.encode_continuation(context, "")
        expect(
            exact and not tokens,
            f"encode_continuation returned {(tokens, exact)!r} for an empty text; expected "
            "([], True).",
        )


def pieces(harness: Harness) -> None:
    """Decode texts token by token."""
    codec = harness.backend.codec
    context = list(codec.encode_prompt(harness.subject.texts[0]))
    for text in (*harness.subject.texts, *harness.subject.odd_texts):
        tokens, exact = codec.encode_continuation(context, text)
        decoded = [
            codec.decode_continuation([*context, *tokens[:place]], tokens[place : place + 1])
            for place in range(len(tokens))
        ]
        if exact and not any(REPLACEMENT in piece for piece in decoded):
            expect(
                "".join(decoded) == text,
                f"The tokens of {text!r} decode to {decoded!r} one by one.",
            )


def prompts(harness: Harness) -> None:
    """Encode prompts, and decode their ends."""
    codec = harness.backend.codec
    for text in (*harness.subject.texts, *harness.subject.odd_texts):
        tokens = codec.encode_prompt(text)
        _check_ids(f"encode_prompt({text!r})", tokens)
        expect(tokens, f"encode_prompt({text!r}) returned no tokens.")
    first = harness.subject.texts[0]
    whole = codec.decode_continuation((), codec.encode_prompt(first))
    expect(
        first.strip() in whole,
        f"The tokens of encode_prompt({first!r}) decode to {whole!r}.",
    )


def messages(harness: Harness) -> None:
    """Encode a conversation."""
    codec = harness.backend.codec
    expect(
        type(codec.has_chat_template) is bool,
        f"has_chat_template is {codec.has_chat_template!r}; expected True or False.",
    )
    for text in filter(str.strip, harness.subject.texts):  # an engine refuses blank messages
        tokens = codec.encode_messages(_conversation(text))
        _check_ids(f"encode_messages for {text!r}", tokens)
        expect(tokens, f"encode_messages returned no tokens for {text!r}.")


def control_tokens(harness: Harness) -> None:
    """Spell out the tokens that end a response."""
    codec = harness.backend.codec
    text = harness.subject.texts[0]
    context = list(codec.encode_prompt(text))
    for spelling in _spellings(harness, context):
        spelled = f"{text}{spelling}{text}"
        try:
            tokens, _ = codec.encode_continuation(context, spelling)
        except ValueError:  # a fixed vocabulary without these characters
            continue
        for what, plain, got in (
            ("encode_continuation", [], tokens),
            ("encode_prompt", codec.encode_prompt(text + text), codec.encode_prompt(spelled)),
            (
                "encode_messages",
                codec.encode_messages(_conversation(text + text)),
                codec.encode_messages(_conversation(spelled)),
            ),
        ):
            expect(
                _ends(harness, got) == _ends(harness, plain),
                f"{what} turns the text {spelling!r} into a token that ends a response.",
            )


def _ends(harness: Harness, tokens: Sequence[int]) -> Counter[int]:
    return Counter(token for token in tokens if token in harness.backend.end_ids)


def _spellings(harness: Harness, context: Sequence[int]) -> list[str]:
    """Return the spellings of the backend's end-of-sequence tokens and of well-known ones."""
    own = []
    for token in harness.backend.end_ids:
        with suppress(Exception):  # a codec need not decode such a token
            own.append(harness.backend.codec.decode_continuation(context, [token]))
    return [text for text in dict.fromkeys((*own, *SPELLINGS)) if len(text) > 1]


def _contexts(harness: Harness) -> Iterator[list[int]]:
    """Yield prompts that end with different texts."""
    codec = harness.backend.codec
    prompt = list(codec.encode_prompt(harness.subject.texts[0]))
    yield prompt
    for text in harness.subject.texts:
        yield [*prompt, *codec.encode_continuation(prompt, text)[0]]


def _conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _check_ids(what: str, tokens: object) -> None:
    expect(
        isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens),
        f"{what} returned {tokens!r}; expected a list of token ids.",
    )
