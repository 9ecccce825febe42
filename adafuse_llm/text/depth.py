"""How deep a grammar is once its references are followed, before native code reads it.

llguidance compiles grammars recursively, so its stack grows with their depth. It limits the
brackets inside each other, but not the rules and references that lead to each other. A chain of
1,100 references in a schema, or of 2,800 rules, ends the process with a segmentation fault.

The depth of a rule is that of its body, in which a rule that it refers to stands for its own body.
Rules that refer to each other in a circle count together, because they can be read in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from adafuse_llm.errors import GrammarError, short_repr

MAX_CHARACTERS = 1_000_000
"""Maximum number of characters in a grammar."""

MAX_RULE_DEPTH = 1_000
"""Maximum depth of a Lark grammar: rules that refer to each other, and groups inside them.
llguidance crashes at 2,800 rules if the stack has 8 MiB."""

MAX_SCHEMA_DEPTH = 600
"""Maximum depth of a JSON schema: lists and objects inside each other, and references. llguidance
crashes at 2,200."""

MAX_REGEX_DEPTH = 100
"""Maximum depth of a regular expression: groups, classes and repetitions inside each other.
llguidance refuses more than 250."""

MAX_NESTED_GRAMMARS = 10
"""Maximum number of grammars inside each other. llguidance refuses more than 14."""


_TOKEN = re.compile(
    r"""
      (?P<skip>[ \t\r\\]+|(?://|\#)[^\n]*)
    | (?P<line>\n)
    | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
    | /(?P<regex>(?:[^/\\]|\\.)+)/[imslux]*
    | (?P<special><[^<>\s]+>)
    | %(?P<keyword>[a-z]+)
    | (?P<name>[_a-zA-Z][_a-zA-Z0-9-]*)
    | (?P<open>[(\[{])
    | (?P<close>[)\]}])
    | (?P<colon>:)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_REGEX_PART = re.compile(
    r"\\.|(?P<open>[(\[])|(?P<close>[)\]])|(?P<repeats>(?:[*+?]|\{[0-9,]*\})+)", re.DOTALL
)
_REPEAT = re.compile(r"[*+?]|\{")

_Graph = dict[Any, "_Part"]
_JSON = json.JSONDecoder()


def check_grammar(lark: str) -> None:
    """Check the depth of a grammar in llguidance's dialect of Lark, and that of its schemas.

    Raises:
        GrammarError: the grammar is too deep or too long.
    """
    _check_length(lark)
    _LarkReader(lark).read(0)


def check_schema(schema: Any) -> int:
    """Return the depth of a JSON schema.

    Raises:
        GrammarError: the schema is too deep, or it refers to something else than its own parts.
    """
    depth = _Depths(_schema_graph(schema)).of(id(schema))
    if depth > MAX_SCHEMA_DEPTH:
        raise GrammarError(
            f"the JSON schema is {depth:,} levels deep, if references are followed; the limit is "
            f"{MAX_SCHEMA_DEPTH}. Levels are lists, objects and references inside each other. Use "
            "fewer of them."
        )
    return depth


def check_regex(regex: str) -> int:
    """Return the depth of a regular expression.

    Raises:
        GrammarError: the expression is too deep or too long.
    """
    _check_length(regex)
    level = most = 0
    for part in _REGEX_PART.finditer(regex):
        repeats = len(_REPEAT.findall(part["repeats"])) if part["repeats"] else 0
        most = max(most, level + repeats)
        if part["open"]:
            level += 1
        elif part["close"]:
            level = max(level - 1, 0)
        most = max(most, level)
    if most > MAX_REGEX_DEPTH:
        raise GrammarError(
            f"the regular expression is {most:,} levels deep; the limit is {MAX_REGEX_DEPTH}. "
            "Levels are groups, classes and repetitions inside each other. Use fewer of them."
        )
    return most


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(
            f"the grammar has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}. Use a "
            "shorter grammar."
        )


@dataclass
class _Part:
    """A rule, or a part of a schema.

    Attributes:
        depth: its own depth.
        references: the parts that it contains or refers to, each with the depth at which this
            happens.
    """

    depth: int = 0
    references: list[tuple[Any, int]] = field(default_factory=list)

    def note(self, depth: int) -> None:
        self.depth = max(self.depth, depth)


class _Rules:
    """The rules of a Lark grammar, read token by token.

    Attributes:
        level: number of brackets that are open.
    """

    def __init__(self) -> None:
        self.level = 0
        self._rule = _Part()
        self._graph: _Graph = {}
        self._line: list[tuple[str, int]] = []
        """Names since the start of the line. If a colon follows, the first is that of a rule."""

    def add(self, token: re.Match[str], depth: int) -> None:
        """Read a token.

        Args:
            token: the token.
            depth: the depth of an expression, a schema or a grammar that is part of it.
        """
        match token.lastgroup:
            case "line" if self.level == 0:
                self._end_line()
            case "name":
                self._line.append((token[0], self.level + 1))
            case "colon" if self.level == 0 and self._line:
                self._rule = self._graph.setdefault(self._line.pop(0)[0], _Part())
            case "open":
                self.level += 1
            case "close":
                self.level = max(self.level - 1, 0)
        self._rule.note(self.level + depth)

    def depth(self) -> int:
        """Return the depth of the whole grammar."""
        self._end_line()
        return _Depths(self._graph).of("start")

    def _end_line(self) -> None:
        self._rule.references += self._line
        self._line = []


class _LarkReader:
    """A reader of Lark grammars.

    Args:
        text: the grammar, with the grammars that it contains.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self, start: int, nested: int = 0) -> tuple[int, int]:
        """Read a grammar.

        Args:
            start: where it begins.
            nested: number of grammars that contain it. It then ends at a bracket.

        Returns:
            The depth of the grammar, and the position at which it ends.
        """
        if nested > MAX_NESTED_GRAMMARS:
            raise GrammarError(
                f"more than {MAX_NESTED_GRAMMARS} grammars are inside each other (%lark). Use "
                "rules."
            )
        rules = _Rules()
        at = start
        while token := _TOKEN.match(self._text, at):
            at = token.end()
            if token.lastgroup == "close" and rules.level == 0 and nested:
                break
            depth = 0
            if token.lastgroup == "regex":
                depth = check_regex(token["regex"])
            elif token.lastgroup == "keyword":
                depth, at = self._read_embedded(token["keyword"], at, nested)
            rules.add(token, depth)
        depth = rules.depth()
        if depth > MAX_RULE_DEPTH:
            raise GrammarError(
                f"the grammar is {depth:,} levels deep, if rules are followed; the limit is "
                f"{MAX_RULE_DEPTH:,}. Levels are rules that refer to each other, and groups inside "
                "them. Use fewer of them."
            )
        return depth, at

    def _read_embedded(self, keyword: str, at: int, nested: int) -> tuple[int, int]:
        """Read what follows a keyword, and return its depth and the position of its end."""
        if keyword not in ("json", "regex", "lark", "llguidance"):
            return 0, at
        while self._text[at : at + 1].isspace():
            at += 1
        if keyword == "lark":
            return self.read(at + 1, nested + 1)
        try:
            value, at = _JSON.raw_decode(self._text, at)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"%{keyword} must be followed by JSON ({error})") from None
        return (check_schema(value) if keyword == "json" else 0), at


def _schema_graph(schema: Any) -> _Graph:
    """Return the parts of a schema to which references point, and the schema itself."""
    targets = {id(schema): schema}
    for value in _values(schema):
        if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
            target = _resolved(schema, value["$ref"])
            targets[id(target)] = target
    graph: _Graph = {}
    for key, target in targets.items():
        part = graph[key] = _Part()
        waiting = [(target, 0)]
        while waiting:
            value, depth = waiting.pop()
            if depth and id(value) in targets:
                part.references.append((id(value), depth))
                continue
            part.note(depth + _pattern_depth(value))
            if isinstance(value, Mapping) and isinstance(value.get("$ref"), str):
                part.references.append((id(_resolved(schema, value["$ref"])), depth + 1))
            waiting += ((child, depth + 1) for child in _children(value))
    return graph


def _children(value: Any) -> Iterable[Any]:
    """Return the lists and objects directly inside a JSON value."""
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list):
        inside = value
    return [child for child in inside if isinstance(child, (Mapping, list))]


def _values(value: Any) -> Iterator[Any]:
    """Yield a JSON value, and the lists and objects inside it."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += _children(each)


def _pattern_depth(value: Any) -> int:
    if not isinstance(value, Mapping):
        return 0
    patterns = [value.get("pattern"), *_names(value.get("patternProperties"))]
    return max((check_regex(each) for each in patterns if isinstance(each, str)), default=0)


def _names(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Mapping) else ()


def _resolved(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names. None if it names a path without a part.

    Raises:
        GrammarError: it names something else than a path.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"the JSON schema refers to {short_repr(reference)}. A '$ref' must be '#', or '#/...' "
            "with the path to a part of the same schema."
        )
    found = schema
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (LookupError, TypeError, ValueError):
            return None  # llguidance refuses it
    return found


class _Depths:
    """The depths of parts with everything that they refer to.

    Parts that refer to each other in a circle are a group, whose depth is the sum of theirs. The
    groups are found by Tarjan's algorithm (1972), without recursion.

    Args:
        graph: the parts.
    """

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._number: dict[Any, int] = {}
        self._lowest: dict[Any, int] = {}
        self._depth: dict[Any, int] = {}
        self._open: list[Any] = []
        self._path: list[tuple[Any, Iterator[tuple[Any, int]]]] = []

    def of(self, start: Any) -> int:
        """Return the depth of a part; 0 if there is no such part."""
        if start in self._graph:
            self._enter(start)
        while self._path:
            key, references = self._path[-1]
            found = next((other for other, _ in references if self._is_new(key, other)), None)
            if found is None:
                self._leave(key)
            else:
                self._enter(found)
        return self._depth.get(start, 0)

    def _enter(self, key: Any) -> None:
        self._number[key] = self._lowest[key] = len(self._number)
        self._open.append(key)
        self._path.append((key, iter(self._graph[key].references)))

    def _is_new(self, key: Any, other: Any) -> bool:
        """Return whether a part was not entered yet. Note it if it is in a circle with `key`."""
        if other in self._number and other not in self._depth:
            self._lowest[key] = min(self._lowest[key], self._number[other])
        return other in self._graph and other not in self._number

    def _leave(self, key: Any) -> None:
        self._path.pop()
        if self._path:
            above = self._path[-1][0]
            self._lowest[above] = min(self._lowest[above], self._lowest[key])
        if self._lowest[key] == self._number[key]:
            group = [self._open.pop()]
            while group[-1] != key:
                group.append(self._open.pop())
            depth = self._group_depth(group)
            self._depth.update(dict.fromkeys(group, depth))

    def _group_depth(self, group: list[Any]) -> int:
        parts = [self._graph[key] for key in group]
        if len(parts) == 1:
            places = (place + self._depth.get(o, 0) for o, place in parts[0].references)
            return max([parts[0].depth, *places])
        own = sum(max([part.depth, *(place for _, place in part.references)]) for part in parts)
        below = (self._depth.get(other, 0) for part in parts for other, _ in part.references)
        return own + max(below, default=0)
