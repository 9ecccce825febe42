"""Digits of numbers and parts of addresses in JSON end, and no usual value is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("llguidance")

from adafuse_llm import AdaFuseConfig
from adafuse_llm.text.grammar import Grammar, GrammarText

pytestmark = pytest.mark.quick


def start(schema: dict[str, Any]) -> GrammarText:
    grammar = Grammar.of(AdaFuseConfig(json_schema=schema))
    assert grammar is not None
    return grammar.text()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "number", "minimum": 0},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "minimum": 0.5, "maximum": 99.9},
        {"type": ["number", "null"]},
        {"type": "integer"},
    ],
)
def test_digits_end(schema: dict[str, Any]) -> None:
    for first in ("0", "0.", "1", "1.", "9", "-", "-1."):
        text = start(schema)
        if not text.holds(first):
            continue
        text.commit(first)
        for _ in range(40):
            digit = next((each for each in "0123456789" if text.holds(each)), None)
            if digit is None:
                break
            text.commit(digit)
        else:
            pytest.fail(f"the digits after {first} go on")


def test_numbers_of_everyday_size_can_be_written() -> None:
    for number in ("0", "-3", "3.14159", "-0.000000001", "9007199254740991", "1234567.123456789"):
        assert start({"type": "number"}).can_end(number)
    for number in ("1e5", "0.1234567891", "9007199254740992", "1E-3", ".5", "01"):
        assert not start({"type": "number"}).can_end(number)


def test_bounds_lose_no_number_of_a_few_decimals() -> None:
    """A number that begins as a bound may need zeros at its end, such as 0.90 beside 0.95."""
    chance = random.Random(3)
    for _ in range(60):
        low = round(chance.uniform(-1000, 1000), chance.randint(0, 4))
        high = round(low + chance.uniform(1, 500), chance.randint(0, 4))
        text = start({"type": "number", "minimum": low, "maximum": high})
        for value in (low, high, *(chance.uniform(low - 9, high + 9) for _ in range(6))):
            number = round(value, chance.randint(0, 6))
            spellings = [f"{number:.{decimals}f}" for decimals in range(8)]
            found = [float(each) for each in spellings if text.can_end(each) and float(each)]
            assert (number in found) is (low <= number <= high and number != 0)
            assert all(low <= each <= high for each in found)


def test_joint_schemas_keep_their_numbers() -> None:
    joint = {"type": "number", "allOf": [{"minimum": 0.95}, {"maximum": 1.5}]}
    assert start(joint).can_end("0.95")
    half = {"type": "number", "anyOf": [{"minimum": 1.1}, {"maximum": 0.3}]}
    assert start(half).can_end("1.1")
    assert not start(half).can_end("0.5")


def test_parts_of_addresses_end() -> None:
    """A text cannot end inside these parts, so that a member has no other way out."""
    for kind, begun, most in (
        ("email", "", 64),
        ("email", "a.b@", 63),
        ("email", "a@b-c.", 63),
        ("uri", "", 40),
    ):
        text = start({"type": "string", "format": kind})
        text.commit(f'"{begun}')
        count = 0
        while text.holds("a") and count < 99:
            text.commit("a")
            count += 1
        assert count == most, (kind, begun)
        assert text.closing() is not None


def test_addresses_of_everyday_size_can_be_written() -> None:
    domain = ".".join(["d" * 63] * 2 + ["e" * 60])  # 188 characters
    emails = ("a@b.de", "Jo.O'Neil+tag@mail.example.com", "l" * 64 + f"@{domain}", "x@[127.0.0.1]")
    uris = (
        *("https://example.com/", "urn:isbn:0451450523", "microsoft.windows.camera.multipicker:x"),
        *("data:text/plain;base64," + "QUJD" * 1000, "mailto:a@b.de", "a:"),
    )
    for kind, texts in (("email", emails), ("uri", uris)):
        for written in texts:
            assert start({"type": "string", "format": kind}).can_end(f'"{written}"'), written
    for wrong in ("l" * 65 + "@b.de", f"a@{'d' * 64}.de", "https" + "w" * 36 + ":"):
        kind = "email" if "@" in wrong else "uri"
        assert not start({"type": "string", "format": kind}).can_end(f'"{wrong}"')


def test_bounds_of_addresses_join_other_limits() -> None:
    text = start({"type": "string", "format": "email", "pattern": "@b\\.de$", "maxLength": 9})
    assert text.can_end('"ann@b.de"')
    for wrong in ("ann@c.de", "annette@b.de", "ann@b.de.org"):
        assert not text.can_end(f'"{wrong}"')
