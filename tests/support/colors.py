"""Contrast of colors, as WCAG 2 defines it."""

from __future__ import annotations


def luminance(color: str) -> float:
    """The relative luminance of a color such as #56b4e9."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast of two colors, from 1 to 21."""
    pair = luminance(one), luminance(other)
    return (max(pair) + 0.05) / (min(pair) + 0.05)
