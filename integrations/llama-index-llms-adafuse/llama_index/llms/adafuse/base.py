"""The LlamaIndex LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.prompts import BasePromptTemplate
from llama_index.llms.adafuse._calls import WARNINGS_KEY, selections, to_openai_tool
from llama_index.llms.adafuse._model import LLMOptions, Members
from llama_index.llms.adafuse._requests import RequestingLLM
from llama_index.llms.adafuse._structured import Model, Partial, asking, parsed
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Unpack, override

from adafuse_llm import Choice, Engine, MalformedReplyError
from adafuse_llm.adapters.reply import CUT

if TYPE_CHECKING:
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.tools import BaseTool

dispatcher = get_dispatcher(__name__)


class AdaFuseLLM(RequestingLLM):
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
