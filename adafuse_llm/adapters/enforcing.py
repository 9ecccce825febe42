"""Whether the form of a reply is enforced, or only described to the members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.config import CONSTRAINTS
from adafuse_llm.errors import InvalidOptionError, MissingDependencyError
from adafuse_llm.interface import Engine

Enforce = Literal["auto"] | bool
"""``"auto"`` to enforce a form where possible, True to raise an error where it is not, False to
only describe it."""


def enforced(
    engine: Engine,
    form: ReplyForm,
    options: Mapping[str, Any],
    enforce: Enforce,
) -> tuple[dict[str, Any], str]:
    """Return options that enforce the form of a reply, and why they do not, if they should.

    A constraint in `options` takes precedence over the form, and the form over a constraint of the
    engine, unless it only forbids calls. Compiling a grammar for the first time takes a moment.

    Args:
        engine: the engine.
        form: the form.
        options: the options of the request.
        enforce: whether to enforce the form.

    Raises:
        InvalidOptionError: `enforce` is True, and the form cannot be enforced.
        MissingDependencyError: `enforce` is True, and the extra is not installed.
    """
    if form.is_free or any(options.get(name) is not None for name in CONSTRAINTS):
        return {**options}, ""
    own = [name for name in CONSTRAINTS if getattr(engine.config, name) is not None]
    if own and not form.calls_tools and form.schema is None:
        return {**options}, ""
    free = {**options, **dict.fromkeys(own)}
    if not enforce:
        return free, ""
    try:
        constrained = {**free, **form.constraint()}
        engine.check_grammar(**constrained)
    except (InvalidOptionError, MissingDependencyError) as error:
        if enforce is True:
            raise
        return free, str(error).rstrip(".")
    return constrained, ""
