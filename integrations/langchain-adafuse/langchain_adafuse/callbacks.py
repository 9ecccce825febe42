"""Callbacks that collect the rounds of runs, summarize and display them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from adafuse_llm import Generation, InvalidInputError, MissingDependencyError
from adafuse_llm.errors import install_command
from adafuse_llm.results import Usage
from adafuse_llm.summary import Summary

if TYPE_CHECKING:
    import pandas as pd

Place = tuple[str, int, int]
COLUMNS = ("response", "round", "text", "proposers", "unanimous", "score")
"""Columns of tables of rounds."""


class RoundCallbackHandler(BaseCallbackHandler):
    """A callback handler that collects the rounds of a run and its child runs.

    For example::

        rounds = RoundCallbackHandler()
        chain.invoke(question, {"callbacks": [rounds]})
        print(rounds.summary())

    A notebook displays the handler as its responses with all candidates.

    Attributes:
        rounds: one record per round, in order of arrival. ``adafuse_llm.summary.record`` defines
            its keys. Each record also has the ``run_id`` of the model's run. Records of text models
            also have the key ``prompt``, the number of the prompt in its batch. With `n` above 1,
            records have the key ``response``, the number of the response to its prompt. A model
            with ``round_detail="none"`` reports no rounds.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self._ends: dict[Place, dict[str, Any]] = {}

    def on_llm_new_token(
        self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any
    ) -> None:
        records = getattr(chunk, "rounds", ())
        self.rounds += [{"run_id": str(run_id), **each} for each in records]

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        for prompt, generations in enumerate(response.generations):
            for number, each in enumerate(generations):
                message = getattr(each, "message", None)
                info = message.response_metadata if message else each.generation_info or {}
                self._ends[str(run_id), prompt, number] = info

    def summary(self) -> Summary:
        """Summarize the rounds as figures: by member, words per round, agreement, mean margins.

        Agreement is the share of ``unanimous`` rounds among those with several proposers.
        """
        return Summary.of_records(self.rounds)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per round. `rounds` has more about each of them.

        The column ``response`` has the number of the response, from 0. The others have the values
        of the records.

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
        rows = [
            {**each, "response": number}
            for number, records in enumerate(self._responses().values())
            for each in records
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def to_html(self, path: str | Path, *, title: str = "Ensemble response") -> Path:
        """Write one self-contained HTML page with all rounds. See `Generation.to_html`.

        Raises:
            InvalidInputError: the handler has no rounds.
        """
        if not self.rounds:
            raise InvalidInputError("there are no rounds: run a model with this handler first")
        return self._generation().to_html(path, title=title)

    def _repr_html_(self) -> str:
        return self._generation()._repr_html_() if self.rounds else "<p>No rounds yet.</p>"

    def _responses(self) -> dict[Place, list[dict[str, Any]]]:
        """Return the records of each response, by its run, prompt and number."""
        responses: dict[Place, list[dict[str, Any]]] = {}
        for each in self.rounds:
            place = each["run_id"], each.get("prompt", 0), each.get("response", 0)
            responses.setdefault(place, []).append(each)
        return responses

    def _generation(self) -> Generation:
        """Return the first response as the engine returned it, with the others beside it.

        Runs that go on have no token counts, and neither have the other prompts of a text model's
        batch, whose ends LangChain does not report to this run.
        """
        every = []
        for place, records in self._responses().items():
            last = records[-1]
            stops = last["candidates"][last["winner"]]["stops"]
            ended = (place[0], 0, 0) in self._ends
            reason = "stop" if stops else "length" if ended else "cancelled"
            info = self._ends.get(place, {})
            reason = info.get("finish_reason", reason)
            members = info.get("usage_by_member") or {name: {} for name in last["margins"]}
            usage = {
                kind: {name: counts.get(kind, 0) for name, counts in members.items()}
                for kind in Usage.model_fields
            }
            given = {
                "text": "".join(each["text"] for each in records),
                "rounds": [{**each, "index": each["round"]} for each in records],
                "finish_reason": "stop" if reason == "tool_calls" else reason,
                "usage": usage,
            }
            every.append(Generation.model_validate({**info, **given}))
        return every[0].model_copy(update={"alternatives": tuple(every[1:])})


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
