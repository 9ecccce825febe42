"""Function calling: tools of a request, replies with tool calls, and requests for corrections."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools import BaseTool
from llama_index.llms.adafuse._decode import Chunk
from llama_index.llms.adafuse._messages import Correction

from adafuse_llm import InvalidInputError, MalformedReplyError
from adafuse_llm.adapters.reply import (
    CALL_CLOSES,
    CALL_OPENS,
    InvalidToolCall,
    Reasoning,
    ReplyParser,
    Text,
    ToolCall,
    read_json,
)
from adafuse_llm.adapters.tool_grammar import tool_grammar
from adafuse_llm.errors import nearest
from adafuse_llm.text.chat import Tool
from adafuse_llm.text.conversation import TOOL_CHOICES

TOOL_KEYWORDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Keywords of `AdaFuseLLM.chat` that concern tools."""

REACT_KEYWORDS = ("react_chat_formatter", "output_parser", "tool_retriever", "memory")
"""Keywords of `AdaFuseLLM.predict_and_call` that concern a ReAct agent."""


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        tools: the tools.
        choice: ``auto``, ``none``, ``required`` or the name of a tool.
        parallel: whether a reply can have several calls.
    """

    tools: tuple[Tool, ...]
    choice: str
    parallel: bool

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Toolbox | None:
        """Read the keywords of a chat that concern tools. Return None if no tool can be called.

        Raises:
            InvalidInputError: the tools or the choice have an unknown form, or the choice does not
                fit the tools.
        """
        tools = tuple(map(_tool, keywords.get("tools") or ()))
        choice = tool_choice(keywords.get("tool_choice"), [tool.name for tool in tools])
        if choice == "required" and not tools:
            raise InvalidInputError("tool_choice='required' needs at least one tool; got none")
        if not tools or choice == "none":
            return None
        parallel = keywords.get("parallel_tool_calls", True)
        if not isinstance(parallel, bool):
            raise InvalidInputError(f"parallel_tool_calls must be True or False; got {parallel!r}")
        return cls(tools, choice, parallel)

    def grammar(self) -> dict[str, Any]:
        """Return the option that enforces well-formed calls of these tools.

        Raises:
            GrammarError: the arguments of a tool cannot be enforced.
            MissingDependencyError: llguidance is not installed.
        """
        return {"grammar": tool_grammar(self.tools, choice=self.choice, parallel=self.parallel)}

    def problem(self, message: ChatMessage) -> str | None:
        """Return why a reply that was not enforced cannot be used; None if it can be."""
        parser = ReplyParser(tools=True)
        for part in (*parser.feed(message.content or ""), *parser.close()):
            if isinstance(part, InvalidToolCall):
                return part.error
        allowed = [tool.name for tool in self.tools]
        called = [block.tool_name for block in message.blocks if isinstance(block, ToolCallBlock)]
        if unknown := [name for name in called if name not in allowed]:
            return f"there is no tool {unknown[0]!r}. The tools are: {', '.join(allowed)}"
        if self.choice == "required" and not called:
            return "it calls no tool"
        if self.choice in allowed and called != [self.choice]:
            return f"it does not call the tool {self.choice} exactly once"
        return None


def tool_choice(choice: Any, names: Sequence[str]) -> str:
    """Return a tool choice as ``auto``, ``none``, ``required`` or the name of a tool.

    Args:
        choice: one of these; ``"any"`` for ``required``; None for ``auto``; or a dict of OpenAI,
            such as ``{"type": "function", "function": {"name": ...}}``.
        names: the names of the tools.

    Raises:
        InvalidInputError: `choice` has another value.
    """
    resolved = choice
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        resolved = function.get("name") if isinstance(function, Mapping) else None
        resolved = resolved or choice.get("type")
    if resolved is None and choice is None:
        resolved = "auto"
    if resolved == "any" and "any" not in names:
        resolved = "required"
    allowed = (*TOOL_CHOICES, *names)
    if not isinstance(resolved, str) or resolved not in allowed:
        raise InvalidInputError(
            f"tool_choice must be {', '.join(TOOL_CHOICES)} or the name of a tool "
            f"({', '.join(names) or 'no tools given'}); got {choice!r:.100}."
            f"{nearest(str(resolved), allowed)}"
        )
    return resolved


def to_openai_tool(tool: BaseTool) -> dict[str, Any]:
    """Describe a tool in the form of OpenAI. Unlike core, keep long descriptions and the name."""
    metadata = tool.metadata
    function = {
        "name": metadata.get_name(),
        "description": metadata.description,
        "parameters": metadata.get_parameters_dict(),
    }
    return {"type": "function", "function": function}


def _tool(tool: Any) -> Tool:
    if isinstance(tool, BaseTool):
        tool = to_openai_tool(tool)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidInputError(
            "tools must be tools of LlamaIndex, or dicts such as {'type': 'function', 'function': "
            f"{{'name': ..., 'description': ..., 'parameters': ...}}}}; got {tool!r:.100}"
        )
    return Tool(
        function["name"], function.get("description") or "", function.get("parameters") or {}
    )


class Reply:
    """A converter from the chunks of a reply to chat responses with text, reasoning and tool calls.

    The text excludes reasoning and calls. A malformed call, which only a reply without enforcement
    can have, stays in the text. Whitespace after reasoning and after calls is removed.

    Args:
        tools: whether the reply can have calls.
        parallel: whether it can have several calls; otherwise only the first one counts.
    """

    def __init__(self, *, tools: bool = True, parallel: bool = True) -> None:
        self._tools = tools
        self._parallel = parallel
        self._parser: ReplyParser | None = None
        self._text = ""
        self._thinking = ""
        self._calls: list[ToolCallBlock] = []
        self._next_id = _call_id()
        self._after_mark = False  # whether only whitespace has followed a call or reasoning

    def take(self, chunk: Chunk) -> ChatResponse:
        """Return the response after one more chunk.

        An unfinished call is the last of the calls as soon as its arguments have begun. Its
        ``tool_kwargs`` are then JSON text.
        """
        last = chunk.raw.finish_reason is not None
        if self._parser is None:
            self._parser = ReplyParser(tools=self._tools, prefix=chunk.reply_prefix)
        parts = self._parser.feed(chunk.delta)
        if last:
            parts += self._parser.close()
        delta, thinking = "", ""
        for part in parts:
            if isinstance(part, Reasoning):
                thinking += part.text
            elif isinstance(part, ToolCall):
                self._add_call(part)
            else:
                text = part.text if isinstance(part, Text) else _as_written(part)
                text = text.lstrip() if self._after_mark else text
                delta += text
                self._after_mark = self._after_mark and not text
                continue
            self._after_mark = True
        self._text += delta
        self._thinking += thinking
        calls = [*self._calls, *([] if last else self._unfinished_call(self._parser))]
        return ChatResponse(
            message=self._message(calls),
            delta=delta,
            raw=chunk.raw,
            logprobs=chunk.logprobs,
            additional_kwargs={"thinking_delta": thinking} if thinking else {},
        )

    def _message(self, calls: list[ToolCallBlock]) -> ChatMessage:
        blocks: list[ContentBlock] = []
        if self._thinking:
            blocks.append(ThinkingBlock(content=self._thinking))
        if self._text or not calls:
            blocks.append(TextBlock(text=self._text))
        # programs of core recognize calls by this entry
        extras = {"tool_calls": [_openai_call(call) for call in calls]} if calls else {}
        return ChatMessage(
            role=MessageRole.ASSISTANT, blocks=[*blocks, *calls], additional_kwargs=extras
        )

    def _add_call(self, call: ToolCall) -> None:
        if self._calls and not self._parallel:
            return
        self._calls.append(_block(self._next_id, call.name, call.arguments))
        self._next_id = _call_id()

    def take_completion(self, chunk: Chunk) -> CompletionResponse:
        """Return the completion after one more chunk. Its text excludes reasoning."""
        response = self.take(chunk)
        return CompletionResponse(
            text=self._text,
            delta=response.delta,
            raw=chunk.raw,
            logprobs=chunk.logprobs,
            additional_kwargs=response.additional_kwargs,
        )

    def _unfinished_call(self, parser: ReplyParser) -> list[ToolCallBlock]:
        if self._calls and not self._parallel:
            return []
        parts = copy.copy(parser).close()
        last = parts[-1] if parts else None
        if not isinstance(last, InvalidToolCall):
            return []
        name, key, arguments = last.text.partition(', "arguments": ')
        try:
            name = read_json(name + "}")["name"]
        except (ValueError, KeyError, TypeError):
            return []
        if not key or not isinstance(name, str) or not arguments.startswith("{"):
            return []
        try:
            complete, _ = json.JSONDecoder().raw_decode(arguments)
        except ValueError:
            return [_block(self._next_id, name, arguments)]
        return [_block(self._next_id, name, complete)]


def selections(message: ChatMessage) -> list[ToolSelection]:
    """Return the calls in a message. Arguments that are JSON text may be unfinished."""
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=_arguments(block.tool_kwargs),
        )
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]


class CallAttempts:
    """An iterator over requests for calls. It ends at a reply whose calls are well-formed.

        for request in attempts:
            attempts.take(response to request)
        attempts.response

    After another reply, the next request contains that reply and what is wrong with it.

    Args:
        request: keywords of `AdaFuseLLM.chat`.
        retries: how many more requests there can be.

    Raises:
        MalformedReplyError: no reply can be used. The iterator raises this error.
    """

    response: ChatResponse

    def __init__(self, request: dict[str, Any], retries: int) -> None:
        self._request = request
        self._toolbox = Toolbox.of(request)
        self._attempts = self._attempts_left = retries + 1
        self._problem = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while not hasattr(self, "response"):
            if not self._attempts_left:
                raise MalformedReplyError(
                    f"no reply called the tools in the requested form in {self._attempts} "
                    f"attempts; the last reply cannot be used: {self._problem}"
                )
            self._attempts_left -= 1
            yield self._request

    def take(self, response: ChatResponse) -> None:
        """Accept a response, or add it and what is wrong with it to the next request."""
        problem = self._toolbox.problem(response.message) if self._toolbox else None
        if problem is None:
            self.response = response
            return
        self._problem = problem
        reply = ChatMessage(role=MessageRole.ASSISTANT, content=_written(response.message))
        text = (
            f"This reply cannot be used: {problem}\n"
            "Reply again, and call the tool in the form that the instructions describe."
        )
        correction = Correction(role=MessageRole.USER, blocks=[TextBlock(text=text)])
        messages = [*self._request["messages"], reply, correction]
        self._request = {**self._request, "messages": messages}


def _block(call_id: str, name: str, arguments: dict[str, Any] | str) -> ToolCallBlock:
    return ToolCallBlock(tool_call_id=call_id, tool_name=name, tool_kwargs=arguments)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _as_written(call: InvalidToolCall) -> str:
    closes = "" if "is not closed by" in call.error else CALL_CLOSES
    return f"{CALL_OPENS}{call.text}{closes}"


def _written(message: ChatMessage) -> str:
    """Return the text of a reply, in which calls are as the members wrote them."""
    calls = [
        f"{CALL_OPENS}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_CLOSES}"
        for selection in selections(message)
        if (call := {"name": selection.tool_name, "arguments": selection.tool_kwargs})
    ]
    return "\n".join([*filter(None, [(message.content or "").rstrip("\n")]), *calls])


def _openai_call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = block.tool_kwargs
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id, "type": "function", "function": function}


def _arguments(arguments: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = parse_partial_json(arguments)
        except (ValueError, TypeError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
