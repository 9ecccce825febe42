"""The command for figures of quantized GGUF files measures their members."""

from __future__ import annotations

import re

import pytest

from adafuse_llm.backends.llamacpp import LlamaCppBackend
from benchmarks.real import quantized
from tests.support.gguf_files import embedded_gguf

pytestmark = pytest.mark.gguf


def changes(line: str) -> list[float]:
    return [float(number) for number in re.findall(r": ([\d.e+-]+)", line)]


def test_passes_of_8_to_32_tokens_are_the_same_and_long_ones_are_not() -> None:
    line = quantized.sizes(embedded_gguf("wren", "q8_0"), range(10, 700))
    *_, of_8, of_12, of_16, long = changes(line)
    assert of_8 == of_12 == of_16 == 0 < long, line


def test_ends_are_those_of_the_member() -> None:
    member = LlamaCppBackend(embedded_gguf("wren", "q8_0"), "m", context=512)
    assert quantized.ends(member).startswith("ends: <|endoftext|> <|end|>; llama.cpp besides: ")
    member.close()


def test_repeatable_members_answer_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    quantized.repeats([embedded_gguf(name, "q8_0") for name in ("wren", "heron")], 4)
    first, second, third = capsys.readouterr().out.splitlines()
    assert re.match(r"repeatable=False: \d+ of 16 texts the same", first)
    assert "repeatable=True: 16 of 16 texts the same" in second
    assert changes(second)[-1] < 1e-5
    assert third.startswith("CPU time of the first requests: ")
