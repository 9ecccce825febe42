"""A generated small-town world: names, facts, passages, questions, word problems.

Pure Python and seeded, so that the same seed gives the same text on every machine.
Everything is drawn for one of two splits, ``train`` and ``heldout``. They share the syllables
and the sentence patterns, but no made-up word, no number, year, price, date, time or address and
no arithmetic problem occurs in both: a held-out question can only be answered by reading.

    Names     draws words and values of one split
    Entity    one institution, person, product, place or event with its facts
    Passage   a rendering of an entity: prose, headed prose, or a bullet list
    Case      a question with the passages it is asked about and the exact answer
    AgentCase a question with the uses of tools that lead to its answer
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

from adafuse_llm.documents import Passage
from adafuse_llm.embedded import final_answer
from adafuse_llm.embedded.tools import calculate, one_line

__all__ = [
    "HANDBOOK_SEED",
    "NEEDS",
    "NOT_STATED",
    "SKILLS",
    "AgentCase",
    "Case",
    "Entity",
    "Fact",
    "Handbook",
    "Names",
    "Scene",
    "Split",
    "ToolUse",
    "draw_agent_case",
    "draw_case",
    "draw_entity",
    "draw_handbook",
    "draw_problem",
    "draw_scene",
    "draw_sum",
    "draw_sum_list",
    "is_correct",
    "made_up_words",
    "mark_syllables",
    "phrase_question",
    "render_passage",
    "split_of_value",
    "write_handbook",
]

Split = Literal["train", "heldout"]
Skill = Literal["people", "places_products", "numbers", "dates", "arithmetic", "not_stated"]
Kind = Literal["institution", "person", "product", "place", "event"]
Need = Literal["look_up", "calculate", "both", "none"]

SKILLS: Final[tuple[Skill, ...]] = (
    "people",
    "places_products",
    "numbers",
    "dates",
    "arithmetic",
    "not_stated",
)
NEEDS: Final[tuple[Need, ...]] = ("look_up", "calculate", "both", "none")
NOT_STATED: Final = "not stated"

# --------------------------------------------------------------------------------------------
# Words. A made-up word is a start and an ending; which pairs are held out is a fixed pattern in
# which every start and every ending occurs on both sides.
# --------------------------------------------------------------------------------------------


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS: Final = _words("B Br C D Dr F G Gr H J K L M N P R S T Tr V W Z")
_RIMES: Final = _words("al en or il av")
STARTS: Final[tuple[str, ...]] = tuple(onset + rime for onset in _ONSETS for rime in _RIMES)

ENDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "first": _words(
        """ia ric ela ton ina us ette an is ola mund wen ko ra dis eth o ley na vin sa bert mi
        tas"""
    ),
    "last": _words(
        """vik strand berg dahl mark quist holt nov sky gren lund bach stein tano dorf feld kamp
        rup scu tham zig by croft wyn"""
    ),
    "place": _words(
        """ford moor wick ham bury dale stead mere combe thorpe haven brook cliff gate minster
        port shaw field marsh ness"""
    ),
    "proper": _words(
        """ix ana ona eva une ax ori esk und ith alle ost ard ume ane ox ire ell unt esse"""
    ),
    "brand": _words(
        """zo pix lium tron dex fo go bra vox quil tine plex zine mox nap lax chi puff trix lo"""
    ),
    "street": _words("son man ker ter ler ward den kin bard nell row low pole sett cup fin"),
}

_INSTITUTIONS: Final = _words(
    """Library Museum Bakery School Brewery Theatre Hospital Workshop Mill Clinic Bank Hotel
    Garden College Observatory Inn"""
)
_GOODS: Final = _words("Tea Lamp Soap Clock Kettle Boot Cheese Pen Blanket Radio Jam Chair")
_GATHERINGS: Final = _words("Fair Festival Regatta Market Parade Concert")
_STREETS: Final = _words("Street Lane Road Square")
_MONTHS: Final = _words(
    """January February March April May June July August September October November December"""
)
HANDBOOK_SEED: Final = "handbook 40"
_ONE_IN: Final = 5  # one word or value in five is held out


@cache
def made_up_words(category: str, split: Split) -> tuple[str, ...]:
    """All words of a category (a key of ``ENDINGS``) that belong to one split."""
    endings = ENDINGS[category]
    return tuple(
        start + ending
        for i, start in enumerate(STARTS)
        for j, ending in enumerate(endings)
        if ((i + i // len(_RIMES) + 2 * j) % _ONE_IN == 2) == (split == "heldout")
    )


@cache
def _syllables() -> dict[str, tuple[str, str]]:
    return {s + e: (s, e) for endings in ENDINGS.values() for s in STARTS for e in endings}


def mark_syllables(text: str, boundary: str) -> str:
    """``text`` with ``boundary`` around every made-up word and between its two syllables.

    Tokenizers are trained on this form, so that no learned piece spans two syllables, or a
    syllable and the space before it.
    """
    table = _syllables()

    def mark(match: re.Match[str]) -> str:
        word = match.group()
        parts = table.get(word, (word,))
        return boundary + boundary.join(parts)

    return re.sub(r"[A-Z][a-z]*", mark, text)


def split_of_value(kind: str, value: int) -> Split:
    """The split a number belongs to, by a fixed hash of its kind and value."""
    mixed = (value * 2654435761 + sum(map(ord, kind)) * 40503) % (1 << 32)
    mixed ^= mixed >> 15
    mixed = mixed * 2246822519 % (1 << 32)
    return "heldout" if (mixed ^ (mixed >> 13)) % _ONE_IN == 0 else "train"


@dataclass
class Names:
    """Draws names and values of one split; never the same made-up word twice in one scene."""

    rng: random.Random
    split: Split
    _used: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """Start a new scene: every word may be drawn again."""
        self._used.clear()

    def word(self, category: str) -> str:
        """A made-up word of a category (a key of ``ENDINGS``)."""
        words = made_up_words(category, self.split)
        for _ in range(100):
            word = self.rng.choice(words)
            if word not in self._used:
                break
        self._used.add(word)
        return word

    def value(self, kind: str, low: int, high: int) -> int:
        """A number in [low, high] that belongs to this split for this kind of value."""
        while True:
            value = self.rng.randint(low, high)
            if split_of_value(kind, value) == self.split:
                return value

    def person(self) -> str:
        """First and last name: ``Maren Tolvik``."""
        return f"{self.word('first')} {self.word('last')}"

    def place(self) -> str:
        """A settlement: ``Halmoor``."""
        return self.word("place")

    def institution(self) -> str:
        """A name and what it is: ``Jorith Museum``."""
        return f"{self.word('proper')} {self.rng.choice(_INSTITUTIONS)}"

    def product(self) -> str:
        """A brand and what it is: ``Vorlo Lamp``."""
        return f"{self.word('brand')} {self.rng.choice(_GOODS)}"

    def event(self) -> str:
        """A name and what it is: ``Falori Concert``."""
        return f"{self.word('proper')} {self.rng.choice(_GATHERINGS)}"

    def address(self) -> str:
        """House number and street: ``14 Miller Street``."""
        street = f"{self.word('street')} {self.rng.choice(_STREETS)}"
        return f"{self.value('house', 2, 99)} {street}"

    def year(self) -> str:
        """A year from 1640 to 1999."""
        return str(self.value("year", 1640, 1999))

    def count(self) -> str:
        """A number of two or three digits."""
        return str(self.value("count", 11, 999))

    def thousands(self) -> str:
        """A number of four digits."""
        return str(self.value("thousands", 1000, 9899))

    def price(self) -> str:
        """An amount of money: ``4.35 crowns``."""
        cents = self.value("price", 105, 2999)
        return f"{cents // 100}.{cents % 100:02d} crowns"

    def measure(self, unit: str, low: int, high: int) -> str:
        """A number with its unit: ``84 metres``."""
        return f"{self.value(unit, low, high)} {unit}"

    def time(self) -> str:
        """A time of day in steps of five minutes: ``8:15``."""
        minute = 5 * self.value("time", 6 * 12, 21 * 12)
        return f"{minute // 60}:{minute % 60:02d}"

    def date(self) -> str:
        """A day of the year: ``12 May``."""
        day = self.value("date", 0, 12 * 28 - 1)
        return f"{day % 28 + 1} {_MONTHS[day // 28]}"


# --------------------------------------------------------------------------------------------
# Relations: how a fact is told, asked and listed. {S} and {s} are the subject at the start of a
# sentence and inside it, {A} the answer. Patterns with {s} but no {S} always name the subject.
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    name: str
    skill: Skill
    label: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


def _relation(name: str, skill: Skill, label: str, told: str, asked: str) -> Relation:
    lines = tuple(line.strip() for line in told.strip().splitlines())
    questions = tuple(line.strip() for line in asked.strip().splitlines())
    return Relation(name, skill, label, lines, questions)


RELATIONS: Final[Mapping[Kind, tuple[Relation, ...]]] = {
    "institution": (
        _relation(
            "founder",
            "people",
            "Founder",
            """{S} was founded by {A}.
            {A} founded {s}.
            The founder of {s} was {A}.
            {S} owes its start to its founder, {A}.""",
            """Who founded {s}?
            Who was the founder of {s}?
            Which person founded {s}?
            Name the founder of {s}.""",
        ),
        _relation(
            "director",
            "people",
            "Director",
            """{S} is run by {A}.
            {A} is the director of {s}.
            The director of {s} is {A}.
            Today {A} runs {s}.""",
            """Who runs {s}?
            Who is the director of {s}?
            Which person runs {s} today?
            Name the director of {s}.""",
        ),
        _relation(
            "architect",
            "people",
            "Architect",
            """{S} was designed by {A}.
            {A} designed the building of {s}.
            The architect of {s} was {A}.
            {S} has a building by the architect {A}.""",
            """Who designed {s}?
            Who was the architect of {s}?
            Which architect designed {s}?
            Name the architect of {s}.""",
        ),
        _relation(
            "opened",
            "dates",
            "Opened in",
            """{S} opened in {A}.
            {S} first opened its doors in {A}.
            In {A} {s} was opened.
            {S} has been open since {A}.""",
            """When did {s} open?
            In which year did {s} open?
            In what year was {s} opened?
            What year did {s} first open?""",
        ),
        _relation(
            "hours",
            "dates",
            "Opens at",
            """{S} opens at {A} every day of the week.
            Every day {s} opens at {A}.
            {S} lets visitors in from {A}.
            The doors of {s} open at {A}.""",
            """At what time does {s} open?
            What time does {s} open each day?
            From what time is {s} open?
            At what hour do the doors of {s} open?""",
        ),
        _relation(
            "address",
            "places_products",
            "Address",
            """{S} stands at {A}.
            The address of {s} is {A}.
            {S} can be found at {A}.
            Visitors find {s} at {A}.""",
            """Where is {s}?
            What is the address of {s}?
            At what address is {s}?
            Where can {s} be found?""",
        ),
        _relation(
            "staff",
            "numbers",
            "Staff",
            """{S} employs {A} people.
            {A} people work at {s}.
            {S} has a staff of {A}.
            The staff of {s} numbers {A}.""",
            """How many people work at {s}?
            How many people does {s} employ?
            How large is the staff of {s}?
            What is the number of staff at {s}?""",
        ),
        _relation(
            "ticket",
            "numbers",
            "Entry",
            """{S} charges {A} for entry.
            Entry to {s} costs {A}.
            A ticket for {s} costs {A}.
            Visitors of {s} pay {A}.""",
            """How much does entry to {s} cost?
            What does a ticket for {s} cost?
            How much do visitors of {s} pay?
            What is the entry price of {s}?""",
        ),
        _relation(
            "product",
            "places_products",
            "Sells",
            """{S} sells the {A}.
            {S} is known for the {A}.
            The {A} is sold at {s}.
            Guests of {s} often buy the {A}.""",
            """What does {s} sell?
            Which product is {s} known for?
            Which product is sold at {s}?
            What product can one buy at {s}?""",
        ),
    ),
    "person": (
        _relation(
            "born",
            "dates",
            "Born in",
            """{S} was born in {A}.
            {S} came into the world in {A}.
            The birth year of {s} is {A}.
            In {A} {s} was born.""",
            """When was {s} born?
            In which year was {s} born?
            What is the birth year of {s}?
            What year was {s} born in?""",
        ),
        _relation(
            "birthplace",
            "places_products",
            "From",
            """{S} comes from {A}.
            {S} grew up in {A}.
            The home of {s} is {A}.
            {A} is where {s} grew up.""",
            """Where does {s} come from?
            Where did {s} grow up?
            In which place did {s} grow up?
            What is the home of {s}?""",
        ),
        _relation(
            "workplace",
            "places_products",
            "Works at",
            """{S} works at the {A}.
            {S} has a post at the {A}.
            The {A} employs {s}.
            The workplace of {s} is the {A}.""",
            """Where does {s} work?
            At which institution does {s} work?
            What is the workplace of {s}?
            Who employs {s}?""",
        ),
        _relation(
            "teacher",
            "people",
            "Teacher",
            """{S} was taught by {A}.
            {A} taught {s}.
            The teacher of {s} was {A}.
            {S} learned the trade from {A}.""",
            """Who taught {s}?
            Who was the teacher of {s}?
            From whom did {s} learn the trade?
            Name the teacher of {s}.""",
        ),
        _relation(
            "spouse",
            "people",
            "Married to",
            """{S} is married to {A}.
            {A} is married to {s}.
            {S} married {A}.
            The partner of {s} is {A}.""",
            """Who is married to {s}?
            Whom did {s} marry?
            Who is the partner of {s}?
            To whom is {s} married?""",
        ),
        _relation(
            "letters",
            "numbers",
            "Letters",
            """{S} wrote {A} letters.
            {S} left {A} letters behind.
            {A} letters by {s} survive.
            The archive keeps {A} letters by {s}.""",
            """How many letters did {s} write?
            How many letters by {s} are there?
            How many letters did {s} leave behind?
            What is the number of letters by {s}?""",
        ),
        _relation(
            "birthday",
            "dates",
            "Birthday",
            """{S} has a birthday on {A}.
            The birthday of {s} is {A}.
            Friends of {s} celebrate on {A}.
            {S} celebrates every year on {A}.""",
            """When is the birthday of {s}?
            On what day is the birthday of {s}?
            What is the birthday of {s}?
            On which date does {s} celebrate?""",
        ),
    ),
    "product": (
        _relation(
            "price",
            "numbers",
            "Price",
            """{S} costs {A}.
            The price of {s} is {A}.
            {S} is sold for {A}.
            Shops ask {A} for {s}.""",
            """How much does {s} cost?
            What is the price of {s}?
            What does {s} cost?
            How much do shops ask for {s}?""",
        ),
        _relation(
            "maker",
            "places_products",
            "Made by",
            """{S} is made by the {A}.
            The {A} makes {s}.
            The maker of {s} is the {A}.
            {S} comes out of the {A}.""",
            """Who makes {s}?
            Which institution makes {s}?
            What is the maker of {s}?
            By which institution is {s} made?""",
        ),
        _relation(
            "inventor",
            "people",
            "Inventor",
            """{S} was invented by {A}.
            {A} invented {s}.
            The inventor of {s} is {A}.
            {S} is an idea of the inventor {A}.""",
            """Who invented {s}?
            Who is the inventor of {s}?
            Which person invented {s}?
            Name the inventor of {s}.""",
        ),
        _relation(
            "introduced",
            "dates",
            "On sale since",
            """{S} went on sale in {A}.
            {S} has been sold since {A}.
            In {A} {s} came to the shops.
            The first year of {s} was {A}.""",
            """When did {s} go on sale?
            In which year did {s} go on sale?
            Since what year has {s} been sold?
            What year did {s} come to the shops?""",
        ),
        _relation(
            "weight",
            "numbers",
            "Weight",
            """{S} weighs {A}.
            The weight of {s} is {A}.
            {S} has a weight of {A}.
            With its box {s} weighs {A}.""",
            """How much does {s} weigh?
            What is the weight of {s}?
            How heavy is {s}?
            What does {s} weigh?""",
        ),
        _relation(
            "origin",
            "places_products",
            "Made in",
            """{S} is made in {A}.
            {S} is produced in {A}.
            Workers in {A} make {s}.
            The home of {s} is {A}.""",
            """Where is {s} made?
            In which place is {s} made?
            Where is {s} produced?
            What is the home of {s}?""",
        ),
    ),
    "place": (
        _relation(
            "population",
            "numbers",
            "Population",
            """{S} has {A} inhabitants.
            {A} people live in {s}.
            The population of {s} is {A}.
            {S} is home to {A} people.""",
            """How many people live in {s}?
            What is the population of {s}?
            How many inhabitants does {s} have?
            How large is the population of {s}?""",
        ),
        _relation(
            "mayor",
            "people",
            "Mayor",
            """{S} has a mayor called {A}.
            The mayor of {s} is {A}.
            {A} is the mayor of {s}.
            {S} elected {A} as mayor.""",
            """Who is the mayor of {s}?
            Which person is mayor of {s}?
            Name the mayor of {s}.
            Who was elected mayor of {s}?""",
        ),
        _relation(
            "neighbour",
            "places_products",
            "Next to",
            """{S} lies next to {A}.
            {S} borders on {A}.
            The neighbour of {s} is {A}.
            A road leads from {s} to its neighbour {A}.""",
            """What lies next to {s}?
            Which place borders on {s}?
            What is the neighbour of {s}?
            Next to which place does {s} lie?""",
        ),
        _relation(
            "distance",
            "numbers",
            "Distance to the sea",
            """{S} lies {A} from the sea.
            The sea is {A} from {s}.
            It is {A} from {s} to the sea.
            {S} is {A} away from the sea.""",
            """How far is {s} from the sea?
            How far is it from {s} to the sea?
            What is the distance from {s} to the sea?
            How many kilometres from the sea is {s}?""",
        ),
        _relation(
            "settled",
            "dates",
            "Settled in",
            """{S} was settled in {A}.
            The first families came to {s} in {A}.
            In {A} {s} was first settled.
            {S} goes back to the year {A}.""",
            """When was {s} settled?
            In which year was {s} settled?
            When did the first families come to {s}?
            To what year does {s} go back?""",
        ),
        _relation(
            "bridge",
            "numbers",
            "Bridge",
            """{S} has a bridge of {A}.
            The bridge of {s} is {A} long.
            {S} is proud of a bridge that measures {A}.
            The length of the bridge in {s} is {A}.""",
            """How long is the bridge of {s}?
            What is the length of the bridge in {s}?
            How long is the bridge in {s}?
            How many metres does the bridge of {s} measure?""",
        ),
    ),
    "event": (
        _relation(
            "date",
            "dates",
            "Date",
            """{S} takes place on {A}.
            {S} is held on {A}.
            The date of {s} is {A}.
            Every year {s} begins on {A}.""",
            """When does {s} take place?
            On what date is {s} held?
            What is the date of {s}?
            On which day does {s} begin?""",
        ),
        _relation(
            "visitors",
            "numbers",
            "Visitors",
            """{S} draws {A} visitors.
            {A} visitors come to {s}.
            The number of visitors at {s} is {A}.
            {S} had {A} visitors last year.""",
            """How many visitors come to {s}?
            How many visitors does {s} draw?
            What is the number of visitors at {s}?
            How many visitors did {s} have?""",
        ),
        _relation(
            "venue",
            "places_products",
            "Held in",
            """{S} is held in {A}.
            {S} takes place in {A}.
            The home of {s} is {A}.
            {A} is where {s} takes place.""",
            """Where is {s} held?
            In which place is {s} held?
            Where does {s} take place?
            What is the home of {s}?""",
        ),
        _relation(
            "organiser",
            "people",
            "Organiser",
            """{S} is organised by {A}.
            {A} organises {s}.
            The organiser of {s} is {A}.
            {S} is in the hands of its organiser, {A}.""",
            """Who organises {s}?
            Who is the organiser of {s}?
            Which person organises {s}?
            Name the organiser of {s}.""",
        ),
        _relation(
            "first_held",
            "dates",
            "First held in",
            """{S} was first held in {A}.
            The first time {s} was held was {A}.
            In {A} {s} was held for the first time.
            {S} has been held since {A}.""",
            """When was {s} first held?
            In which year was {s} first held?
            Since what year has {s} been held?
            What year was {s} held for the first time?""",
        ),
        _relation(
            "fee",
            "numbers",
            "Fee",
            """{S} costs {A} to attend.
            A place at {s} costs {A}.
            The fee for {s} is {A}.
            Guests pay {A} at {s}.""",
            """How much does {s} cost to attend?
            What is the fee for {s}?
            What does a place at {s} cost?
            How much do guests pay at {s}?""",
        ),
    ),
}
KINDS: Final[tuple[Kind, ...]] = tuple(RELATIONS)


def _head_count(names: Names) -> str:
    return names.thousands() if names.rng.random() < 0.5 else names.count()


_DRAWS: Final[Mapping[str, Callable[[Names], str]]] = {
    "opened": Names.year,
    "born": Names.year,
    "introduced": Names.year,
    "settled": Names.year,
    "first_held": Names.year,
    "hours": Names.time,
    "birthday": Names.date,
    "date": Names.date,
    "address": Names.address,
    "staff": Names.count,
    "letters": Names.count,
    "population": _head_count,
    "visitors": _head_count,
    "ticket": Names.price,
    "price": Names.price,
    "fee": Names.price,
    "weight": lambda names: names.measure("grams", 20, 980),
    "distance": lambda names: names.measure("kilometres", 2, 98),
    "bridge": lambda names: names.measure("metres", 12, 480),
    "product": Names.product,
    "workplace": Names.institution,
    "maker": Names.institution,
    "birthplace": Names.place,
    "origin": Names.place,
    "neighbour": Names.place,
    "venue": Names.place,
}


def _draw_answer(names: Names, relation: Relation, people: Sequence[str]) -> str:
    """A value for a relation; one person in four is somebody the scene already knows."""
    if relation.skill != "people":
        return _DRAWS[relation.name](names)
    if people and names.rng.random() < 0.25:
        return names.rng.choice(people)
    return names.person()


# --------------------------------------------------------------------------------------------
# Entities and passages
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One thing that is so: ``subject`` (a full name), relation, answer."""

    kind: Kind
    subject: str
    relation: Relation
    answer: str


@dataclass(frozen=True)
class Entity:
    """Something with a name and facts. ``article`` is ``"the "`` where the name takes one."""

    kind: Kind
    name: str
    facts: tuple[Fact, ...]
    pronoun: str

    @property
    def full(self) -> str:
        """The name inside a sentence, with its article."""
        return _with_article(self.kind, self.name)


def _with_article(kind: Kind, name: str) -> str:
    return name if kind in ("person", "place") else f"the {name}"


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def draw_entity(
    names: Names, kind: Kind, n_facts: int, people: Sequence[str] = (), name: str | None = None
) -> Entity:
    """A new entity with ``n_facts`` facts (at most as many as its kind has relations)."""
    rng = names.rng
    if name is None:
        match kind:
            case "institution":
                name = names.institution()
            case "person":
                name = names.person()
            case "product":
                name = names.product()
            case "place":
                name = names.place()
            case "event":
                name = names.event()
    relations = rng.sample(RELATIONS[kind], min(n_facts, len(RELATIONS[kind])))
    others = [person for person in people if person != name]
    facts = tuple(
        Fact(kind, name, relation, _draw_answer(names, relation, others)) for relation in relations
    )
    pronoun = rng.choice(("She", "He")) if kind == "person" else "It"
    return Entity(kind, name, facts, pronoun)


def _sentence(rng: random.Random, entity: Entity, fact: Fact, first: bool) -> str:
    pattern = rng.choice(fact.relation.statements)
    full = entity.full
    start = _upper_first(full)
    if not first and "{S}" in pattern:
        chance = rng.random()
        if chance < 0.2:
            start = entity.pronoun
        elif chance < 0.35 and entity.kind in ("institution", "event", "product"):
            start = f"The {entity.name.split()[-1].lower()}"
        elif chance < 0.35 and entity.kind == "person":
            start = entity.name.split()[-1]
    return _upper_first(pattern.format(S=start, s=full, A=fact.answer))


def render_passage(rng: random.Random, entity: Entity, style: float | None = None) -> str:
    """The entity's facts as text in random order: list, headed prose, prose and list, or prose.

    ``style`` in [0, 1) chooses among them, drawn when it is not given.
    """
    facts = list(entity.facts)
    rng.shuffle(facts)
    style = rng.random() if style is None else style
    if style < 0.2:
        mark = rng.choice(("- ", "* ", "- ", ""))
        head = rng.choice(("# {}\n", "## {}\n", "{}:\n", "# {}\n\n", "**{}**\n"))
        return head.format(entity.name) + _bullets(facts, mark)
    told = len(facts) if style < 0.42 or style > 0.5 else (len(facts) + 1) // 2
    sentences = [
        _sentence(rng, entity, fact, index == 0) for index, fact in enumerate(facts[:told])
    ]
    gap = rng.choice((" ", " ", " ", "\n", "\n\n"))
    middle = rng.randint(0, told)
    prose = gap.join(filter(None, (" ".join(sentences[:middle]), " ".join(sentences[middle:]))))
    if style < 0.5:
        prose = rng.choice(("# {}\n\n", "## {}\n\n", "## {}\n")).format(entity.name) + prose
    return f"{prose}\n\n{_bullets(facts[told:], '- ')}" if facts[told:] else prose


def _bullets(facts: Sequence[Fact], mark: str) -> str:
    return "\n".join(f"{mark}{fact.relation.label}: {fact.answer}" for fact in facts)


def phrase_question(rng: random.Random, kind: Kind, name: str, relation: Relation) -> str:
    """A question about one relation of a named subject; one in ten drops the article."""
    subject = name if rng.random() < 0.1 else _with_article(kind, name)
    return rng.choice(relation.questions).format(s=subject)


# --------------------------------------------------------------------------------------------
# Scenes: some passages, and everything that can be asked about them
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A question, its exact answer, the skill it needs, and the passages it is asked about."""

    question: str
    answer: str
    skill: Skill
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Scene:
    """Entities, their passages (same order), and names that no passage mentions."""

    entities: tuple[Entity, ...]
    passages: tuple[Passage, ...]
    absent: tuple[tuple[Kind, str], ...]

    def ask(self, rng: random.Random, skill: Skill) -> Case | None:
        """A question for one skill about this scene, or None when the scene has none."""
        if skill == "not_stated":
            return self._ask_missing(rng)
        facts = [f for e in self.entities for f in e.facts if f.relation.skill == skill]
        if not facts:
            return None
        fact = rng.choice(facts)
        question = phrase_question(rng, fact.kind, fact.subject, fact.relation)
        return Case(question, fact.answer, skill, self.passages)

    def _ask_missing(self, rng: random.Random) -> Case:
        """A relation the passages leave out, or a subject they do not mention."""
        if rng.random() < 0.6:
            entity = rng.choice(self.entities)
            told = {fact.relation.name for fact in entity.facts}
            missing = [r for r in RELATIONS[entity.kind] if r.name not in told]
            if missing:
                question = phrase_question(rng, entity.kind, entity.name, rng.choice(missing))
                return Case(question, NOT_STATED, "not_stated", self.passages)
        kind, name = rng.choice(self.absent)
        told_here = [f.relation for e in self.entities if e.kind == kind for f in e.facts]
        relation = rng.choice(told_here or list(RELATIONS[kind]))
        question = phrase_question(rng, kind, name, relation)
        return Case(question, NOT_STATED, "not_stated", self.passages)


def draw_scene(
    names: Names, n_passages: int, facts: tuple[int, int] = (2, 6), same_kind: float = 0.5
) -> Scene:
    """``n_passages`` passages, one entity each, at times (``same_kind``) all of the same kind.

    ``facts`` bounds how many facts an entity has (both ends included).
    """
    names.forget()
    rng = names.rng
    same: Kind | None = rng.choice(KINDS) if rng.random() < same_kind else None
    kinds: list[Kind] = [rng.choice(KINDS) if same is None else same for _ in range(n_passages)]
    people: list[str] = []
    entities: list[Entity] = []
    for kind in kinds:
        entity = draw_entity(names, kind, rng.randint(*facts), people)
        entities.append(entity)
        if kind == "person":
            people.append(entity.name)
        people += [fact.answer for fact in entity.facts if fact.relation.skill == "people"]
    absent_kinds = [rng.choice(kinds), rng.choice(kinds)]
    absent = tuple((kind, draw_entity(names, kind, 0).name) for kind in absent_kinds)
    passages = tuple(
        Passage(entity.name.lower().replace(" ", "-") + ".md", render_passage(rng, entity))
        for entity in entities
    )
    return Scene(tuple(entities), passages, absent)


# --------------------------------------------------------------------------------------------
# Arithmetic word problems
# --------------------------------------------------------------------------------------------

_THINGS: Final = _words(
    """apples pears eggs books coins stamps candles buttons cups nails lamps letters shells
    tickets"""
)
_FIRST: Final[Mapping[str, tuple[str, ...]]] = {
    "+": (
        "{n} has {a} {t} and buys {b} more.",
        "{n} has {a} {t}. {m} gives {n} {b} more {t}.",
        "There are {a} {t} in one box and {b} {t} in another.",
        "{n} finds {a} {t} on Monday and {b} {t} on Tuesday.",
    ),
    "-": (
        "{n} has {a} {t} and gives {b} of them to {m}.",
        "A shop has {a} {t} and sells {b} of them.",
        "There are {a} {t} in a box. {n} takes {b} of them away.",
        "{n} has {a} {t} and loses {b} of them.",
    ),
    "*": (
        "{n} has {a} boxes with {b} {t} in each box.",
        "There are {a} bags. Each bag holds {b} {t}.",
        "{n} buys {b} {t} a day for {a} days.",
        "{a} people bring {b} {t} each.",
    ),
}
_THEN: Final[Mapping[str, tuple[str, ...]]] = {
    "+": (
        "Then {c} more {t} arrive.",
        "Later {c} more {t} are added.",
        "Then {m} brings {c} more {t}.",
    ),
    "-": (
        "Then {c} {t} are taken away.",
        "Later {c} of the {t} break.",
        "Then {m} uses {c} of the {t}.",
    ),
}
_HOW_MANY: Final = (
    "How many {t} are there now?",
    "How many {t} is that in the end?",
    "How many {t} are left at the end?",
    "What is the number of {t} now?",
)


def _apply(op: str, a: int, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def _draw_numbers(names: Names, two_steps: bool) -> tuple[str, str, int, int, int]:
    """Operations and numbers of a problem of this split: (first op, second op or "", a, b, c)."""
    rng = names.rng
    while True:
        op = rng.choice(("+", "+", "-", "-", "*"))
        then = rng.choice(("+", "-")) if two_steps else ""
        if op == "*":
            a, b = rng.randint(2, 9), rng.randint(2, 11)
        else:
            a, b = rng.randint(2, 97), rng.randint(2, 97)
        c = rng.randint(2, 97) if two_steps else 0
        middle = _apply(op, a, b)
        result = _apply(then, middle, c) if two_steps else middle
        if not (0 < middle < 100 and 0 < result < 100):
            continue
        if split_of_value(f"problem {op}{then}", (a * 100 + b) * 100 + c) == names.split:
            return op, then, a, b, c


def _worked_out(op: str, then: str, a: int, b: int, c: int) -> str:
    middle = result = _apply(op, a, b)
    steps = [f"{a} {op} {b} = {middle}."]
    if then:
        result = _apply(then, middle, c)
        steps.append(f"{middle} {then} {c} = {result}.")
    return " ".join([*steps, f"The answer is {result}."])


def draw_problem(names: Names) -> Case:
    """A one- or two-step word problem; every number in it, and in its steps, is below 100."""
    names.forget()
    rng = names.rng
    op, then, a, b, c = _draw_numbers(names, rng.random() < 0.5)
    first, last = names.word("first"), names.word("first")
    values = {"a": a, "b": b, "c": c, "t": rng.choice(_THINGS), "n": first, "m": last}
    patterns = [rng.choice(_FIRST[op]), *([rng.choice(_THEN[then])] if then else [])]
    question = " ".join([*patterns, rng.choice(_HOW_MANY)]).format(**values)
    return Case(question, _worked_out(op, then, a, b, c), "arithmetic")


def draw_sum(names: Names) -> Case:
    """A bare sum such as ``What is 12 + 7 - 4?``, answered like a word problem."""
    rng = names.rng
    op, then, a, b, c = _draw_numbers(names, rng.random() < 0.3)
    asked = f"{a} {op} {b} {then} {c}" if then else f"{a} {op} {b}"
    question = rng.choice(("What is {}?", "{} = ?", "Work out {}.", "How much is {}?")).format(
        asked
    )
    return Case(question, _worked_out(op, then, a, b, c), "arithmetic")


def draw_sum_list(names: Names) -> Case:
    """Several bare sums at once: ``Work out: 12 + 7; 9 * 3``, answered in the same order."""
    rng = names.rng
    drawn = [_draw_numbers(names, two_steps=False) for _ in range(rng.randint(3, 7))]
    asked = "; ".join(f"{a} {op} {b}" for op, _, a, b, _ in drawn)
    worked_out = "; ".join(f"{a} {op} {b} = {_apply(op, a, b)}" for op, _, a, b, _ in drawn)
    return Case(f"Work out: {asked}", worked_out, "arithmetic")


# --------------------------------------------------------------------------------------------
# Questions for an agent with the tools of `agents`: look_up and calculate
# --------------------------------------------------------------------------------------------

# What is asked about an amount that a passage tells: the question, and the operation on it.
_AMOUNTS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "price": (
        ("How much do {n} pieces of {s} cost?", "*"),
        ("What is the price of {n} pieces of {s}?", "*"),
        ("What does {s} cost with {m} for postage?", "+"),
    ),
    "ticket": (
        ("How much do {n} tickets for {s} cost?", "*"),
        ("How much do {n} visitors of {s} pay together?", "*"),
        ("What does entry to {s} cost with {m} for a guide?", "+"),
    ),
    "fee": (
        ("How much do {n} guests pay at {s}?", "*"),
        ("What do {n} places at {s} cost?", "*"),
        ("What is the fee for {s} with {m} for a guide?", "+"),
    ),
    "weight": (
        ("How much do {n} pieces of {s} weigh?", "*"),
        ("What is the weight of {n} pieces of {s}?", "*"),
    ),
    "staff": (
        ("How many people work at {s} when {c} more join?", "+"),
        ("How large is the staff of {s} when {c} leave?", "-"),
    ),
    "letters": (
        ("How many letters by {s} are there when {c} more are found?", "+"),
        ("How many letters by {s} are there when {c} are lost?", "-"),
    ),
    "population": (
        ("How many people live in {s} when {c} more arrive?", "+"),
        ("How many people live in {s} when {c} leave?", "-"),
    ),
    "visitors": (
        ("How many visitors come to {s} when {c} more come?", "+"),
        ("How many visitors come to {s} when {c} stay at home?", "-"),
    ),
}
_SMALL_TALK: Final = (
    ("Hello.", "Hello. What would you like to know?"),
    ("Hello!", "Hello. What would you like to know?"),
    ("Good morning.", "Hello. What would you like to know?"),
    ("Hi!", "Hello. What would you like to know?"),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye."),
)
# What a person says of herself or himself, and what is asked about it later.
_SAID: Final[tuple[tuple[str, str, Callable[[Names], str]], ...]] = (
    ("My name is {A}.", "What is my name?", Names.person),
    ("I live in {A}.", "Where do I live?", Names.place),
    ("I work at the {A}.", "Where do I work?", Names.institution),
    ("I have bought the {A}.", "What have I bought?", Names.product),
    ("My friend is called {A}.", "What is my friend called?", Names.person),
    ("I have {A} in my purse.", "How much do I have in my purse?", Names.price),
)
_NOTED: Final = "I will remember that."
_AGAIN: Final = ("Please repeat your answer.", "What was that again?")


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool: its name, its only argument, and what it returned."""

    tool: str
    argument: str
    result: str


@dataclass(frozen=True)
class AgentCase:
    """A question, the uses of tools that answer it, its exact answer, and the turns before it."""

    question: str
    answer: str
    need: Need
    uses: tuple[ToolUse, ...] = ()
    earlier: tuple[AgentCase, ...] = ()


def draw_agent_case(names: Names, need: Need) -> AgentCase:
    """A question that needs the tools ``need`` says; at times with one or two turns before it."""
    rng = names.rng
    names.forget()
    case = _draw_agent_case(names, need)
    if case.earlier:
        return case
    before = rng.choices((0, 1, 2), (6, 3, 1))[0]
    among: tuple[Need, ...] = ("none", "calculate", "look_up")
    needs = rng.choices(among, (6, 3, 2), k=before)
    return replace(case, earlier=tuple(_draw_alone(names, each) for each in needs))


def _draw_alone(names: Names, need: Need) -> AgentCase:
    """A case that refers to no turn before it."""
    while True:
        case = _draw_agent_case(names, need)
        if not case.earlier:
            return case


def _draw_agent_case(names: Names, need: Need) -> AgentCase:
    match need:
        case "look_up":
            return _draw_reading(names)
        case "calculate":
            return _draw_reckoning(names)
        case "both":
            return _draw_reading_and_reckoning(names)
        case "none":
            return _draw_talk(names)


def _draw_found(names: Names, entity: Entity, n_others: int) -> ToolUse:
    """What looking up an entity returns: its passage, mostly first, and some of others."""
    rng = names.rng
    others = [draw_entity(names, rng.choice(KINDS), rng.randint(2, 5)) for _ in range(n_others)]
    found = [entity, *others] if entity.facts else others
    if rng.random() < 0.2:
        rng.shuffle(found)
    passages = [Passage(each.name, render_passage(rng, each)) for each in found]
    return ToolUse("look_up", entity.name, one_line(passages))


def _draw_reading(names: Names) -> AgentCase:
    """One fact of an entity; one in seven times it is not stated."""
    rng = names.rng
    kind = rng.choice(KINDS)
    n_others = rng.choice((0, 1, 1, 1, 2))
    if rng.random() < 0.05:
        nobody = draw_entity(names, kind, 0)
        asked = phrase_question(rng, kind, nobody.name, rng.choice(RELATIONS[kind]))
        use = _draw_found(names, nobody, max(1, n_others))
        return AgentCase(asked, NOT_STATED, "look_up", (use,))
    entity = draw_entity(names, kind, rng.randint(2, 5))
    use = _draw_found(names, entity, n_others)
    told = {fact.relation.name for fact in entity.facts}
    missing = [relation for relation in RELATIONS[kind] if relation.name not in told]
    if missing and rng.random() < 0.1:
        asked = phrase_question(rng, kind, entity.name, rng.choice(missing))
        return AgentCase(asked, NOT_STATED, "look_up", (use,))
    fact = rng.choice(entity.facts)
    asked = phrase_question(rng, kind, entity.name, fact.relation)
    return AgentCase(asked, fact.answer, "look_up", (use,))


def _draw_reading_and_reckoning(names: Names) -> AgentCase:
    """An amount that is looked up, then multiplied, added to or taken from."""
    rng = names.rng
    while True:
        entity = draw_entity(names, rng.choice(KINDS), rng.randint(2, 5))
        facts = [fact for fact in entity.facts if fact.relation.name in _AMOUNTS]
        if not facts:
            continue
        fact = rng.choice(facts)
        pattern, op = rng.choice(_AMOUNTS[fact.relation.name])
        amount, _, unit = fact.answer.partition(" ")
        n, c, m = str(names.value("factor", 2, 30)), names.count(), names.price()
        if op != "-" or int(c) < int(amount):
            break
    other = n if "{n}" in pattern else c if "{c}" in pattern else m.split()[0]
    expression = f"{other} * {amount}" if op == "*" else f"{amount} {op} {other}"
    result = calculate(expression)
    subject = entity.name if rng.random() < 0.1 else entity.full
    return AgentCase(
        pattern.format(n=n, c=c, m=m, s=subject),
        f"{result} {unit}".strip(),
        "both",
        (
            _draw_found(names, entity, rng.choice((0, 1, 1, 1, 2))),
            ToolUse("calculate", expression, result),
        ),
    )


def _draw_reckoning(names: Names) -> AgentCase:
    """A bare sum or a word problem, with numbers that need a calculator."""
    rng = names.rng
    bare = rng.random() < 0.5
    while True:
        op = rng.choice(("+", "-", "*"))
        then = rng.choice(("", "+", "-"))
        high = 999 if rng.random() < 0.6 else 99
        a, b, c = (rng.randint(2, high) for _ in range(3))
        if op == "*":
            a = rng.randint(2, 99)
        numbers = [str(a), str(b), str(c)]
        if bare and rng.random() < 0.3:
            numbers[rng.randrange(2)] = f"{rng.randint(105, 9999) / 100:.2f}"
        expression = f"{numbers[0]} {op} {numbers[1]}" + (f" {then} {numbers[2]}" if then else "")
        if bare and then and op != "*" and rng.random() < 0.25:
            expression = f"({numbers[0]} {op} {numbers[1]}) * {numbers[2]}"
        key = int("".join(filter(str.isdigit, expression)))
        result = calculate(expression)
        if split_of_value(f"sum {op}{then}", key) == names.split and not result.startswith("-"):
            break
    if bare:
        asked = rng.choice(
            ("What is {}?", "{} = ?", "Work out {}.", "How much is {}?", "Calculate {}.")
        ).format(expression)
    else:
        values = {"a": a, "b": b, "c": c, "t": rng.choice(_THINGS)}
        values |= {"n": names.word("first"), "m": names.word("first")}
        patterns = [rng.choice(_FIRST[op]), *([rng.choice(_THEN[then])] if then else [])]
        asked = " ".join([*patterns, rng.choice(_HOW_MANY)]).format(**values)
    return AgentCase(asked, result, "calculate", (ToolUse("calculate", expression, result),))


def _draw_talk(names: Names) -> AgentCase:
    """Small talk, or something that was said before."""
    rng = names.rng
    chance = rng.random()
    if chance < 0.25:
        return AgentCase(*rng.choice(_SMALL_TALK), "none")
    if chance < 0.4:
        before = _draw_agent_case(names, rng.choice(("look_up", "calculate")))
        return AgentCase(rng.choice(_AGAIN), before.answer, "none", earlier=(before,))
    drawn = rng.sample(_SAID, rng.randint(1, 3))
    told = [(said, asked, draw(names)) for said, asked, draw in drawn]
    said, asked, answer = told[0]
    if chance < 0.55:
        return AgentCase(said.format(A=answer), _NOTED, "none")
    rng.shuffle(told)
    earlier = [AgentCase(said.format(A=value), _NOTED, "none") for said, _, value in told]
    return AgentCase(asked, answer, "none", earlier=tuple(earlier))


# --------------------------------------------------------------------------------------------
# The handbook: Markdown documents about one town
# --------------------------------------------------------------------------------------------

_CHAPTERS: Final[tuple[tuple[Kind, int], ...]] = (
    ("place", 2),
    ("institution", 4),
    ("person", 2),
    ("product", 2),
    ("event", 2),
)


@dataclass(frozen=True)
class Handbook:
    """Documents (file name, text) and questions (question, answer, source or None, skill)."""

    documents: Mapping[str, str]
    questions: tuple[tuple[str, str, str | None, Skill], ...]


def write_handbook(folder: Path) -> None:
    """Write the shipped handbook: its documents and ``questions.jsonl``."""
    handbook = draw_handbook(Names(random.Random(HANDBOOK_SEED), "heldout"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in handbook.documents.items():
        (folder / name).write_text(text, encoding="utf-8")
    keys = ("question", "answer", "source", "skill")
    lines = [json.dumps(dict(zip(keys, line, strict=True))) for line in handbook.questions]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_handbook(names: Names, n_missing: int = 10) -> Handbook:
    """A small town's handbook: one document per entity, a question per fact and some without."""
    names.forget()
    rng = names.rng
    people = [names.person() for _ in range(dict(_CHAPTERS)["person"])]
    documents: dict[str, str] = {}
    questions: list[tuple[str, str, str | None, Skill]] = []
    missing: list[tuple[str, str, str | None, Skill]] = []
    unnamed = list(people)
    for kind, n_entities in _CHAPTERS:
        for _ in range(n_entities):
            name = unnamed.pop(0) if kind == "person" else None
            n_facts = len(RELATIONS[kind]) - 2 if kind == "institution" else 5
            entity = draw_entity(names, kind, n_facts, people, name)
            source = entity.name.lower().replace(" ", "-") + ".md"
            documents[source] = render_passage(rng, entity, rng.uniform(0.2, 0.5)) + "\n"
            documents[source] = documents[source].replace("## ", "# ", 1)
            for fact in entity.facts:
                asked = phrase_question(rng, kind, entity.name, fact.relation)
                questions.append((asked, fact.answer, source, fact.relation.skill))
            told = {fact.relation.name for fact in entity.facts}
            for relation in RELATIONS[kind]:
                if relation.name not in told:
                    asked = phrase_question(rng, kind, entity.name, relation)
                    missing.append((asked, NOT_STATED, None, "not_stated"))
    questions += rng.sample(missing, n_missing)
    return Handbook(documents, tuple(questions))


# --------------------------------------------------------------------------------------------
# Evaluation cases
# --------------------------------------------------------------------------------------------


def draw_case(names: Names, skill: Skill, n_passages: int = 3) -> Case:
    """One case for ``skill``; reading skills get ``n_passages`` passages with distractors."""
    if skill == "arithmetic":
        return draw_problem(names)
    while True:
        case = draw_scene(names, n_passages).ask(names.rng, skill)
        if case is not None:
            return case


def is_correct(case: Case, text: str) -> bool:
    """Exact match of the answer; for arithmetic of the final number."""
    return final_answer(text) == final_answer(case.answer)
