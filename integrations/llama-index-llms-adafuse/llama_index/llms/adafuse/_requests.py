"""The requests of the LlamaIndex LLM: prompts, conversations and the form of replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.adafuse._calls import TOOL_KEYWORDS, Reply, form_of
from llama_index.llms.adafuse._decode import Chunk, Decode
from llama_index.llms.adafuse._messages import Instructions, add_prompts, to_turns
from llama_index.llms.adafuse._model import EnsembleLLM, without_constraints
from llama_index.llms.adafuse._structured import Model, asking
from llama_index.llms.adafuse._tokens import longest_tokenizer, make_prompt_helper

from adafuse_llm import InvalidOptionError, Request
from adafuse_llm.adapters.conversation import to_conversation, to_messages
from adafuse_llm.adapters.enforcing import enforced
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.config import CONSTRAINTS

OBSERVATION = "\nObservation:"
"""The text that ends a ReAct agent's step. A model that writes more invents a tool's result."""

STEP = ("Action:", "Action Input:", "Observation")
"""Texts in every system message that describes the steps which LlamaIndex's agents can parse."""

ANY_TEXT = ReplyForm()
ONE = {"n": 1}
"""Number of responses where only one can be used, whatever the LLM's option `n` is."""


class RequestingLLM(EnsembleLLM):
    """An LLM that turns the arguments of LlamaIndex's methods into requests."""

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """A function from a text to its tokens, for ``Settings.tokenizer``.

        It returns the tokens of the active member that needs the most tokens for the text. A text
        that fits by this count fits every member. Only the number of tokens is meaningful. Reading
        the property loads the members.
        """
        return longest_tokenizer(self.engine, self._active_members(self._options({})))

    def prompt_helper(self, output_cls: type[BaseModel] | None = None) -> PromptHelper:
        """Return a prompt helper that packs prompts by the members' own token counts.

        Set ``Settings.prompt_helper`` to it, or pass it to `get_response_synthesizer`. Without it,
        LlamaIndex counts tokens with a tokenizer of its own. If the members need more tokens, the
        prompts of a query engine may not fit, and the query fails. The helper also reserves space
        for the markers of the members' chat templates. It loads the members.

        Args:
            output_cls: the class of the query engine's answers, if it has one. The helper then
                reserves space for its description, too.
        """
        metadata = self.metadata
        system = self.system_prompt or ""
        if metadata.is_chat_model or output_cls:
            messages = [ChatMessage(role=role, content="x") for role in ("system", "user")]
            messages = self._extend_messages(messages)  # as in `predict`
            if output_cls:
                messages = asking(output_cls, messages)
            request = self._messages(messages, {})
            given = f"{system}x\nx"
        else:
            request, given = self._prompt("x", False, {}), f"{system}x"
        return make_prompt_helper(
            self.engine,
            request,
            given=given,
            window=metadata.context_window,
            num_output=metadata.num_output,
        )

    def _completion(
        self, prompt: str, formatted: bool, overrides: Mapping[str, Any]
    ) -> tuple[Decode, Callable[[Chunk], CompletionResponse]]:
        """Return the decode of a completion, and a function from its chunks to responses.

        The response to a message excludes reasoning. The continuation of a prompt is unchanged.
        """
        request = self._prompt(prompt, formatted, overrides)
        convert = _continuation if request.messages is None else Reply(ANY_TEXT).take_completion
        return self._decode(request), convert

    def _prompt(self, prompt: str, formatted: bool, overrides: Mapping[str, Any]) -> Request:
        """Return the request for a completion.

        If the prompt is not `formatted`, apply `completion_to_prompt` to it. The result becomes a
        user message, or the system prompt and the query wrapper are applied to it in the same order
        as in `predict`.
        """
        options = self._options(overrides)
        if not formatted:
            if self.completion_to_prompt is not None:
                prompt = self.completion_to_prompt(prompt)
            if self._completes_as_chat(options):
                message = ChatMessage(role=MessageRole.USER, content=prompt)
                return self._messages([message], overrides)
            prompt = self._extend_prompt(prompt)
        return Request(prompt=prompt, options=options)

    def _completes_as_chat(self, options: Mapping[str, Any]) -> bool:
        if self.complete_as_chat is not None:
            return self.complete_as_chat
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return False
        return bool(self._ensemble.is_chat_model(self._active_members(options)))

    def _messages(
        self,
        messages: Sequence[ChatMessage],
        overrides: Mapping[str, Any],
        form: ReplyForm = ANY_TEXT,
    ) -> Request:
        """Return the request for a chat.

        The request has messages, which each member formats with its own chat template. If the user
        set `messages_to_prompt`, the request has one prompt for all members instead.
        """
        options = self._options(overrides)
        instructions = [str(each.content) for each in messages if isinstance(each, Instructions)]
        messages = [each for each in messages if not isinstance(each, Instructions)]
        described: dict[str, Any] = {"instructions": "\n\n".join(instructions)}
        if form.calls_tools:
            if constraints := [name for name in CONSTRAINTS if overrides.get(name) is not None]:
                raise InvalidOptionError(
                    f"{constraints[0]} cannot be combined with tools, because both determine the "
                    "form of the reply; pass tool_choice='none', or omit one of them"
                )
            described |= {"tools": form.tools, "tool_choice": form.choice}
            options = without_constraints(options)
        if form.tools:
            options = self._enforced(options, form)
        with_prompts = add_prompts(messages, self.system_prompt, self.query_wrapper_prompt)
        if self.react_stop and not form.calls_tools and _describes_steps(with_prompts):
            options["stop"] = (*self._config(options).stop, OBSERVATION)
        if self.messages_to_prompt in (None, generic_messages_to_prompt):
            turns = to_turns(with_prompts, self._warn_once)
            conversation = to_conversation(turns, **described)
            return Request(messages=conversation, options=options)
        if any(described.values()):
            plain = to_messages(to_turns(with_prompts, self._warn_once), **described)
            with_prompts = [ChatMessage(role=m["role"], content=m["content"]) for m in plain]
        return Request(prompt=self.messages_to_prompt(with_prompts), options=options)

    def _request(
        self, messages: Sequence[ChatMessage], keywords: Mapping[str, Any]
    ) -> tuple[Request, Reply]:
        """Return the request for a chat, and the converter of its reply."""
        form = form_of(keywords)
        overrides = {key: value for key, value in keywords.items() if key not in TOOL_KEYWORDS}
        is_step = not form.calls_tools and _describes_steps(messages)
        return self._messages(messages, overrides, form), Reply(form, is_step=is_step)

    async def _arequest(
        self, messages: Sequence[ChatMessage], keywords: Mapping[str, Any]
    ) -> tuple[Request, Reply]:
        """Return what `_request` returns. Load members and compile grammars in a thread."""
        await self._aload()
        if keywords.get("tools"):
            return await asyncio.to_thread(self._request, messages, keywords)
        return self._request(messages, keywords)

    def _choice(
        self, prompt: str | Sequence[ChatMessage], choices: Sequence[str], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of `Engine.choose`."""
        given = {**ONE, **keywords, "choices": choices}
        if isinstance(prompt, str):
            request = self._prompt(prompt, False, given)
        else:
            request = self._messages(prompt, given)
        return {"prompt": request.prompt, "messages": request.messages, **request.options}

    def _decode(self, request: Request) -> Decode:
        return Decode(self.engine, request, emit_events=self.emit_events)

    def _enforced(self, options: dict[str, Any], form: ReplyForm) -> dict[str, Any]:
        """Return options that enforce a form where `enforce` allows it.

        Raises:
            InvalidOptionError: `enforce` is True, and the form cannot be enforced.
            MissingDependencyError: `enforce` is True, and the extra is not installed.
        """
        options, problem = enforced(self.engine, form, options, self.enforce)
        if problem:
            self._warn_once(
                f"the form of a reply is not enforced, so the prompt requests it: {problem}. To "
                "omit this warning, set enforce=False"
            )
        return options

    def _object_options(
        self, output_cls: type[Model], llm_kwargs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the options of a chat whose reply is to be an object."""
        given = {**ONE, **(llm_kwargs or {})}
        form = ReplyForm(schema=output_cls.model_json_schema())
        schema = self._enforced(without_constraints(self._options(given)), form).get("json_schema")
        return given if schema is None else {**given, "json_schema": schema}


def _continuation(chunk: Chunk) -> CompletionResponse:
    return CompletionResponse(
        text=chunk.text, delta=chunk.delta, raw=chunk.raw, logprobs=chunk.logprobs
    )


def _describes_steps(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a system message describes the steps of a ReAct agent."""
    roles = (MessageRole.SYSTEM, MessageRole.DEVELOPER)
    systems = [message.content or "" for message in messages if message.role in roles]
    return any(all(text in system for text in STEP) for system in systems)
