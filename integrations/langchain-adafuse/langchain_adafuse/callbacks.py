"""What the rounds of a run were, for programs: collect them, sum them up, make a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from adafuse_llm import MissingDependencyError
from adafuse_llm.summary import Summary
from langchain_adafuse._rounds import ROUND_EVENT

if TYPE_CHECKING:
    import pandas as pd


class RoundCallbackHandler(BaseCallbackHandler):
    """Collects the rounds of every run that it is passed to, or to whose parents it is.

    For example::

        rounds = RoundCallbackHandler()
        chain.invoke(question, {"callbacks": [rounds]})
        print(rounds.summary())

    Attributes:
        rounds: records in the order in which they came: what ``adafuse_llm.summary.record`` tells
            in the model's `round_detail`, with the ``run_id`` of the model's run and, of text
            models, the number of the ``prompt`` in its batch.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if name == ROUND_EVENT:
            self.rounds.append({"run_id": str(run_id), **data})

    def summary(self) -> Summary:
        """The rounds in figures: wins per member, words per round, agreement (the share of records
        that are ``unanimous``: one candidate, proposed by all of several members), mean margins.

        Members that never won, and margins, are known with ``round_detail="full"`` only.
        """
        return Summary.of_records(self.rounds)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per round, one column per key of the records.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError(
                'tables need the package pandas: pip install "langchain-adafuse[dataframe]"'
            ) from error
        return pd.DataFrame(self.rounds)


_HANDLER: ContextVar[RoundCallbackHandler | None] = ContextVar("adafuse_rounds", default=None)
register_configure_hook(_HANDLER, inheritable=True)


@contextmanager
def get_round_callback() -> Iterator[RoundCallbackHandler]:
    """Collect the rounds of everything that is run inside the block.

    For example::

        with get_round_callback() as rounds:
            chain.invoke(question)
        print(rounds.summary())
    """
    handler = RoundCallbackHandler()
    token = _HANDLER.set(handler)
    try:
        yield handler
    finally:
        _HANDLER.reset(token)
