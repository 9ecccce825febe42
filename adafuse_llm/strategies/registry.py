"""Strategies by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest, short_repr
from adafuse_llm.strategies.adafuse import AdaFuse, Single
from adafuse_llm.strategies.base import Strategy, refuse_unused_options
from adafuse_llm.strategies.mixture import Mixture

AUTO: Final = "auto"
"""Stands for the strategy that `choose_strategy` chooses. It is the default."""

UNEVEN: Final = 2.0
"""Members are uneven if the largest has at least this many times the parameters of the smallest."""

NAMED: Mapping[str, Callable[[], Strategy]] = {
    "adafuse": AdaFuse,
    "mixture": Mixture,
    "single": Single,
}
"""The strategies of this package by name."""


def find_strategy(
    strategy: Strategy | str, members: Sequence[Backend] = (), config: AdaFuseConfig | None = None
) -> Strategy:
    """Return the strategy with this name. A `Strategy` object stays as it is.

    With ``auto``, `choose_strategy` chooses. A name such as ``package.module:object`` imports a
    strategy, or a class or function that returns one.

    Raises:
        InvalidOptionError: the name is unknown, the import fails, or the object is not a strategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy == AUTO:
        return choose_strategy(members, config or AdaFuseConfig())
    if isinstance(strategy, str) and strategy in NAMED:
        return NAMED[strategy]()
    if isinstance(strategy, str) and ":" in strategy:
        return _imported(strategy)
    names = (AUTO, *NAMED)
    raise InvalidOptionError(
        f"strategy must be one of {', '.join(names)}, the place of your own in the form "
        f"package.module:object, or a Strategy object; got {short_repr(strategy)}."
        f"{nearest(str(strategy), names)}"
    )


def _imported(place: str) -> Strategy:
    try:
        made: object = pkgutil.resolve_name(place)
        if callable(made) and not isinstance(made, Strategy):
            made = made()
    except Exception as error:
        raise InvalidOptionError(
            f"strategy {short_repr(place)} is not of the form package.module:object, or cannot be "
            f"imported or created ({type(error).__name__}: {short_repr(str(error))}). Python must "
            "find the module: install its package, or name its folder in PYTHONPATH."
        ) from error
    if isinstance(made, Strategy):
        return made
    raise InvalidOptionError(
        f"strategy {place!r} must be a Strategy object, or a class or function that returns one; "
        f"got {short_repr(made)}"
    )


def choose_strategy(members: Sequence[Backend], config: AdaFuseConfig) -> Strategy:
    """Return the strategy that suits the members: `Mixture` if they are uneven, else `AdaFuse`.

    `AdaFuse` gives all members the same say, so a member that is much smaller makes the response
    worse where it cannot do the task. `Mixture` weighs members by their size. The choice is still
    `AdaFuse` if a size is not known, a member cannot take part in a `Mixture`, or `config` sets an
    option that `Mixture` does not use.
    """
    mixture = Mixture()
    sizes = mixture.weights(members)  # all equal if one is not known
    if not sizes or max(sizes) < UNEVEN * min(sizes):
        return AdaFuse()
    try:
        mixture.check(members)
        refuse_unused_options(mixture, config)
    except InvalidInputError:
        return AdaFuse()
    return mixture
