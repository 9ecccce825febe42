"""Draw names and values for one split."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from training.world.words import Split, made_up_words, split_of_value, words_of

_INSTITUTIONS: Final = words_of(
    """Library Museum Bakery School Brewery Theatre Hospital Workshop Mill Clinic Bank Hotel
    Garden College Observatory Inn"""
)
_GOODS: Final = words_of("Tea Lamp Soap Clock Kettle Boot Cheese Pen Blanket Radio Jam Chair")
_GATHERINGS: Final = words_of("Fair Festival Regatta Market Parade Concert")
_STREETS: Final = words_of("Street Lane Road Square")
_MONTHS: Final = words_of(
    """January February March April May June July August September October November December"""
)


@dataclass
class Names:
    """A source of names and values for one split. It repeats no made-up word within a scene."""

    rng: random.Random
    split: Split
    _used: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """Start a new scene, in which every word may be drawn again."""
        self._used.clear()

    def word(self, category: str) -> str:
        """Draw a made-up word of a category (a key of ``ENDINGS``)."""
        words = made_up_words(category, self.split)
        for _ in range(100):
            word = self.rng.choice(words)
            if word not in self._used:
                break
        self._used.add(word)
        return word

    def value(self, kind: str, low: int, high: int) -> int:
        """Draw a value of a kind, from ``low`` to ``high``, that belongs to this split."""
        while True:
            value = self.rng.randint(low, high)
            if split_of_value(kind, value) == self.split:
                return value

    def person(self) -> str:
        """Draw a first and a last name: ``Maren Tolvik``."""
        return f"{self.word('first')} {self.word('last')}"

    def place(self) -> str:
        """Draw the name of a settlement: ``Halmoor``."""
        return self.word("place")

    def institution(self) -> str:
        """Draw the name of an institution: ``Jorith Museum``."""
        return f"{self.word('proper')} {self.rng.choice(_INSTITUTIONS)}"

    def product(self) -> str:
        """Draw the name of a product: ``Vorlo Lamp``."""
        return f"{self.word('brand')} {self.rng.choice(_GOODS)}"

    def event(self) -> str:
        """Draw the name of an event: ``Falori Concert``."""
        return f"{self.word('proper')} {self.rng.choice(_GATHERINGS)}"

    def address(self) -> str:
        """Draw a house number and a street: ``14 Miller Street``."""
        street = f"{self.word('street')} {self.rng.choice(_STREETS)}"
        return f"{self.value('house', 2, 99)} {street}"

    def year(self) -> str:
        """Draw a year from 1640 to 1999."""
        return str(self.value("year", 1640, 1999))

    def count(self) -> str:
        """Draw a number of two or three digits."""
        return str(self.value("count", 11, 999))

    def thousands(self) -> str:
        """Draw a number of four digits."""
        return str(self.value("thousands", 1000, 9899))

    def head_count(self) -> str:
        """Draw a number of two to four digits."""
        return self.thousands() if self.rng.random() < 0.5 else self.count()

    def price(self) -> str:
        """Draw an amount of money: ``4.35 crowns``."""
        cents = self.value("price", 105, 2999)
        return f"{cents // 100}.{cents % 100:02d} crowns"

    def whole_price(self) -> str:
        """Draw an amount of money below 49 in whole crowns: ``8 crowns``."""
        return f"{self.value('crowns', 2, 48)} crowns"

    def small_count(self) -> str:
        """Draw a number from 11 to 48."""
        return str(self.value("count", 11, 48))

    def measure(self, unit: str, low: int, high: int) -> str:
        """Draw a number with its unit: ``84 metres``."""
        return f"{self.value(unit, low, high)} {unit}"

    def time(self) -> str:
        """Draw a time of day in steps of five minutes: ``8:15``."""
        minute = 5 * self.value("time", 6 * 12, 21 * 12)
        return f"{minute // 60}:{minute % 60:02d}"

    def date(self) -> str:
        """Draw a day and a month: ``12 May``."""
        day = self.value("date", 0, 12 * 28 - 1)
        return f"{day % 28 + 1} {_MONTHS[day // 28]}"
