"""The variables that a template in Jinja reads without having set them.

``jinja2.meta.find_undeclared_variables`` also reports every name that is set in a branch of a
condition only. Here, a name counts only if it may be read before it is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PROVIDED = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers provides to templates, in addition to those of Jinja."""

IN_MACROS = frozenset({"caller", "varargs", "kwargs"})
"""Names that are set in every macro."""


def free_variables(template: str) -> frozenset[str] | None:
    """Return the variables that a template reads; None if it cannot be parsed."""
    try:
        import jinja2

        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
        environment.add_extension(_generation_blocks())
        parsed = environment.parse(template)
    except Exception:  # Jinja is not installed, or the template uses an unknown extension
        return None
    reader = _Reader()
    reader.read(parsed, {*environment.globals, *PROVIDED})
    return frozenset(reader.free)


class _Reader:
    """A walk through a template, in the order in which it runs.

    Attributes:
        free: names that may be read before they are set.
    """

    def __init__(self) -> None:
        self.free: set[str] = set()

    def read(self, node: Any, known: set[str]) -> None:
        """Read a node.

        Args:
            node: a node of Jinja's syntax tree.
            known: the names that are set. The names that the node sets are added.
        """
        handle = getattr(self, f"_read_{type(node).__name__.lower()}", self._read_children)
        handle(node, known)

    def _read_all(self, nodes: Iterable[Any], known: set[str]) -> set[str]:
        for node in nodes:
            self.read(node, known)
        return known

    def _read_children(self, node: Any, known: set[str]) -> None:
        self._read_all(node.iter_child_nodes(), known)

    def _read_name(self, node: Any, known: set[str]) -> None:
        if node.ctx == "load" and node.name not in known:
            self.free.add(node.name)
        known.add(node.name)

    def _read_nsref(self, node: Any, known: set[str]) -> None:
        """The attribute of a namespace, which has been set before."""

    def _read_assign(self, node: Any, known: set[str]) -> None:
        self._read_all((node.node, node.target), known)

    def _read_assignblock(self, node: Any, known: set[str]) -> None:
        self._read_all(node.body, {*known})
        self.read(node.target, known)

    def _read_if(self, node: Any, known: set[str]) -> None:
        self.read(node.test, known)
        branches = [self._read_all(node.body, {*known})]
        otherwise = {*known}
        for other in node.elif_:
            self.read(other.test, otherwise)
            branches.append(self._read_all(other.body, {*otherwise}))
        branches.append(self._read_all(node.else_, otherwise))
        known |= set.intersection(*branches)

    def _read_for(self, node: Any, known: set[str]) -> None:
        self.read(node.iter, known)
        inner = {*known, "loop"}
        self._read_all(filter(None, (node.target, node.test, *node.body)), inner)
        self._read_all(node.else_, {*known})

    def _read_macro(self, node: Any, known: set[str]) -> None:
        known.add(node.name)
        self._read_all((*node.defaults, *node.args, *node.body), {*known, *IN_MACROS})

    def _read_callblock(self, node: Any, known: set[str]) -> None:
        self.read(node.call, known)
        self._read_all((*node.defaults, *node.args, *node.body), {*known})

    def _read_filterblock(self, node: Any, known: set[str]) -> None:
        self._read_children(node, {*known})

    def _read_scope(self, node: Any, known: set[str]) -> None:
        self._read_children(node, {*known})

    def _read_with(self, node: Any, known: set[str]) -> None:
        self._read_all((*node.values, *node.targets, *node.body), {*known})


def _generation_blocks() -> Any:
    """Return an extension that parses the blocks ``generation`` of transformers."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return GenerationBlocks
