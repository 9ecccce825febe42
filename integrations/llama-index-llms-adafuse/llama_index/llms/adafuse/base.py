"""The LlamaIndex LLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, field_serializer
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.adafuse._decode import Decode, Prepared
from llama_index.llms.adafuse._messages import to_turn
from llama_index.llms.adafuse._replies import WARNINGS_KEY, Model, Reply, parsed, reason_of
from typing_extensions import override

from adafuse_llm import Engine, MalformedReplyError, MemberSpec, Request
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.adapters.ensembles import Ensemble
from adafuse_llm.adapters.model import EnsembleFields
from adafuse_llm.adapters.options import check_option_names
from adafuse_llm.adapters.reply import CUT
from adafuse_llm.adapters.reply_form import FORM_KEYWORDS, Enforce, ReplyForm, enforced, form_of
from adafuse_llm.config import CONSTRAINTS, FREE_TOKENS, NO_LIMIT
from adafuse_llm.text.conversation import check_tools

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

T = TypeVar("T")
Members = Iterable[str | MemberSpec | dict[str, Any]] | Literal["embedded"] | None

OBSERVATION = "\nObservation:"
"""The text that ends a ReAct agent's step. A model that writes more invents a tool's result."""

STEP = ("Action:", "Action Input:", "Observation")
"""Texts in every system message that explains the steps of LlamaIndex's ReAct agents."""


class AdaFuseLLM(EnsembleFields, FunctionCallingLLM):
    """A LlamaIndex LLM backed by an ensemble of local language models.

    LangChain's class in `langchain_adafuse` has the same name.

    The members load on first use. An LLM is thread-safe. A pickled LLM has its options and the
    settings of its members, but no weights.

    Args:
        members: folders, GGUF files, hub ids, or mappings with the settings of members. For the
            three small models that ship with adafuse-llm, call `from_embedded`.
        engine: an existing engine, such as a `RemoteEngine`, to use instead of `members`.
        context_window, is_chat_model, is_function_calling_model: values for `metadata` instead of
            the members' own. LlamaIndex's agents and programs pass tools only to function-calling
            models; set the third value to true for members whose calls cannot be enforced.
        request_timeout: time limit of a call in seconds, excluding loading. The keyword ``timeout``
            of a call overrides it.
        round_events: whether each round is an event of LlamaIndex's instrumentation.
        enforce: whether tools and response formats constrain decoding. ``"auto"``: as far as
            possible, and a warning names what is not enforced. True: if something cannot be
            enforced, an error names it. False: only the prompt requests the form.
        **kwargs: options of `AdaFuseConfig`, which each call can override, the fields of
            `EnsembleFields`, and the arguments of every LlamaIndex LLM.
    """

    context_window: int | None = Field(default=None, ge=1)
    is_chat_model: bool | None = None
    is_function_calling_model: bool | None = None
    request_timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    round_events: bool = True
    enforce: Enforce = "auto"

    _shared = ("_given_engine", "callback_manager", "rate_limiter")
    _given_engine: Engine | None = PrivateAttr(default=None)

    def __init__(
        self, members: Members = None, *, engine: Engine | None = None, **kwargs: Any
    ) -> None:
        given = {key: value for key, value in kwargs.items() if value is not None}
        if isinstance(template := given.get("query_wrapper_prompt"), str):
            given["query_wrapper_prompt"] = PromptTemplate(template)
        super().__init__(members=members, engine=engine, **given)
        self._given_engine = engine
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            self._warn_once("pydantic_program_mode has no effect: all objects are read from JSON")
        _ = self._names  # checks the options

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseLLM"

    @property
    def engine(self) -> Engine:
        """The engine. The first access loads the members."""
        return self._ensemble.engine()

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, output limit and abilities, from the members' files.

        Reading this loads the members only if their files lack something.
        """
        limit, names = self._config.max_new_tokens, self._names
        is_chat = self.is_chat_model
        if is_chat is None:
            is_chat = self._reads_messages(names)
        calls = self.is_function_calling_model
        if calls is None:
            calls = is_chat and self.enforce is not False and self._ensemble.can_enforce()
        return LLMMetadata(
            context_window=self.context_window
            or self._known(lambda ensemble: ensemble.context_window(names))
            or LLMMetadata().context_window,
            num_output=FREE_TOKENS if limit in (None, NO_LIMIT) else limit,
            is_chat_model=is_chat,
            is_function_calling_model=calls,
            model_name=self._model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        return {"class_name": self.class_name(), "model_name": self._model_name}

    # The eight entry points -------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._completion(prompt, formatted, kwargs).result()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self._completion(prompt, formatted, kwargs).stream()

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return await self._completion(prompt, formatted, kwargs).aresult()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return await self._completion(prompt, formatted, kwargs).astream()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the reply to a conversation.

        The keywords are options of `AdaFuseConfig`, and ``tools``, ``tool_choice``,
        ``parallel_tool_calls`` and ``response_format`` in OpenAI's form.
        """
        return self._chat(messages, kwargs).result()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chat(messages, kwargs).stream()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._chat(messages, kwargs).aresult()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return await self._chat(messages, kwargs).astream()

    # Token counts -----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """A function from a text to tokens, for ``Settings.tokenizer``. Reading it loads members.

        The tokens are those of the active member that needs the most, so use only their number.
        """
        engine, names = self.engine, self._names

        @lru_cache(maxsize=1000)  # LlamaIndex encodes a text many times to pack a prompt
        def encode(text: str) -> list[int]:
            return max(engine.encode_text(text, use=names, weights=None).values(), key=len)

        return lambda text: [*encode(text)]

    # Structured prediction --------------------------------------------------------------------

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an object of `output_cls` that the members write in reply to a prompt.

        Raises:
            MalformedReplyError: the reply is no valid object, for example because it was cut off.
            InvalidInputError: the prompt or an option cannot be used.
        """
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        return parsed(output_cls, self.chat(messages, **_object(output_cls, llm_kwargs)))

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Like `structured_predict`, but does not block the event loop."""
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        return parsed(output_cls, await self.achat(messages, **_object(output_cls, llm_kwargs)))

    def _structured_stream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Generator[Any, None, None]:
        """Yield partial objects during decoding, then the complete and valid object."""
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        last: Any = None
        for chunk in self.stream_chat(messages, **_object(output_cls, llm_kwargs)):
            if not reason_of(chunk):
                last = process_streaming_objects(chunk, output_cls, last and [last])
                yield last
        yield parsed(output_cls, chunk)

    async def _structured_astream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> AsyncGenerator[Any, None]:
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))

        async def objects() -> AsyncGenerator[Any, None]:
            last: Any = None
            chunks = await self.astream_chat(messages, **_object(output_cls, llm_kwargs))
            async with aclosing(chunks) as stream:
                async for chunk in stream:
                    if not reason_of(chunk):
                        last = process_streaming_objects(chunk, output_cls, last and [last])
                        yield last
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
        """Return the keywords of `chat`. A `tool_choice` overrides `tool_required`."""
        messages = list(chat_history or ())
        if user_msg:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        for tool, form in zip(tools, described, strict=True):
            form["function"]["name"] = tool.metadata.get_name()  # by which core finds it again
        choice = kwargs.pop("tool_choice", None)
        if choice is None and tool_required:
            choice = "required"
        return {
            "messages": messages,
            "tools": described,
            "tool_choice": choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the complete tool calls in a response or in a chunk of a stream.

        Raises:
            MalformedReplyError: there is no call and `error_on_no_tool_call` is true, or a limit
                cut the only call off.
        """
        calls = []
        for block in response.message.blocks:
            if isinstance(block, ToolCallBlock) and isinstance(block.tool_kwargs, dict):
                call: Any = {"tool_name": block.tool_name, "tool_kwargs": block.tool_kwargs}
                calls.append(ToolSelection(tool_id=block.tool_call_id or "", **call))
        warnings = response.additional_kwargs.get(WARNINGS_KEY)
        if not calls and warnings and reason_of(response) in CUT:
            raise MalformedReplyError(str(warnings[0]))
        if not calls and error_on_no_tool_call:
            raise MalformedReplyError(
                f"the response calls no tool: {response.message.content!r:.200}. Pass "
                "tool_required=True to request a call, or error_on_no_tool_call=False to allow a "
                "response without one"
            )
        return calls

    # Requests ---------------------------------------------------------------------------------

    def _completion(
        self, prompt: str, formatted: bool, overrides: Mapping[str, Any]
    ) -> Decode[CompletionResponse]:
        def prepare() -> Prepared[CompletionResponse]:
            options = {**overrides}
            timeout = options.pop("timeout", self.request_timeout)
            request = self._prompt(prompt, formatted, options)
            reply = Reply(None if request.messages is None else ReplyForm(), options)
            return self.engine, replace(request, timeout=timeout), reply.take_completion

        return Decode(prepare, round_events=self.round_events)

    def _prompt(self, prompt: str, formatted: bool, overrides: Mapping[str, Any]) -> Request:
        options = self._call_options(overrides)
        if not formatted:
            if self.completion_to_prompt is not None:
                prompt = self.completion_to_prompt(prompt)
            is_own = self.completion_to_prompt not in (None, default_completion_to_prompt)
            config = self._ensemble.config.override(options)
            names = tuple(config.member_weights(self._ensemble.names))
            if not is_own and self._reads_messages(names):
                message = ChatMessage(role=MessageRole.USER, content=prompt)
                return self._messages(self._extend_messages([message]), overrides, ReplyForm())
            prompt = self._extend_prompt(prompt)
        return Request(prompt=prompt, options=options)

    def _chat(
        self, messages: Sequence[ChatMessage], keywords: Mapping[str, Any]
    ) -> Decode[ChatResponse]:
        def prepare() -> Prepared[ChatResponse]:
            form = form_of(check_tools(keywords.get("tools") or ()), keywords)
            if self.enforce is not True:
                form = form.after(map(to_turn, messages))
            overrides = {key: value for key, value in keywords.items() if key not in FORM_KEYWORDS}
            timeout = overrides.pop("timeout", self.request_timeout)
            request = replace(self._messages(messages, overrides, form), timeout=timeout)
            is_step = not form.calls_tools and _describes_steps(messages)
            return self.engine, request, Reply(form, request.options, is_step=is_step).take

        return Decode(prepare, round_events=self.round_events)

    def _messages(
        self, messages: Sequence[ChatMessage], overrides: Mapping[str, Any], form: ReplyForm
    ) -> Request:
        """Return the request for a chat. With `messages_to_prompt`, all members read one prompt."""
        # determine what the members may write
        options = self._call_options(overrides)
        if not form.is_free:
            form.check_constraints(n for n in CONSTRAINTS if overrides.get(n) is not None)
            options = _without_constraints(options)
        options, warning = enforced(self.engine, form, options, self.enforce)
        if warning:
            self._warn_once(warning)

        # determine what they read: messages for templates, or what `messages_to_prompt` returns
        if not form.calls_tools and _describes_steps(messages):
            options["stop"] = (*self._ensemble.config.override(options).stop, OBSERVATION)
        conversation = to_conversation(
            map(to_turn, messages),
            tools=form.tools,
            tool_choice=form.choice,
            instructions=ReplyForm(schema=form.schema).instructions,
            warn=self._warn_once,
        )
        if self.messages_to_prompt in (None, generic_prompt):
            return Request(messages=conversation, options=options)
        if conversation.tools or conversation.instructions:
            flat = conversation.flat()
            messages = [ChatMessage(role=turn["role"], content=turn["content"]) for turn in flat]
        return Request(prompt=self.messages_to_prompt(messages), options=options)

    # Options and members ----------------------------------------------------------------------

    @property
    def _model_name(self) -> str:
        return "+".join(self.use or self._ensemble.names)

    def _call_options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        options, own = self._options, check_option_names(overrides)
        if any(own.get(name) is not None for name in CONSTRAINTS):
            options = _without_constraints(options)  # a constraint replaces all others
        return {**options, **own}

    def _reads_messages(self, names: tuple[str, ...]) -> bool:
        return bool(self._known(lambda ensemble: ensemble.is_chat_model(names)))

    def _known(self, read: Callable[[Ensemble], T | None]) -> T | None:
        """Read a property of the ensemble. Load the members if their files do not show it."""
        value = read(self._ensemble)
        if value is None and not self._ensemble.is_loaded:
            self._ensemble.engine()
            value = read(self._ensemble)
        return value

    # Copies and pickles -----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._given_engine is not None:
            raise TypeError(
                "an LLM with a passed engine cannot be pickled, because pickles contain no "
                "weights; create the LLM with members=[...], which the other process can load"
            )
        self.__dict__.pop("_ensemble", None)  # core makes the copy from the fields
        return super().__getstate__()

    @field_serializer("members")
    def _serialize_members(self, members: Members) -> Any:
        return members if members in (None, "embedded") else self._ensemble.identity["members"]

    @field_serializer("dtype")
    def _serialize_dtype(self, dtype: Any) -> str:
        return str(dtype)


def _without_constraints(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in CONSTRAINTS}


def _object(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"schema": output_cls.model_json_schema()}}
    return {"n": 1, **(llm_kwargs or {}), "response_format": form}


def _describes_steps(messages: Sequence[ChatMessage]) -> bool:
    roles = (MessageRole.SYSTEM, MessageRole.DEVELOPER)
    systems = [message.content or "" for message in messages if message.role in roles]
    return any(all(text in system for text in STEP) for system in systems)
