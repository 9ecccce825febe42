"""The tables of the guide to several machines are right."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from adafuse_llm.loading.ray_options import RayOptions
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "several-machines.md").read_text(encoding="utf-8")
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")

MEMORY, BANDWIDTH = 80, 3350  # GB, and GB/s
TOKEN_BYTES = {  # keys and values of layers, heads and values of a head, of two bytes each
    8: 2 * 32 * 8 * 128 * 2,
    32: 2 * 64 * 8 * 128 * 2,
    70: 2 * 80 * 8 * 128 * 2,
}
NETWORK = 0.2  # ms

pytestmark = pytest.mark.quick


def rows(first: str) -> Iterator[list[str]]:
    """The cells of the rows of a table, after the row that begins with `first`."""
    _, _, table = PAGE.partition(f"| {first} |")
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def test_the_table_of_options_has_the_fields_and_their_defaults() -> None:
    listed = {name.strip("`"): default.strip("`") for name, default, _ in rows("option")}
    fields = RayOptions.model_fields
    assert listed == {
        name: repr(field.get_default(call_default_factory=True)) for name, field in fields.items()
    }


def measured() -> tuple[float, dict[int, float], dict[int, float]]:
    """What Ray adds to a pass, and passes and messages of a round by the number of members."""
    section = SPEED.partition("\n## Ray\n")[2].partition("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if "| Ray actors |" in line
    ]
    (alone,) = (cells for cells in lines if cells[0] == "Ray actors")
    together = {int(cells[0]): cells for cells in lines if cells[1] == "on"}
    passes = {members: float(cells[6]) for members, cells in together.items()}
    messages = {members: float(cells[7]) for members, cells in together.items()}
    return float(alone[2].split()[0]), passes, messages


def test_what_to_expect_follows_from_sizes_and_measurements() -> None:
    per_message, passes, messages = measured()
    checked = 0
    for ensemble, weights, gpus, left, _, least, whole, share in rows("ensemble"):
        found = re.fullmatch(r"(\d) × (\d+) B, (bf16|8 bit)", ensemble)
        assert found is not None, ensemble
        members, billions = int(found[1]), int(found[2])
        gigabytes = billions * (2 if found[3] == "bf16" else 1)
        assert weights == f"{gigabytes} GB"
        free = int(gpus) * MEMORY - gigabytes
        tokens = free * 1e9 / TOKEN_BYTES[billions]
        assert left == f"{free} GB, {round(tokens, -3):,.0f} tokens"
        milliseconds = 1000 * gigabytes / BANDWIDTH
        assert number(least) == pytest.approx(milliseconds, abs=0.051)
        extra = messages[members] * (per_message + NETWORK)
        total = passes[members] * milliseconds + extra
        assert number(whole) == pytest.approx(total, abs=0.51)
        assert number(share) == pytest.approx(100 * extra / total, abs=0.51)
        checked += 1
    assert checked == 6
