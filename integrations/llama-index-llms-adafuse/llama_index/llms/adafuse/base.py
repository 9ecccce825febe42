"""The LlamaIndex LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.llms.adafuse._calls import (
    TOOL_KEYWORDS,
    WARNINGS_KEY,
    Reply,
    form_of,
    selections,
    to_openai_tool,
)
from llama_index.llms.adafuse._decode import Chunk, Decode
from llama_index.llms.adafuse._messages import Instructions, add_prompts, to_turns
from llama_index.llms.adafuse._model import EnsembleLLM, LLMOptions, Members, without_constraints
from llama_index.llms.adafuse._structured import Model, Partial, asking, parsed
from llama_index.llms.adafuse._tokens import longest_tokenizer, make_prompt_helper
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Unpack, override

from adafuse_llm import Choice, Engine, InvalidOptionError, MalformedReplyError, Request
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.reply import CUT
from adafuse_llm.adapters.reply_form import ReplyForm, enforced
from adafuse_llm.config import CONSTRAINTS

if TYPE_CHECKING:
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.tools import BaseTool

dispatcher = get_dispatcher(__name__)

OBSERVATION = "\nObservation:"
"""The text that ends a ReAct agent's step. A model that writes more invents a tool's result."""

STEP = ("Action:", "Action Input:", "Observation")
"""Texts in every system message that describes the steps which LlamaIndex's agents can parse."""

ANY_TEXT = ReplyForm()
ONE = {"n": 1}
"""Number of responses where only one can be used, whatever the LLM's option `n` is."""


class AdaFuseLLM(EnsembleLLM):
    """A LlamaIndex LLM backed by an ensemble of local language models.

    The members are loaded on first use. LLMs with the same members share one engine. An LLM is
    thread-safe. A copy by `copy.deepcopy` has options of its own and shares the engine, the
    callback manager and the rate limiter. A pickled LLM contains the list of its members and its
    options, but no weights.

    Args:
        members: folders, GGUF files, hub ids, or mappings of settings. For the three small models
            that ship with adafuse-llm, call `from_embedded`.
        engine: an existing engine, such as a `RemoteEngine`, to use instead of `members` and the
            options for loading them.
        dtype, device_map, revision, trust_remote_code: as for `AdaFuseEngine.from_pretrained`.
        runtime: settings of the engine's scheduler and caches.
        strategy: name of the strategy that chooses the next piece of text. LLMs that differ only in
            it share their members.
        context_window, is_chat_model: values of the same names in `metadata`, for LlamaIndex. They
            change nothing in the members.
        emit_events: whether to emit instrumentation events for the rounds, in a span of their own.
        enforce: whether the members can write nothing but well-formed tool calls and objects.
            ``"auto"``: yes, if the extra ``adafuse-llm[grammar]`` is installed, every member can
            follow a grammar, and the schema can be enforced; otherwise the prompt requests the
            form, and a warning gives the reason. True: an error instead of that warning. False:
            only the prompt requests the form. The LLM is a function-calling model in LlamaIndex's
            sense (``metadata.is_function_calling_model``) only if calls can be enforced, and a
            member has a chat template.
        complete_as_chat: whether completions send the prompt as a user message, which each member
            formats with its own chat template. `complete` then returns what `chat` returns for one
            user message. Default: true if an active member has a chat template and
            `completion_to_prompt` is not set. A call with ``formatted=True`` always continues the
            prompt as it is.
        react_stop: whether the reply to a ReAct agent ends where it would invent a tool's result,
            at a line that begins with ``Observation:``. The LLM takes a chat for a request of such
            an agent if a system message contains ``Action:``, ``Action Input:`` and
            ``Observation``, as the prompts of LlamaIndex's `ReActAgent` do.
        **kwargs: options of `AdaFuseConfig`, which each call can override, and the arguments of
            every LlamaIndex LLM: `system_prompt`, `completion_to_prompt`, `messages_to_prompt`,
            `query_wrapper_prompt`, `callback_manager`, `output_parser`, `pydantic_program_mode`,
            `rate_limiter`.

    Raises:
        InvalidInputError: both or neither of `members` and `engine` are given, or an option is
            unknown or out of range.
    """

    if TYPE_CHECKING:  # type checkers derive a constructor for each class that has none

        def __init__(
            self,
            members: Members = None,
            *,
            engine: Engine | None = None,
            **kwargs: Unpack[LLMOptions],
        ) -> None: ...

    # The eight entry points -------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        decode, convert = self._completion(prompt, formatted, kwargs)
        return convert(decode.result())

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        decode, convert = self._completion(prompt, formatted, kwargs)
        return (convert(chunk) for chunk in decode.chunks())

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        await self._aload()
        decode, convert = self._completion(prompt, formatted, kwargs)
        return convert(await decode.aresult())

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        await self._aload()
        decode, convert = self._completion(prompt, formatted, kwargs)
        chunks = await decode.achunks()
        return (convert(chunk) async for chunk in chunks)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the reply to a conversation.

        Args:
            messages: the conversation.
            **kwargs: options of `AdaFuseConfig`, and ``tools``, ``tool_choice`` and
                ``parallel_tool_calls`` in the form of OpenAI.

        Raises:
            InvalidInputError: the messages, the tools or an option cannot be used.
        """
        request, reply = self._request(messages, kwargs)
        return reply.take(self._decode(request).result())

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        request, reply = self._request(messages, kwargs)
        return (reply.take(chunk) for chunk in self._decode(request).chunks())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        request, reply = await self._arequest(messages, kwargs)
        return reply.take(await self._decode(request).aresult())

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        request, reply = await self._arequest(messages, kwargs)
        chunks = await self._decode(request).achunks()
        return (reply.take(chunk) async for chunk in chunks)

    # Token counts -----------------------------------------------------------------------------

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
        return make_prompt_helper(self.engine, request, given, metadata)

    # Choices ----------------------------------------------------------------------------------

    @dispatcher.span
    def choose(
        self, prompt: str | Sequence[ChatMessage], choices: Sequence[str], **kwargs: Any
    ) -> Choice:
        """Return the likeliest of some responses, and the probability of each.

        The members score all of them; nothing is generated. This needs no extra and takes about as
        long as reading the prompt.

        Args:
            prompt: a prompt, which is treated as by `complete`, or messages, as by `chat`.
            choices: two or more different texts.
            **kwargs: options of `AdaFuseConfig`.

        Raises:
            InvalidInputError: the prompt, the choices or an option cannot be used.
            DecodingError: no member can score all choices.
        """
        return self.engine.choose(**self._choice(prompt, choices, kwargs))

    @dispatcher.span
    async def achoose(
        self, prompt: str | Sequence[ChatMessage], choices: Sequence[str], **kwargs: Any
    ) -> Choice:
        """Return what `choose` returns, without blocking the event loop."""
        await self._aload()
        return await self.engine.achoose(**self._choice(prompt, choices, kwargs))

    # Structured prediction --------------------------------------------------------------------

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an object of `output_cls` from the members' reply to a prompt.

        The prompt includes the schema of the class. Where `enforce` allows it, the members can
        write nothing but an object that fits the schema. Otherwise, code fences and text around
        the object are ignored.

        Raises:
            MalformedReplyError: the reply is no valid object, for example because it was cut off.
            InvalidInputError: the prompt or an option cannot be used.
        """
        messages = self._asking(output_cls, prompt, prompt_args)
        options = self._object_options(output_cls, llm_kwargs)
        output = parsed(output_cls, self.chat(messages, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=output))
        return output

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return what `structured_predict` returns, without blocking the event loop."""
        messages = self._asking(output_cls, prompt, prompt_args)
        options = await asyncio.to_thread(self._object_options, output_cls, llm_kwargs)
        output = parsed(output_cls, await self.achat(messages, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=output))
        return output

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Yield partial objects during decoding, then the complete and valid object."""
        messages = asking(output_cls, prompt.format_messages(llm=self, **prompt_args))
        options = self._object_options(output_cls, llm_kwargs)
        partial = Partial(output_cls)
        for chunk in self.stream_chat(messages, **options):
            if (obj := partial.take(chunk)) is not None:
                yield obj
        yield parsed(output_cls, chunk)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        messages = asking(output_cls, prompt.format_messages(llm=self, **prompt_args))
        options = await asyncio.to_thread(self._object_options, output_cls, llm_kwargs)

        async def objects() -> AsyncGenerator[Any, None]:
            partial = Partial(output_cls)
            async with aclosing(await self.astream_chat(messages, **options)) as stream:
                async for chunk in stream:
                    if (obj := partial.take(chunk)) is not None:
                        yield obj
            yield parsed(output_cls, chunk)

        return objects()

    # Tools ------------------------------------------------------------------------------------

    @override
    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the keywords of `chat` for the forms of `chat_with_tools`.

        Calls in the reply are `ToolCallBlock` blocks of the message; see
        `get_tool_calls_from_response`. Where `enforce` allows it, the members can write nothing but
        text and well-formed calls of these tools, with arguments that fit the tools' schemas.
        Otherwise, a malformed call stays in the text, and
        ``additional_kwargs["adafuse_warnings"]`` of the response gives the reason.

        Args:
            tools: tools that the members can call.
            user_msg: the user's message, which follows `chat_history`.
            chat_history: earlier messages.
            verbose: not used.
            allow_parallel_tool_calls: whether the reply can have several calls.
            tool_required: whether the reply must call a tool, if `tool_choice` is not given.
            **kwargs: ``tool_choice`` (``"auto"``, ``"none"`` or False; ``"required"``, ``"any"``
                or True; the name of a tool, or a dict of OpenAI), and options of `AdaFuseConfig`.
        """
        messages = list(chat_history or ())
        if user_msg:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        choice = kwargs.pop("tool_choice", None)
        if choice is None and tool_required:
            choice = "required"
        return {
            "messages": messages,
            "tools": [to_openai_tool(tool) for tool in tools],
            "tool_choice": choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls in a response or in a chunk of a stream.

        In a chunk, the arguments of the last call may be unfinished.

        Raises:
            MalformedReplyError: there is no call and `error_on_no_tool_call` is true, or a limit
                cut the only call off.
        """
        calls = selections(response.message)
        warnings = response.additional_kwargs.get(WARNINGS_KEY)
        if not calls and warnings and getattr(response.raw, "finish_reason", None) in CUT:
            raise MalformedReplyError(str(warnings[0]))
        if not calls and error_on_no_tool_call:
            raise MalformedReplyError(
                f"the response calls no tool: {response.message.content!r:.200}. Pass "
                "tool_required=True to request a call, or error_on_no_tool_call=False to allow a "
                "response without one"
            )
        return calls

    def _asking(
        self, output_cls: type[Model], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
    ) -> list[ChatMessage]:
        """Return a conversation that requests an object, and report the beginning."""
        dispatcher.event(
            LLMStructuredPredictStartEvent(
                output_cls=output_cls, template=prompt, template_args=prompt_args
            )
        )
        return asking(output_cls, prompt.format_messages(llm=self, **prompt_args))

    # Requests ---------------------------------------------------------------------------------

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
        if self.messages_to_prompt in (None, generic_prompt):
            turns = to_turns(with_prompts, self._warn_once)
            conversation = to_conversation(turns, **described)
            return Request(messages=conversation, options=options)
        if any(described.values()):
            turns = to_turns(with_prompts, self._warn_once)
            plain = to_conversation(turns, **described).flat()
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
