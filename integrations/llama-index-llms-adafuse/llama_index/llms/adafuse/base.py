"""The LlamaIndex LLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
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
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_serializer
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.tools.calling import acall_tool_with_selection, call_tool_with_selection
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.adafuse._callbacks import chat_callback, completion_callback
from llama_index.llms.adafuse._calls import (
    REACT_KEYWORDS,
    TOOL_KEYWORDS,
    CallAttempts,
    Reply,
    Toolbox,
    selections,
    to_openai_tool,
)
from llama_index.llms.adafuse._decode import Chunk, Decode, aends_when_closed, ends_when_closed
from llama_index.llms.adafuse._messages import Instructions, add_prompts, to_turns
from llama_index.llms.adafuse._react import describes_steps, with_observation
from llama_index.llms.adafuse._structured import Attempts, Model, Partial
from llama_index.llms.adafuse._tokens import LongestTokenizer, make_prompt_helper
from llama_index.llms.adafuse.errors import aadapter_errors, adapter_errors
from llama_index_instrumentation import get_dispatcher
from typing_extensions import Self, Unpack, override

from adafuse_llm import (
    AdaFuseConfig,
    Choice,
    Engine,
    InvalidInputError,
    InvalidOptionError,
    MalformedReplyError,
    MemberSpec,
    MissingDependencyError,
    RuntimeConfig,
)
from adafuse_llm.adapters.conversation import to_conversation, to_messages
from adafuse_llm.adapters.ensembles import Ensemble, check_engine, fields_from_config
from adafuse_llm.adapters.options import Unsupported, check_option_names
from adafuse_llm.adapters.reply_form import ReplyForm
from adafuse_llm.adapters.schema import close_objects
from adafuse_llm.config import CONSTRAINTS, DecodeOptions

if TYPE_CHECKING:
    import torch
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.chat_engine.types import AgentChatResponse
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.rate_limiter import BaseRateLimiter
    from llama_index.core.tools import BaseTool, ToolOutput
    from llama_index.core.types import BaseOutputParser

logger = logging.getLogger(__name__)
dispatcher = get_dispatcher(__name__)

T = TypeVar("T")

_PROGRAM_MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.LLM)
_LOADING = ("dtype", "device_map", "revision", "trust_remote_code", "runtime")
ANY_TEXT = ReplyForm()
ONE = {"n": 1}
"""Number of responses where only one can be used, whatever the LLM's option `n` is."""

_OTHER_NAMES_OF_MEMBERS = ("member", "model", "models", "model_id", "model_name", "model_path")


def _option(name: str) -> Any:
    """Return a field for an option of `AdaFuseConfig`; None means the engine's value."""
    return Field(default=None, description=AdaFuseConfig.model_fields[name].description)


class LLMOptions(DecodeOptions, total=False):
    """The keyword arguments of `AdaFuseLLM`, for type checkers."""

    dtype: str | torch.dtype
    device_map: str | None
    revision: str | None
    trust_remote_code: bool
    runtime: RuntimeConfig
    context_window: int | None
    is_chat_model: bool | None
    emit_events: bool
    retries: int
    enforce: Literal["auto"] | bool
    complete_as_chat: bool | None
    react_stop: bool
    unsupported: Unsupported
    max_tokens: int | None
    max_completion_tokens: int | None
    num_predict: int | None
    num_return_sequences: int | None
    stop_sequences: str | Sequence[str] | None
    system_prompt: str | None
    messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None
    completion_to_prompt: Callable[[str], str] | None
    query_wrapper_prompt: BasePromptTemplate | str | None
    callback_manager: CallbackManager
    output_parser: BaseOutputParser | None
    pydantic_program_mode: PydanticProgramMode | str
    rate_limiter: BaseRateLimiter | None


class AdaFuseLLM(CustomLLM, FunctionCallingLLM):
    """A LlamaIndex LLM backed by an ensemble of local language models.

    The members are loaded on first use. LLMs with the same members share one engine. An LLM is
    thread-safe. A copy by `copy.deepcopy` has options of its own and shares the engine, the
    callback manager and the rate limiter. A pickled LLM contains the list of its members and its
    options, but no weights.

    Calls raise an `AdaFuseLLMError` where other code of this package raises a `ValueError` or
    `TypeError`, because LlamaIndex's response synthesizers ignore errors of these types.

    Args:
        members: folders, GGUF files, hub ids or `MemberSpec` objects; an empty list for the three
            small models that ship with adafuse-llm.
        engine: an existing engine, such as a `RemoteEngine`, to use instead of `members` and the
            options for loading them.
        dtype, device_map, revision, trust_remote_code: as for `AdaFuseEngine.from_pretrained`.
        runtime: settings of the engine's scheduler and caches.
        context_window, is_chat_model: values of the same names in `metadata`, for LlamaIndex. They
            change nothing in the members.
        emit_events: whether to emit instrumentation events for the rounds.
        retries: how many times structured prediction, `chat_with_tools` and `predict_and_call`
            request another reply if a reply is malformed.
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
        unsupported: what happens to options of other providers that do not exist here, such as
            ``presence_penalty``. ``"error"``: they are an error. ``"warn"``: they are dropped, with
            one warning for each option. Each call can override it. Unknown options are always an
            error.
        **kwargs: options of `AdaFuseConfig`, which each call can override, and the arguments of
            every LlamaIndex LLM: `system_prompt`, `completion_to_prompt`, `messages_to_prompt`,
            `query_wrapper_prompt`, `callback_manager`, `output_parser`, `pydantic_program_mode`,
            `rate_limiter`.

    Raises:
        InvalidInputError: both or neither of `members` and `engine` are given, or an option is
            unknown or out of range.
    """

    model_config = ConfigDict(validate_assignment=True)

    members: tuple[Any, ...] | None = Field(
        default=None,
        description="Folders, GGUF files, hub ids or MemberSpec objects; empty for the embedded "
        "members.",
    )
    dtype: Any = Field(default="auto", description="Data type of the weights.")
    device_map: str | None = Field(
        default=None, description="Devices on which accelerate places the weights."
    )
    revision: str | None = Field(default=None, description="Revision of hub models.")
    trust_remote_code: bool = Field(
        default=False, description="Whether to run code from model repositories."
    )
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig,
        description="Settings of the engine's scheduler and caches.",
    )
    context_window: int | None = Field(
        default=None,
        ge=1,
        description="Context window in the metadata, in tokens. Default: the smallest of the "
        "active members.",
    )
    is_chat_model: bool | None = Field(
        default=None,
        description="Whether LlamaIndex sends chats instead of completions. Default: whether an "
        "active member has a chat template.",
    )
    emit_events: bool = Field(
        default=True,
        description="Whether to emit instrumentation events for the rounds. Each response has "
        "its own span.",
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="How many times to request another reply if a reply is malformed.",
    )
    enforce: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether to enforce the form of tool calls and objects: 'auto' (where "
        "possible), True (or raise an error), False.",
    )
    complete_as_chat: bool | None = Field(
        default=None,
        description="Whether completions go through the members' chat templates. Default: whether "
        "an active member has one and completion_to_prompt is not set.",
    )
    react_stop: bool = Field(
        default=True,
        description="Whether the reply to a ReAct agent ends at a line that begins with "
        "'Observation:'.",
    )
    unsupported: Unsupported = Field(
        default="error",
        description="What happens to options of other providers that do not exist here: 'error', "
        "or 'warn' to drop them with a warning.",
    )
    margin_threshold: float | None = _option("margin_threshold")
    max_words: int | None = _option("max_words")
    branching_factor: int | None = _option("branching_factor")
    max_word_tokens: int | None = _option("max_word_tokens")
    max_word_letters: int | None = _option("max_word_letters")
    max_new_tokens: int | None = _option("max_new_tokens")
    stop: tuple[str, ...] | None = _option("stop")
    weights: dict[str, float] | tuple[float, ...] | None = _option("weights")
    json_schema: Any = _option("json_schema")
    regex: str | None = _option("regex")
    grammar: str | None = _option("grammar")
    choices: tuple[str, ...] | None = _option("choices")
    use: tuple[str, ...] | None = _option("use")
    temperature: float | None = _option("temperature")
    top_p: float | None = _option("top_p")
    top_k: int | None = _option("top_k")
    min_p: float | None = _option("min_p")
    seed: int | None = _option("seed")
    n: int | None = _option("n")
    repetition_penalty: float | None = _option("repetition_penalty")
    presence_penalty: float | None = _option("presence_penalty")
    frequency_penalty: float | None = _option("frequency_penalty")
    no_repeat_ngram_size: int | None = _option("no_repeat_ngram_size")
    min_new_tokens: int | None = _option("min_new_tokens")
    logit_bias: dict[str, float] | None = _option("logit_bias")
    logprobs: bool | None = _option("logprobs")
    top_logprobs: int | None = _option("top_logprobs")
    chat_template_kwargs: dict[str, Any] | None = _option("chat_template_kwargs")
    continue_final_message: bool | None = _option("continue_final_message")

    _passed_engine: Engine | None = PrivateAttr(default=None)
    _fixed_options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _warnings: set[str] = PrivateAttr(default_factory=set)

    def __init__(
        self,
        members: Sequence[str | MemberSpec | dict[str, Any]] | None = None,
        *,
        engine: Engine | None = None,
        **kwargs: Unpack[LLMOptions],
    ) -> None:
        fields = {*type(self).model_fields} - {*AdaFuseConfig.model_fields}
        given: dict[str, Any] = {**kwargs}
        for name in _OTHER_NAMES_OF_MEMBERS:
            if name in given:
                raise InvalidOptionError(
                    f"unknown option {name!r}. Did you mean 'members'? It takes a list of folders, "
                    "hub ids or MemberSpec objects: members=[...]"
                )
        base = {key: given.pop(key) for key in fields & {*given}}
        warnings: list[str] = []
        options = check_option_names(
            given,
            extra=sorted(fields),
            unsupported=base.get("unsupported") or "error",
            warn=warnings.append,
        )
        config = AdaFuseConfig(**options)
        check_engine(engine)
        if (members is None) == (engine is None):
            raise InvalidInputError(
                "pass either members=[...] (folders, hub ids or MemberSpec) or engine=...; "
                "AdaFuseLLM.from_embedded() uses the small models that ship with adafuse-llm"
            )
        if engine is not None and (loading := [key for key in _LOADING if key in base]):
            raise InvalidInputError(
                f"engine= cannot be combined with {', '.join(loading)}, because the engine is "
                "already loaded; pass loading options when you create the engine"
            )
        if (mode := base.get("pydantic_program_mode")) not in (None, *_PROGRAM_MODES):
            raise InvalidInputError(
                f"pydantic_program_mode must be 'default' or 'llm'; got {mode!r}. With both, "
                "structured prediction enforces the schema of the object where it can"
            )
        ensemble = Ensemble(given=engine) if members is None else Ensemble.of(members)
        if isinstance(base.get("query_wrapper_prompt"), str):
            base["query_wrapper_prompt"] = PromptTemplate(base["query_wrapper_prompt"])
        super().__init__(
            members=None if members is None else ensemble.members,
            **{key: value for key, value in base.items() if value is not None},
            **{name: getattr(config, name) for name in options},
        )
        self._passed_engine = engine
        if self.temperature is None:
            self.temperature = (engine.config if engine else config).temperature
        for message in warnings:
            self._warn_once(message)

    @classmethod
    def from_embedded(cls, **kwargs: Unpack[LLMOptions]) -> Self:
        """Create an LLM from the three small members that ship with adafuse-llm.

        Raises:
            InvalidInputError: `members` or `engine` is given.
            InvalidOptionError: an option is unknown or out of range.
        """
        if given := [name for name in ("members", "engine") if name in kwargs]:
            raise InvalidInputError(
                f"from_embedded has no argument {given[0]!r}, because its members ship with "
                f"adafuse-llm. For other members, call AdaFuseLLM({given[0]}=...); to choose among "
                "the three, pass use=[...]"
            )
        return cls(members=[], **kwargs)

    @classmethod
    def from_config(cls, path: str | PathLike[str], **kwargs: Unpack[LLMOptions]) -> Self:
        """Create an LLM from a configuration file, such as one written by ``adafuse tune``.

        Args:
            path: a YAML or JSON file; see `adafuse_llm.loading.config_file`.
            **kwargs: arguments of the constructor, which override the file.

        Raises:
            InvalidInputError: the file cannot be read, or has unknown or invalid content.
        """
        return cls(**{"members": [], **fields_from_config(path), **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseLLM"

    @property
    def engine(self) -> Engine:
        """The engine. The first access loads the members.

        Raises:
            LoadError: a member cannot be loaded.
        """
        return self._ensemble.engine()

    def warmup(self) -> Self:
        """Load the members now instead of on the first call; return the LLM."""
        self._ensemble.engine()
        return self

    def unload(self) -> None:
        """Release the members. The next call loads them again.

        This affects all LLMs that share the members. An engine passed as `engine` stays open.
        """
        self._ensemble.unload()

    @property
    @adapter_errors()
    def metadata(self) -> LLMMetadata:
        """Context window, output limit and abilities.

        They are read from the members' files. Reading them loads the members only if one of these
        files is not on this machine or does not tell.

        ``is_chat_model`` is true if at least one active member has a chat template. The other
        members then read messages as plain text. ``is_function_calling_model`` is true if the LLM
        is a chat model, and well-formed tool calls can be enforced. LlamaIndex then uses function
        agents and programs that call functions.
        """
        config = self._config(self._options({}))
        names = tuple(config.member_weights(self._ensemble.names))
        is_chat = self.is_chat_model
        if is_chat is None:
            is_chat = bool(self._told(lambda ensemble: ensemble.is_chat_model(names)))
        return LLMMetadata(
            context_window=self.context_window
            or self._told(lambda ensemble: ensemble.context_window(names))
            or LLMMetadata().context_window,
            num_output=config.max_new_tokens,
            is_chat_model=is_chat,
            is_function_calling_model=is_chat and self._can_enforce_calls,
            model_name=self._model_name,
        )

    @property
    def max_tokens(self) -> int:
        """Another name of `max_new_tokens`. If that is not set, this is the engine's value."""
        return self._config(self._options({})).max_new_tokens

    @max_tokens.setter
    def max_tokens(self, value: int | None) -> None:
        self.max_new_tokens = value

    @property
    @adapter_errors()
    def tokenizer(self) -> Callable[[str], list[int]]:
        """A function from a text to its tokens, for ``Settings.tokenizer``.

        It returns the tokens of the active member that needs the most tokens for the text. A text
        that fits by this count fits every member. Only the number of tokens is meaningful. Reading
        the property loads the members.
        """
        return LongestTokenizer(self.engine, self._active_members(self._options({})))

    @adapter_errors()
    def prompt_helper(self) -> PromptHelper:
        """Return a prompt helper that packs prompts by the members' own token counts.

        Set ``Settings.prompt_helper`` to it, or pass it to `get_response_synthesizer`. Without it,
        LlamaIndex counts tokens with a tokenizer of its own. If the members need more tokens, the
        prompts of a query engine may not fit, and the query fails. The helper also reserves space
        for the markers of the members' chat templates. It loads the members.
        """
        metadata = self.metadata
        system = self.system_prompt or ""
        if metadata.is_chat_model:
            messages = [ChatMessage(role=role, content="x") for role in ("system", "user")]
            request = self._messages(self._extend_messages(messages), {})  # as in `predict`
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

    def to_payload(self) -> dict[str, Any]:
        if self._ensemble.is_loaded:
            return super().to_payload()
        return {"class_name": self.class_name(), "model_name": self._model_name}

    # The eight entry points -------------------------------------------------------------------

    @adapter_errors()
    @completion_callback
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        request = self._prompt(prompt, formatted, kwargs)
        return _completion(request)(self._decode(request).result())

    @ends_when_closed
    @completion_callback
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        request = self._prompt(prompt, formatted, kwargs)
        to_response = _completion(request)
        return (to_response(chunk) for chunk in self._decode(request).chunks())

    @aadapter_errors
    @completion_callback
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        await self._aload()
        request = self._prompt(prompt, formatted, kwargs)
        return _completion(request)(await self._decode(request).aresult())

    @aends_when_closed
    @completion_callback
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        await self._aload()
        request = self._prompt(prompt, formatted, kwargs)
        to_response = _completion(request)
        chunks = await self._decode(request).achunks()
        return (to_response(chunk) async for chunk in chunks)

    @adapter_errors()
    @chat_callback
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the reply to a conversation.

        Args:
            messages: the conversation.
            **kwargs: options of `AdaFuseConfig`, and ``tools``, ``tool_choice`` and
                ``parallel_tool_calls`` in the form of OpenAI; see `chat_with_tools`.

        Raises:
            AdaFuseLLMError: the messages, the tools or an option cannot be used.
        """
        request, to_response = self._chat(messages, kwargs)
        return to_response(self._decode(request).result())

    @ends_when_closed
    @chat_callback
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        request, to_response = self._chat(messages, kwargs)
        return (to_response(chunk) for chunk in self._decode(request).chunks())

    @aadapter_errors
    @chat_callback
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        request, to_response = await self._achat(messages, kwargs)
        return to_response(await self._decode(request).aresult())

    @aends_when_closed
    @chat_callback
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        request, to_response = await self._achat(messages, kwargs)
        chunks = await self._decode(request).achunks()
        return (to_response(chunk) async for chunk in chunks)

    # Choices ----------------------------------------------------------------------------------

    @adapter_errors()
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
            AdaFuseLLMError: the prompt, the choices or an option cannot be used.
            DecodingError: no member can score all choices.
        """
        return self.engine.choose(**self._choice_request(prompt, choices, kwargs))

    @aadapter_errors
    @dispatcher.span
    async def achoose(
        self, prompt: str | Sequence[ChatMessage], choices: Sequence[str], **kwargs: Any
    ) -> Choice:
        """Return what `choose` returns, without blocking the event loop."""
        await self._aload()
        return await self.engine.achoose(**self._choice_request(prompt, choices, kwargs))

    # Structured prediction --------------------------------------------------------------------

    @adapter_errors()
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
        the object are ignored. If a reply is not a valid object, for example because a validator
        of the class refuses it, the LLM requests another one, up to `retries` times.

        Raises:
            AdaFuseLLMError: no reply is a valid object (the cause is a `MalformedReplyError`), or
                the prompt or an option cannot be used.
        """
        attempts = self._attempts(output_cls, prompt, prompt_args)
        options = self._object_options(output_cls, llm_kwargs)
        for messages in attempts:
            attempts.take(self.chat(messages, **options).message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=attempts.output))
        return attempts.output

    @aadapter_errors
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return what `structured_predict` returns, without blocking the event loop."""
        attempts = self._attempts(output_cls, prompt, prompt_args)
        options = await asyncio.to_thread(self._object_options, output_cls, llm_kwargs)
        for messages in attempts:
            reply = await self.achat(messages, **options)
            attempts.take(reply.message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=attempts.output))
        return attempts.output

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Yield partial objects during decoding, then the complete and valid object."""
        with adapter_errors():
            conversation = prompt.format_messages(llm=self, **prompt_args)
            attempts = Attempts(output_cls, conversation, self.retries)
            options = self._object_options(output_cls, llm_kwargs)
            for messages in attempts:
                partial, text = Partial(output_cls), ""
                for chunk in self.stream_chat(messages, **options):
                    text = chunk.message.content or ""
                    if (obj := partial.take(text)) is not None:
                        yield obj
                attempts.take(text)
            yield attempts.output

    @aadapter_errors
    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        conversation = prompt.format_messages(llm=self, **prompt_args)
        attempts = Attempts(output_cls, conversation, self.retries)
        options = await asyncio.to_thread(self._object_options, output_cls, llm_kwargs)

        async def objects() -> AsyncGenerator[Any, None]:
            with adapter_errors():
                for messages in attempts:
                    partial, text = Partial(output_cls), ""
                    stream = await self.astream_chat(messages, **options)
                    async with aclosing(stream):
                        async for chunk in stream:
                            text = chunk.message.content or ""
                            if (obj := partial.take(text)) is not None:
                                yield obj
                    attempts.take(text)
                yield attempts.output

        return objects()

    # Tools ------------------------------------------------------------------------------------

    @adapter_errors()
    @override
    def chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Return the reply to a conversation, in which the members can call tools.

        Calls are `ToolCallBlock` blocks of the message; see `get_tool_calls_from_response`.
        Where `enforce` allows it, the members can write nothing but text and well-formed calls of
        these tools, with arguments that fit the tools' schemas. Otherwise, if a call is malformed
        or missing, the LLM requests another reply, up to `retries` times. The streaming forms
        request no other reply. They leave a malformed call in the text. If the whole text is JSON
        of valid calls, it becomes calls. If a reply looks like a call and is none,
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

        Raises:
            AdaFuseLLMError: a tool, the choice or an option cannot be used, or no reply has the
                requested form (the cause is a `MalformedReplyError`).
            MissingDependencyError: `enforce` is True and the extra is not installed.
        """
        request = self._prepare_chat_with_tools(
            tools,
            user_msg,
            chat_history,
            allow_parallel_tool_calls=allow_parallel_tool_calls,
            tool_required=tool_required,
            **kwargs,
        )
        attempts = CallAttempts(request, self.retries)
        for keywords in attempts:
            attempts.take(self.chat(**keywords))
        return attempts.response

    @aadapter_errors
    @override
    async def achat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Return what `chat_with_tools` returns, without blocking the event loop."""
        request = self._prepare_chat_with_tools(
            tools,
            user_msg,
            chat_history,
            allow_parallel_tool_calls=allow_parallel_tool_calls,
            tool_required=tool_required,
            **kwargs,
        )
        attempts = CallAttempts(request, self.retries)
        for keywords in attempts:
            attempts.take(await self.achat(**keywords))
        return attempts.response

    @adapter_errors()
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
        """Return the keywords of `chat` for `chat_with_tools`."""
        choice = kwargs.pop("tool_choice", None)
        if choice is None and tool_required:
            choice = "required"
        return {
            "messages": _conversation(user_msg, chat_history),
            "tools": [to_openai_tool(tool) for tool in tools],
            "tool_choice": choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    @adapter_errors()
    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls in a response or in a chunk of a stream.

        In a chunk, the arguments of the last call may be unfinished.

        Raises:
            AdaFuseLLMError: there is no call and `error_on_no_tool_call` is true.
        """
        calls = selections(response.message)
        if not calls and error_on_no_tool_call:
            raise MalformedReplyError(
                f"the response calls no tool: {response.message.content!r:.200}. Pass "
                "tool_required=True to request a call, or error_on_no_tool_call=False to allow a "
                "response without one"
            )
        return calls

    @adapter_errors()
    @override
    def predict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        error_on_no_tool_call: bool | None = None,
        error_on_tool_error: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """Let the members select a tool, call it, and return its output.

        The members write a tool call as in `chat_with_tools` if the LLM is a function-calling
        model, or if ``tool_choice`` or ``tool_required`` is given. Otherwise, or if an argument for
        a ReAct agent is given, they write a step of a ReAct agent. Decoding then stops where they
        would begin to invent a tool's result. If a call or step cannot be parsed, the LLM requests
        another one, up to `retries` times.

        Args:
            tools: tools that the members can call.
            user_msg: the user's message.
            chat_history: earlier messages.
            verbose: whether to print calls and their results.
            allow_parallel_tool_calls: whether several tools can be called. A step of a ReAct agent
                calls one.
            error_on_no_tool_call: whether a response without a call is an error; otherwise, return
                its text. Default: true, but false for a step of a ReAct agent.
            error_on_tool_error: whether to raise an error if a tool fails; otherwise, return its
                error as its output.
            **kwargs: ``tool_choice`` and ``tool_required`` as in `chat_with_tools`;
                `react_chat_formatter`, `output_parser`, `tool_retriever` and `memory` of a ReAct
                agent; and options of `AdaFuseConfig`.

        Raises:
            AdaFuseLLMError: no call or step can be parsed (the cause is a `MalformedReplyError`),
                a call is missing, a tool failed, or an option cannot be used.
        """
        if self._takes_react_step(kwargs):
            step = self._step_and_call(tools, user_msg, chat_history, verbose, kwargs)
            with ThreadPoolExecutor(max_workers=1) as pool:  # an event loop may run in this thread
                response = pool.submit(copy_context().run, asyncio.run, step).result()
            return _checked(response, error_on_no_tool_call or False, error_on_tool_error)
        reply = self.chat_with_tools(
            tools,
            user_msg,
            chat_history,
            allow_parallel_tool_calls=allow_parallel_tool_calls,
            **kwargs,
        )
        calls = self.get_tool_calls_from_response(reply, error_on_no_tool_call is not False)
        outputs = [call_tool_with_selection(call, tools, verbose=verbose) for call in calls]
        return _checked(_agent_response(reply, outputs), False, error_on_tool_error)

    @aadapter_errors
    @override
    async def apredict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        error_on_no_tool_call: bool | None = None,
        error_on_tool_error: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """Return what `predict_and_call` returns, without blocking the event loop."""
        await self._aload()
        if self._takes_react_step(kwargs):
            response = await self._step_and_call(tools, user_msg, chat_history, verbose, kwargs)
            return _checked(response, error_on_no_tool_call or False, error_on_tool_error)
        reply = await self.achat_with_tools(
            tools,
            user_msg,
            chat_history,
            allow_parallel_tool_calls=allow_parallel_tool_calls,
            **kwargs,
        )
        calls = self.get_tool_calls_from_response(reply, error_on_no_tool_call is not False)
        outputs = await asyncio.gather(
            *(acall_tool_with_selection(call, tools, verbose=verbose) for call in calls)
        )
        return _checked(_agent_response(reply, outputs), False, error_on_tool_error)

    def _takes_react_step(self, kwargs: Mapping[str, Any]) -> bool:
        if any(kwargs.get(key) is not None for key in REACT_KEYWORDS):
            return True
        if kwargs.get("tool_choice") is not None or kwargs.get("tool_required"):
            return False
        return not self.metadata.is_function_calling_model

    async def _step_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None,
        chat_history: list[ChatMessage] | None,
        verbose: bool,
        kwargs: dict[str, Any],
    ) -> AgentChatResponse:
        from llama_index.llms.adafuse._tools import step_and_call

        conversation = _conversation(user_msg, chat_history)
        agent = {key: kwargs[key] for key in REACT_KEYWORDS if kwargs.get(key) is not None}
        given = {key: value for key, value in kwargs.items() if key not in REACT_KEYWORDS}
        options = self._checked(given, extra=REACT_KEYWORDS)
        stop = self._config(_merged(self._options({}), options)).stop
        llm = self.model_copy()
        llm._fixed_options = {**ONE, **options, "stop": with_observation(stop)}
        return await step_and_call(llm, tools, conversation, agent, self.retries, verbose=verbose)

    # Copies and pickles -----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for shared in (self._passed_engine, self.callback_manager, self.rate_limiter):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AdaFuseConfig.model_fields and value is not None:
            value = getattr(AdaFuseConfig().override({name: value}), name)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        if self._passed_engine is not None:
            raise TypeError(
                "an LLM with a passed engine cannot be pickled, because pickles contain no "
                "weights; create the LLM with members=[...], which the other process can load"
            )
        return super().__getstate__()

    @field_serializer("members")
    def _serialize_members(self, members: tuple[MemberSpec, ...] | None) -> list[Any] | None:
        return self._ensemble.identity["members"] if members else None if members is None else []

    @field_serializer("dtype")
    def _serialize_dtype(self, dtype: Any) -> str:
        return str(dtype)

    # ------------------------------------------------------------------------------------------

    @property
    def _ensemble(self) -> Ensemble:
        if self._passed_engine is not None:
            return Ensemble(given=self._passed_engine)
        return Ensemble.of(self.members or (), **{key: getattr(self, key) for key in _LOADING})

    @property
    def _model_name(self) -> str:
        return "+".join(self.use or self._ensemble.names)

    def _options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call: those of the LLM, updated with the call's overrides."""
        fields = {name: getattr(self, name, None) for name in AdaFuseConfig.model_fields}
        options = {name: value for name, value in fields.items() if value is not None}
        return _merged(options, self._fixed_options, self._checked(overrides))

    def _checked(self, given: Mapping[str, Any], *, extra: Sequence[str] = ()) -> dict[str, Any]:
        """Return the options of a call under the engine's names, without those to be dropped."""
        options = {**given}
        unsupported = options.pop("unsupported", None) or self.unsupported
        return check_option_names(
            options, extra=extra, unsupported=unsupported, warn=self._warn_once
        )

    def _config(self, options: Mapping[str, Any]) -> AdaFuseConfig:
        """Return the engine's options, overridden by `options`. This loads nothing."""
        config = self.engine.config if self._ensemble.is_loaded else AdaFuseConfig()
        return config.override(options)

    def _is_constrained(self, options: Mapping[str, Any]) -> bool:
        config = self._config(options)
        return any(getattr(config, name) is not None for name in CONSTRAINTS)

    def _told(self, read: Callable[[Ensemble], T | None]) -> T | None:
        """Read a property of the ensemble. Load the members if their files do not tell."""
        value = read(self._ensemble)
        if value is None and not self._ensemble.is_loaded:
            self._ensemble.engine()
            value = read(self._ensemble)
        return value

    def _active_members(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the members that decode with these options.

        Raises:
            InvalidOptionError: an option is out of range or does not match the members.
        """
        engine = self.engine
        return tuple(engine.config.override(options).member_weights(engine.members))

    def _prompt(self, prompt: str, formatted: bool, overrides: Mapping[str, Any]) -> dict[str, Any]:
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
                if not (prompt.strip() or self.system_prompt or self.query_wrapper_prompt):
                    raise InvalidInputError("the prompt is empty, or has only spaces: pass a text")
                message = ChatMessage(role=MessageRole.USER, content=prompt)
                return self._messages([message], overrides)
            prompt = self._extend_prompt(prompt)
        return {"prompt": prompt, **options}

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
    ) -> dict[str, Any]:
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
        if form.calls_tools or (form.tools and not self._is_constrained(options)):
            options = self._enforce(options, form.constraint)
        with_prompts = add_prompts(messages, self.system_prompt, self.query_wrapper_prompt)
        if self.react_stop and not form.calls_tools and describes_steps(with_prompts):
            options["stop"] = with_observation(self._config(options).stop)
        if self.messages_to_prompt in (None, generic_messages_to_prompt):
            return {"messages": to_conversation(to_turns(with_prompts), **described), **options}
        if any(described.values()):
            plain = to_messages(to_turns(with_prompts), **described)
            with_prompts = [ChatMessage(role=m["role"], content=m["content"]) for m in plain]
        return {"prompt": self.messages_to_prompt(with_prompts), **options}

    def _chat(
        self, messages: Sequence[ChatMessage], keywords: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Callable[[Chunk], ChatResponse]]:
        """Return the request for a chat, and a function from its chunks to responses."""
        form = Toolbox.of(keywords)
        overrides = {key: value for key, value in keywords.items() if key not in TOOL_KEYWORDS}
        return self._messages(messages, overrides, form), Reply(form).take

    async def _achat(
        self, messages: Sequence[ChatMessage], keywords: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Callable[[Chunk], ChatResponse]]:
        """Return what `_chat` returns. Load members and compile grammars in a thread."""
        await self._aload()
        if keywords.get("tools"):
            return await asyncio.to_thread(self._chat, messages, keywords)
        return self._chat(messages, keywords)

    def _choice_request(
        self, prompt: str | Sequence[ChatMessage], choices: Sequence[str], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        overrides = {**ONE, **keywords, "choices": choices}
        if isinstance(prompt, str):
            return self._prompt(prompt, False, overrides)
        return self._messages(prompt, overrides)

    @property
    def _can_enforce_calls(self) -> bool:
        if self.enforce is False:
            return False
        return bool(self._told(lambda ensemble: ensemble.can_enforce()))

    def _enforce(
        self, options: dict[str, Any], constraint: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return options that enforce a constraint, or none if it is not to be enforced.

        Raises:
            InvalidOptionError: an option is invalid, or `enforce` is True and the members or the
                engine's strategy cannot enforce the constraint.
            MissingDependencyError: `enforce` is True and the extra is not installed.
        """
        configured = {name for name in CONSTRAINTS if getattr(self.engine.config, name) is not None}
        free = {name: value for name, value in options.items() if name not in CONSTRAINTS}
        free |= dict.fromkeys(configured)
        if self.enforce is False:
            return free
        self.engine.check_grammar(**free)  # an invalid option is an error
        try:
            constrained = {**free, **constraint()}
            self.engine.check_grammar(**constrained)
        except (InvalidOptionError, MissingDependencyError) as error:
            if self.enforce is True:
                raise
            self._warn_once(
                f"the form of a reply is not enforced, so the prompt requests it: {error}. To "
                "omit this warning, set enforce=False"
            )
            return free
        return constrained

    def _object_options(
        self, output_cls: type[Model], llm_kwargs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the options of a chat whose reply is to be an object."""
        given = {**ONE, **(llm_kwargs or {})}
        schema = close_objects(output_cls.model_json_schema())
        options = self._enforce(self._options(given), lambda: {"json_schema": schema})
        enforced = options.get("json_schema") is not None
        return {**given, "json_schema": schema} if enforced else given

    def _warn_once(self, message: str) -> None:
        """Log a warning, unless this LLM or a copy for a call already logged the same one."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    def _decode(self, request: dict[str, Any]) -> Decode:
        return Decode(self.engine, request, emit_events=self.emit_events)

    async def _aload(self) -> None:
        """Load the members without blocking the event loop."""
        ensemble = self._ensemble
        if not ensemble.is_loaded:
            await asyncio.to_thread(ensemble.engine)

    def _attempts(
        self, output_cls: type[Model], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
    ) -> Attempts[Model]:
        dispatcher.event(
            LLMStructuredPredictStartEvent(
                output_cls=output_cls, template=prompt, template_args=prompt_args
            )
        )
        conversation = prompt.format_messages(llm=self, **prompt_args)
        return Attempts(output_cls, conversation, self.retries)


def _completion_response(chunk: Chunk) -> CompletionResponse:
    return CompletionResponse(
        text=chunk.text, delta=chunk.delta, raw=chunk.raw, logprobs=chunk.logprobs
    )


def _completion(request: Mapping[str, Any]) -> Callable[[Chunk], CompletionResponse]:
    """Return a function from the chunks of a response to completions.

    The response to a message excludes reasoning. The continuation of a prompt is unchanged.
    """
    return Reply(ANY_TEXT).take_completion if "messages" in request else _completion_response


def _merged(*options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options. A constraint replaces all constraints before it."""
    merged: dict[str, Any] = {}
    for each in options:
        if any(each.get(name) is not None for name in CONSTRAINTS):
            merged = {name: value for name, value in merged.items() if name not in CONSTRAINTS}
        merged |= each
    return merged


def _conversation(
    user_msg: str | ChatMessage | None, chat_history: Sequence[ChatMessage] | None
) -> list[ChatMessage]:
    """Return a user's message behind earlier messages."""
    if isinstance(user_msg, str):
        user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
    return [*(chat_history or []), *([user_msg] if user_msg else [])]


def _agent_response(reply: ChatResponse, outputs: Sequence[ToolOutput]) -> AgentChatResponse:
    """Return the outputs of tools, or the text of a reply that calls no tool."""
    from llama_index.core.chat_engine.types import AgentChatResponse

    if not outputs:
        return AgentChatResponse(reply.message.content or "")
    return AgentChatResponse("\n\n".join(output.content for output in outputs), list(outputs))


def _checked(
    response: AgentChatResponse, error_on_no_tool_call: bool, error_on_tool_error: bool
) -> AgentChatResponse:
    """Return a response if it has no error that the caller wants to see.

    Raises:
        MalformedReplyError: no tool was called.
        InvalidInputError: a tool failed.
    """
    if error_on_no_tool_call and not response.sources:
        raise MalformedReplyError(f"the response calls no tool: {response.response!r:.200}")
    failed = [source for source in response.sources if source.is_error]
    if error_on_tool_error and failed:
        raise InvalidInputError(f"the tool {failed[0].tool_name!r} failed: {failed[0].content}")
    return response
