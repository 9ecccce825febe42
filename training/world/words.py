"""Made-up words, and the split that each word and number belongs to.

A made-up word consists of a start and an ending. A fixed pattern decides which of these pairs are
held out. Every start and every ending occurs in both splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, Literal

Split = Literal["train", "heldout"]


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


_ONSETS: Final = words_of("B Br C D Dr F G Gr H J K L M N P R S T Tr V W Z")
_RIMES: Final = words_of("al en or il av")
STARTS: Final[tuple[str, ...]] = tuple(onset + rime for onset in _ONSETS for rime in _RIMES)

ENDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "first": words_of(
        """ia ric ela ton ina us ette an is ola mund wen ko ra dis eth o ley na vin sa bert mi
        tas"""
    ),
    "last": words_of(
        """vik strand berg dahl mark quist holt nov sky gren lund bach stein tano dorf feld kamp
        rup scu tham zig by croft wyn"""
    ),
    "place": words_of(
        """ford moor wick ham bury dale stead mere combe thorpe haven brook cliff gate minster
        port shaw field marsh ness"""
    ),
    "proper": words_of(
        """ix ana ona eva une ax ori esk und ith alle ost ard ume ane ox ire ell unt esse"""
    ),
    "brand": words_of(
        """zo pix lium tron dex fo go bra vox quil tine plex zine mox nap lax chi puff trix lo"""
    ),
    "street": words_of("son man ker ter ler ward den kin bard nell row low pole sett cup fin"),
}

_ONE_IN: Final = 5  # one word or value in five is held out


@cache
def made_up_words(category: str, split: Split) -> tuple[str, ...]:
    """Return all words of a category (a key of ``ENDINGS``) that belong to one split."""
    endings = ENDINGS[category]
    return tuple(
        start + ending
        for i, start in enumerate(STARTS)
        for j, ending in enumerate(endings)
        if ((i + i // len(_RIMES) + 2 * j) % _ONE_IN == 2) == (split == "heldout")
    )


def split_of_value(kind: str, value: int) -> Split:
    """Return the split of a number. A fixed hash of its kind and value determines the split."""
    mixed = (value * 2654435761 + sum(map(ord, kind)) * 40503) % (1 << 32)
    mixed ^= mixed >> 15
    mixed = mixed * 2246822519 % (1 << 32)
    return "heldout" if (mixed ^ (mixed >> 13)) % _ONE_IN == 0 else "train"
