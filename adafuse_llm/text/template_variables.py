"""The variables that a template in Jinja reads."""

from __future__ import annotations

from typing import Any

PROVIDED = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers provides to templates, in addition to those of Jinja."""


def free_variables(template: str) -> frozenset[str] | None:
    """Return the variables that a template may read; None if it cannot be parsed.

    A name that the template sets in one branch of a condition only counts as one of them.
    """
    try:
        import jinja2
        from jinja2.meta import find_undeclared_variables

        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
        environment.add_extension(_generation_blocks())
        return frozenset(find_undeclared_variables(environment.parse(template)) - PROVIDED)
    except Exception:  # Jinja is not installed, or the template uses an unknown extension
        return None


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
