"""Relations of each kind of entity, with patterns that state a fact, ask for it and list it.

``{S}`` is the subject at the start of a sentence, ``{s}`` the subject inside one, and ``{A}`` the
answer. A pronoun may replace ``{S}``. Patterns with ``{s}`` but no ``{S}`` always name the subject.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from training.world.cases import Skill

Kind = Literal["institution", "person", "product", "place", "event"]


@dataclass(frozen=True)
class Relation:
    """A relation between an entity and a value.

    ``label`` names the relation in lists. ``statements`` and ``questions`` are sentence patterns.
    """

    name: str
    skill: Skill
    label: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


def _relation(name: str, skill: Skill, label: str, statements: str, questions: str) -> Relation:
    return Relation(name, skill, label, _lines(statements), _lines(questions))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


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
