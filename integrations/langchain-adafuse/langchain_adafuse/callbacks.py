"""Callbacks that collect the rounds of runs, summarize them, and export them as a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from adafuse_llm import MissingDependencyError
from adafuse_llm.errors import install_command
from adafuse_llm.summary import Summary
from langchain_adafuse._rounds import ROUND_EVENT

if TYPE_CHECKING:
    import pandas as pd


class RoundCallbackHandler(BaseCallbackHandler):
    """A callback handler that collects the rounds of a run and its child runs.

    For example::

        rounds = RoundCallbackHandler()
        chain.invoke(question, {"callbacks": [rounds]})
        print(rounds.summary())

    Attributes:
        rounds: one record per round, in order of arrival. ``adafuse_llm.summary.record`` defines
            its keys. Each record also has the ``run_id`` of the model's run. Records of text models
            also have the key ``prompt``, the number of the prompt in its batch. With `n` above 1,
            records have the key ``response``, the number of the response to its prompt. A model
            with ``round_detail="none"`` reports no rounds.
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
        """Summarize the rounds as figures: by member, words per round, agreement, mean margins.

        Agreement is the share of ``unanimous`` rounds among those with several proposers.
        """
        return Summary.of_records(self.rounds)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per round and one column per key of the records.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError(
                "to_dataframe() needs the package pandas: "
                f"{install_command('dataframe', 'langchain-adafuse')}"
            ) from error
        return pd.DataFrame(self.rounds)


_HANDLER: ContextVar[RoundCallbackHandler | None] = ContextVar("adafuse_rounds", default=None)
register_configure_hook(_HANDLER, inheritable=True)


@contextmanager
def get_round_callback() -> Iterator[RoundCallbackHandler]:
    """Collect the rounds of all models that run inside the block.

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
