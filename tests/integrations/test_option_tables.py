"""The tables of docs/guides/options.md, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM
from pydantic import BaseModel

from adafuse_llm import AdaFuseEngine, InvalidOptionError
from adafuse_llm.adapters.options import (
    ALIASES,
    CHOOSES_MODELS,
    CHOOSES_SERVER,
    NO_EFFECT,
    REFUSED,
)
from adafuse_llm.backends import FakeBackend
from langchain_adafuse import ChatAdaFuse
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

PAGE = ROOT / "docs" / "guides" / "options.md"
HERE = ("same", "different", "no effect", "refused", "always refused")

CLASSES = {
    "ChatOpenAI": "langchain_openai.chat_models.base",
    "ChatOllama": "langchain_ollama.chat_models",
    "ChatHuggingFace": "langchain_huggingface.chat_models.huggingface",
    "HuggingFaceLLM": "llama_index.llms.huggingface.base",
    "OpenAILike": "llama_index.llms.openai_like.base",
}
"""The classes of the page and their modules."""

FRAMEWORKS = ("langchain_core", "llama_index.core", "pydantic")
"""Modules whose fields our classes inherit, too."""

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
PLAUSIBLE: dict[str, Any] = {
    "api_key": "x",
    "context_window": 64,
    "device_map": "cpu",
    "do_sample": False,
    "frequency_penalty": 0.5,
    "is_chat_model": True,
    "logit_bias": {" Paris": -5.0},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_new_tokens": 5,
    "min_new_tokens": 0,
    "min_p": 0.1,
    "max_retries": 3,
    "max_tokens": 5,
    "n": 1,
    "no_repeat_ngram_size": 2,
    "num_predict": 5,
    "num_return_sequences": 1,
    "output_version": "v1",
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "query_wrapper_prompt": "Question: {query_str}",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "reuse_client": False,
    "seed": 7,
    "stop": ["\n"],
    "stop_sequences": ["\n"],
    "stream": False,
    "streaming": True,
    "strict": True,
    "system_prompt": "Be brief.",
    "temperature": 0.7,
    "timeout": 60.0,
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_k": 40,
    "top_logprobs": 2,
    "top_p": 0.9,
}
"""Values of options that are not refused."""

CONVERTED = {"query_wrapper_prompt", "do_sample"}
"""Options whose field has another value than the argument."""

ONLY_WITH_TOOLS = {"tool_choice", "parallel_tool_calls"}


class Row(NamedTuple):
    """A row of a table."""

    option: str
    where: str
    here: str

    @property
    def target(self) -> str | None:
        """The option of adafuse-llm that this option is another name of."""
        return None if self.here in HERE else self.here.strip("`")

    @property
    def refused(self) -> bool:
        return self.here in ("refused", "always refused")

    @property
    def has_field(self) -> bool:
        """Whether our constructor keeps the argument in a field."""
        return self.here != "no effect" and self.option not in CONVERTED

    @property
    def value(self) -> Any:
        if self.option == "model":
            return "oak"
        return 3.5 if self.refused else PLAUSIBLE[self.option]


@cache
def tables() -> dict[str, list[Row]]:
    """Return the rows by class."""
    found: dict[str, list[Row]] = {}
    name = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## `(\w+)`", line):
            name = heading[1]
        elif line.startswith("| `"):
            option, where, here, _ = (cell.strip() for cell in line.strip("|").split(" |"))
            found.setdefault(name, []).append(Row(option.strip("`"), where.strip("`"), here))
    return found


class Ours:
    """One of our classes, as the tables use it."""

    def __init__(self, name: str) -> None:
        self.is_chat = name.startswith("Chat")
        self.engine = AdaFuseEngine([FakeBackend("oak", lambda text: {"<end>": 1.0})])

    def create(self, **options: Any) -> Any:
        """Create a model, which loads nothing."""
        if self.is_chat:
            given: dict[str, Any] = (
                {"engine": self.engine} if "model" in options else {"members": "embedded"}
            )
            return ChatAdaFuse(**given, **options)
        return AdaFuseLLM(members=[], **options)

    def call(self, *, unsupported: str | None = None, **options: Any) -> None:
        """Make a call."""
        created: dict[str, Any] = {} if unsupported is None else {"unsupported": unsupported}
        if self.is_chat:
            ChatAdaFuse(engine=self.engine, enforce=False, **created).invoke("?", **options)
            return
        llm = AdaFuseLLM(engine=self.engine, enforce=False, **created)
        llm.chat([ChatMessage(content="?")], **options)

    def bind(self, **options: Any) -> None:
        """Bind tools and make a call."""
        chat = ChatAdaFuse(engine=self.engine, enforce=False)
        chat.bind_tools(**{"tools": [TOOL], **options}).invoke("?")

    def uses(self, row: Row) -> list[Callable[..., object]]:
        """Return the functions that take the option of a row."""
        if row.where == "bind_tools":
            return [self.bind]
        places = {"constructor": [self.create], "call": [self.call]}
        return places.get(row.where, [self.create, self.call])


@pytest.fixture(params=CLASSES)
def name(request):
    return request.param


def test_the_tables_have_the_columns_that_the_page_describes(name):
    rows = tables()[name]
    assert len({(row.option, row.where) for row in rows}) == len(rows)
    for row in rows:
        assert row.where in ("constructor", "call", "both", "bind_tools", "generate_kwargs"), row
        assert row.here in HERE or row.here == f"`{row.target}`", row
        assert row.target in (None, ALIASES.get(row.option), "temperature"), row


def test_options_that_are_not_refused_are_accepted(name, caplog):
    ours, problems = Ours(name), {}
    for row in tables()[name]:
        options = {row.option: row.value}
        if row.option in ONLY_WITH_TOOLS:
            options["tools"] = [TOOL]
        for use in ours.uses(row) if not row.refused else ():
            try:
                model = use(**options)
            except Exception as error:
                problems[row, use.__name__] = repr(error)
                continue
            if isinstance(model, BaseModel) and row.has_field:
                assert _plain(getattr(model, row.target or row.option)) == row.value, row
    assert not problems
    assert "dropped" not in caplog.text


def test_refused_options_are_errors_that_name_them_or_are_dropped(name, caplog):
    ours = Ours(name)
    for row in tables()[name]:
        if not row.refused:
            continue
        named = f"^option '{row.option}'"
        if row.here == "always refused":
            named = "engine=RemoteEngine" if row.option in CHOOSES_SERVER else "members"
        for use in ours.uses(row):
            caplog.clear()
            with pytest.raises(InvalidOptionError, match=named):
                use(**{row.option: row.value})
            if row.here == "always refused":
                with pytest.raises(InvalidOptionError, match=named):
                    use(**{row.option: row.value}, unsupported="warn")
                continue
            use(**{row.option: row.value}, unsupported="warn")
            assert caplog.text.count(f"option '{row.option}'") == 1, row


def test_every_option_that_the_code_treats_specially_is_on_the_page():
    rows = [row for table in tables().values() for row in table]
    shown: dict[str, set[str]] = {}
    for row in rows:
        shown.setdefault(row.here, set()).add(row.option)
    assert {row.option: row.target for row in rows if row.target and row.option != "do_sample"} == {
        **ALIASES
    }
    assert {*REFUSED} == shown["refused"]
    assert {*CHOOSES_MODELS, *CHOOSES_SERVER} == shown["always refused"]
    assert {*NO_EFFECT} == shown["no effect"] - {"stream"}


@pytest.mark.parametrize(("name", "module"), CLASSES.items())
def test_the_page_has_every_field_of_the_other_class(name, module):
    other = getattr(pytest.importorskip(module), name)
    own = [base for base in other.__mro__ if not base.__module__.startswith(FRAMEWORKS)]
    declared = {field for base in own for field in getattr(base, "__annotations__", {})}
    fields = {field: other.model_fields[field] for field in declared & {*other.model_fields}}
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert names
    assert names <= {row.option for row in tables()[name]}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
