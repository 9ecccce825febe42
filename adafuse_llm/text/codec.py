"""Conversion between text and the tokens of one member.

Committed tokens are never tokenized again. New tokens are therefore decoded, and new text is
encoded, *as a continuation* of the tokens before them. Some tokenizers add or strip a space at the
start of a string, or merge characters of old and new text into one token. An encoding is exact if
its tokens, decoded after the context, give exactly the text.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.reasoning import REASONING_CLOSES, REASONING_OPENS
from adafuse_llm.text.chat import Message, default_system, fit, render_plain
from adafuse_llm.text.conversation import Conversation, check_conversation, map_json
from adafuse_llm.text.deadline import run_within
from adafuse_llm.text.fast_tokenizer import FastTokenizer, is_supported
from adafuse_llm.text.templates import ReplyStart, TemplateFacts
from adafuse_llm.text.tool_forms import ToolForm, find_form, render_tools
from adafuse_llm.text.words import REPLACEMENT, added

CONTEXT_TOKENS = 8
"""Number of context tokens that are decoded together with a continuation. More tokens are used if
the context would begin inside a character."""

ANCHORS = ("", "\n", "a", ".", " a")
"""Texts to put before a continuation, so that the tokenizer does not encode the continuation as the
start of a text. The first of these texts that gives an exact encoding is used."""

RENDER_SECONDS = 5.0
"""Maximum CPU time in seconds for which a chat template may render one conversation."""

CACHED_TEXTS = 1_000
"""Number of texts whose tokens a tokenizer's model may cache.

The default of the package `tokenizers` is 10,000. A model that does not split texts into words,
such as Llama 2's, caches whole texts with about 3 kB each, so it would grow by 30 MB.
"""

_MARKS = range(0xF0000, 0x110000)
"""Characters for private use, which mark control tokens that messages spell out."""
_STRIPPED = re.compile(r"\S(?:.*\S)?", re.DOTALL)
"""Matches a text without the whitespace at its ends, which templates may strip."""
_NO_THOUGHT = re.compile(rf"{REASONING_OPENS}\s*(?P<closed>{REASONING_CLOSES}\s*)?\Z")
"""Matches reasoning at the end of a prompt that is open, or closed without any text."""
_NO_MARKS = re.compile("(?!)")
AT_START = ReplyStart()

T = TypeVar("T")
Render = Callable[..., str]
"""A function that renders messages and, if they are given, tools."""


@runtime_checkable
class TextCodec(Protocol):
    """Conversion between text and one member's tokens.

    A codec is thread-safe and keeps no state of requests.
    """

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_messages` uses the member's own chat template."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, including the special tokens that the member expects.

        Control tokens in `text` are treated as plain text.
        """
        ...

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to the start of the assistant's reply.

        Messages have a role and content.
        """
        ...

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        """Encode `text` as a continuation of `context`.

        Returns:
            The tokens, and whether they are exact:
            ``decode(context + tokens) == decode(context) + text``.
        """
        ...

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add to `context`.

        U+FFFD stands for an incomplete character.
        """
        ...


@runtime_checkable
class RendersTools(Protocol):
    """Optional extension of `TextCodec`: conversations with tools in the member's own form.

    For a codec without this extension, tools, calls and results become text of plain messages
    (`Conversation.flat`).
    """

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation, up to the start of the assistant's reply."""
        ...


@runtime_checkable
class RendersTemplates(TextCodec, RendersTools, Protocol):
    """Optional extension of `TextCodec`: control of how the chat template begins a reply.

    A codec without this extension has no variables of templates, and its template neither reads nor
    opens reasoning. A reply that continues a message (`Conversation.continues`) follows the prompt
    of a new reply.
    """

    @property
    def template_facts(self) -> TemplateFacts:
        """What is known of the chat template."""
        ...

    def encode_conversation(
        self, conversation: Conversation, start: ReplyStart = AT_START
    ) -> list[int]:
        """Return the tokens of a conversation, up to the text that the reply adds."""
        ...

    def reply_opening(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        """Return the text that the template writes after the last message."""
        ...


def encode_conversation(
    codec: TextCodec, conversation: Conversation, start: ReplyStart = AT_START
) -> list[int]:
    """Return the tokens of a conversation for a member, up to the text that the reply adds.

    The member reads tools, calls and results in its own form, if its codec supports this.

    Args:
        codec: the member's codec.
        conversation: the conversation.
        start: how the member's chat template begins the reply.
    """
    if isinstance(codec, RendersTemplates):
        return codec.encode_conversation(conversation, start)
    before = conversation.before_reply()
    if isinstance(codec, RendersTools):
        tokens = codec.encode_conversation(before)
    else:
        tokens = codec.encode_messages(before.flat())
    if not conversation.begun:
        return tokens
    space = "" if codec.has_chat_template else " "
    return tokens + codec.encode_continuation(tokens, f"{space}{conversation.begun}")[0]


class TokenizerCodec:
    """A codec for a Hugging Face tokenizer (fast or slow). It does not change the tokenizer.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``, or another object with the methods and attributes
            that the codec uses. If calls do not change such an object, so that several threads may
            use it without a lock, it has the attribute ``keeps_settings`` with the value False.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_fast = bool(getattr(tokenizer, "is_fast", False))
        self._keeps_settings = bool(getattr(tokenizer, "keeps_settings", True))
        # Prompts that are too long have an error of their own, so transformers need not warn.
        self._silent = {"verbose": False} if hasattr(tokenizer, "deprecation_warnings") else {}
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat_tokenizer: Any = None
        if has_template:
            self._chat_tokenizer = _separate_copy(tokenizer) if self._keeps_settings else tokenizer
        self._tool_form: tuple[ToolForm | None] | None = None
        shares = self._chat_tokenizer is tokenizer  # so the two need different settings
        self._fast = FastTokenizer(tokenizer) if is_supported(tokenizer) and not shares else None
        self._create_lock()
        for each in (self._tokenizer, self._chat_tokenizer or self._tokenizer):
            _bound_cache(each)
        added_tokens = tokenizer.added_tokens_decoder.items()
        special = {int(i): str(t) for i, t in added_tokens if t.special}
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self._facts = TemplateFacts.of(
            getattr(tokenizer, "chat_template", None),
            getattr(tokenizer, "special_tokens_map", ()),
        )
        declared = getattr(tokenizer, "chat_control_tokens", None) or ()
        markers = {
            int(i): str(t)
            for i, t in added_tokens
            if str(t).strip() and (str(t) in template or str(t) in declared)
        }
        self._anchors = [(anchor, self._encode(anchor) if anchor else []) for anchor in ANCHORS]
        reads_bytes = "A" in self._decode(self._encode("<0x41>"))
        if has_template:
            self._encode_template("")  # stores the settings before several threads use the copy
        # Text in a prompt must not become a special token or a marker of the template. Text in a
        # response must not become a special token. It may become a marker, because members write
        # some markers themselves, such as <think>. In the text that a reply continues, only the
        # markers of reasoning may become tokens.
        in_prompt = {**markers, **special}
        thoughts = (REASONING_OPENS, REASONING_CLOSES)
        in_begun = {i: token for i, token in in_prompt.items() if token not in thoughts}
        self._in_prompt, self._in_response, self._in_begun = (
            _ControlTokens(tokens, tokenizer.unk_token_id, reads_bytes=reads_bytes)
            for tokens in (in_prompt, special, in_begun)
        )

    def _create_lock(self) -> None:
        # A call stores its settings in the tokenizer. Fast tokenizers are thread-safe as long as no
        # setting changes, and each of the two is always used with the same settings.
        is_safe = not self._keeps_settings or (
            self._is_fast and self._chat_tokenizer is not self._tokenizer
        )
        self._lock: AbstractContextManager[Any] = nullcontext() if is_safe else threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        return self._chat_tokenizer is not None

    def encode_prompt(self, text: str) -> list[int]:
        tokens = self._encode(text, add_special_tokens=True)
        plain = self._encode(text)
        if self._in_prompt.ids.isdisjoint(plain) and not self._in_prompt.pattern.search(text):
            return tokens
        starts = (i for i in range(len(tokens)) if tokens[i : i + len(plain)] == plain)
        start = next(starts, 0)
        before, after = tokens[:start], tokens[start + len(plain) :]
        self._extend(before, text, self._in_prompt)
        return before + after

    def control_token_in(self, text: str) -> str | None:
        """Return the first control token that a prompt spells out, or None."""
        found = self._in_prompt.pattern.search(text)
        return None if found is None else found[0]

    @property
    def tool_form(self) -> ToolForm | None:
        """How the chat template accepts tools, or None if it does not support them.

        The first use renders a short conversation several times.
        """
        if self._tool_form is None:  # several threads may find the same form at the same time
            self._tool_form = (_rendered_within(lambda: find_form(self._render)),)
        return self._tool_form[0]

    @property
    def template_facts(self) -> TemplateFacts:
        return self._facts

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode_conversation(check_conversation(messages))

    def encode_conversation(
        self, conversation: Conversation, start: ReplyStart = AT_START
    ) -> list[int]:
        """Return the tokens of a conversation, up to the text that the reply adds.

        Tools, calls and results have the form of the chat template. If the template does not
        support tools, or does not accept this conversation, they become text of plain messages.

        Raises:
            InvalidInputError: the template does not accept the messages in any form.
        """
        if not self.has_chat_template:
            text = render_plain(conversation.flat(), continues=conversation.continues)
            return self.encode_prompt(text)
        if conversation.continues:
            return self._encode_begun(conversation, start.variables)
        rendered, marks = self._rendered(conversation, start.variables)
        return self._encode_rendered(rendered + start.added, marks)

    def reply_opening(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        """Return the text that the template writes after the last message.

        It is empty without a template, or if the template omits the last message.
        """
        if not self.has_chat_template:
            return ""
        end = _unused_mark(conversation)
        marked = conversation.with_last(lambda content: content + end)
        rendered, marks = self._rendered(marked, variables)
        _, found, opening = rendered.rpartition(end)
        return marks.sub("", opening) if found else ""

    def _encode_begun(self, conversation: Conversation, variables: Mapping[str, Any]) -> list[int]:
        """Encode a conversation whose reply continues the last message.

        The template renders the message with a mark as its content, and the rendering is cut at the
        mark. So the member reads exactly the given text, even if the template changes the content
        of messages. Reasoning that the template opens does not precede the text.
        """
        text, mark = conversation.begun, _unused_mark(conversation)
        try:
            rendered, marks = self._rendered(conversation.with_last(lambda _: mark), variables)
        except InvalidInputError:  # the template requires another role in the last message
            rendered, marks = "", _NO_MARKS
        head, found, _ = rendered.rpartition(mark)
        if not found:
            head, marks = self._rendered(conversation.before_reply(), variables)
        thought = _NO_THOUGHT.search(head)
        if thought and (not thought["closed"] or text.lstrip().startswith(REASONING_OPENS)):
            head = head[: thought.start()]
        bare = head.rstrip(" ")
        tokens = self._encode_rendered(bare, marks)
        self._extend(tokens, head[len(bare) :] + text, self._in_begun)
        return tokens

    def _rendered(
        self, conversation: Conversation, variables: Mapping[str, Any]
    ) -> tuple[str, re.Pattern[str]]:
        """Render a conversation.

        Returns:
            The text, and a pattern that splits it at the marks of control tokens that messages and
            variables spell out (see `_mark_control_tokens`).

        Raises:
            InvalidInputError: the template does not accept the messages in any form.
        """
        if not self._facts.reads_reasoning:
            conversation = conversation.without_reasoning()
        values = _texts_in(variables)
        if conversation.has_tools and (form := self.tool_form):
            mark, marks = self._mark_control_tokens([*conversation.texts(), *values])
            render = self._template(conversation, _map_values(variables, mark))
            if rendered := self._render_tools(conversation.map_texts(mark), form, render, marks):
                return rendered, marks
        messages = conversation.flat(
            reasoning=True, default=self._default_system(conversation, variables)
        )
        texts = [str(text) for message in messages for text in message.values()]
        mark, marks = self._mark_control_tokens([*texts, *values])
        render = self._template(conversation, _map_values(variables, mark))
        marked = [
            cast(
                "Message", {key: text if key == "role" else mark(str(text)) for key, text in items}
            )
            for items in (message.items() for message in messages)
        ]
        return _rendered_within(lambda: render(fit(marked, render))), marks

    def _default_system(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        """Return the template's default system text if tools or instructions follow it, or ""."""
        if conversation.has_system or not (conversation.tools or conversation.instructions):
            return ""
        render = self._template(conversation, variables)
        return _rendered_within(lambda: default_system(render))

    def _template(self, conversation: Conversation, variables: Mapping[str, Any]) -> Render:
        """Return the function that renders a conversation for its reply."""
        return functools.partial(
            self._render, opens_reply=not conversation.continues, variables=variables
        )

    def _render_tools(
        self,
        conversation: Conversation,
        form: ToolForm,
        render: Render,
        marks: re.Pattern[str],
    ) -> str | None:
        """Render a conversation in the tool form of the template.

        Return None if the template does not accept the conversation in this form, or changes the
        marks of control tokens that messages spell out, so that these would not stay text.
        """
        rendered = _rendered_within(lambda: render_tools(conversation, form, render))
        if rendered is None:
            return None
        tokens, harmless = (self._encode_rendered(text, marks) for text in rendered)
        control = self._in_prompt.ids
        if [t for t in tokens if t in control] != [t for t in harmless if t in control]:
            return None
        return rendered[0]

    def _encode_rendered(self, rendered: str, marks: re.Pattern[str]) -> list[int]:
        """Encode a rendered conversation. Text that `marks` encloses contains no control token."""
        first, *parts = marks.split(rendered)
        tokens = self._encode_template(first)
        for spelled, after in zip(parts[::2], parts[1::2], strict=True):
            if spelled:  # None if the template has separated a mark from its pair
                self._extend(tokens, spelled, self._in_prompt)
            if after:
                tokens += self._encode_template(after, is_first=False)
        return tokens

    def _mark_control_tokens(
        self, texts: Iterable[str]
    ) -> tuple[Callable[[str], str], re.Pattern[str]]:
        """Return a function that encloses the control tokens that texts spell out in two marks.

        The marks are characters that no text has. If another text becomes a control token, for
        example because the tokenizer normalizes it, the function encloses the whole text.

        Args:
            texts: all texts that the function will be called with.

        Returns:
            The function, and a pattern that splits a rendered conversation at the marks. The only
            group of the pattern is the enclosed text.
        """
        control = self._in_prompt
        joined = "".join(texts)
        unused = (mark for mark in map(chr, _MARKS) if mark not in joined)
        start, end = next(unused), next(unused)

        def mark(text: str) -> str:
            others = filter(None, control.pattern.split(text))
            safe = all(control.ids.isdisjoint(self._encode_template(other)) for other in others)
            return (control.pattern if safe else _STRIPPED).sub(f"{start}\\g<0>{end}", text)

        return mark, re.compile(f"{start}([^{start}{end}]*){end}|[{start}{end}]")

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        tokens, exact = self._encode_piece(context, text, self._in_response)
        if exact:
            return tokens, True
        tokens = list(context)
        exact = self._extend(tokens, text, self._in_response)
        return tokens[len(context) :], exact

    def _extend(self, tokens: list[int], text: str, control: _ControlTokens) -> bool:
        """Encode `text` as a continuation of `tokens`, and append it to `tokens`.

        Returns:
            Whether the encoding is exact. It contains no tokens of `control`, unless a single
            character becomes such a token.
        """
        exact = True
        pending = [text]
        while pending:
            piece = pending.pop()
            new, piece_exact = self._encode_piece(tokens, piece, control)
            smaller = [piece] if piece_exact else control.split(piece, new)
            if len(smaller) > 1:
                pending += reversed(smaller)
            else:
                tokens += new
                exact = exact and piece_exact
        return exact

    def _encode_piece(
        self, context: Sequence[int], text: str, control: _ControlTokens
    ) -> tuple[list[int], bool]:
        """Encode `text` with the first anchor that gives an exact encoding.

        If there is none, the tokens may be tokens of `control`.
        """
        inexact: list[int] = []
        for anchor, before in self._anchors:
            whole = self._encode(anchor + text)
            tokens = whole[len(before) :]
            if whole[: len(before)] != before or not control.ids.isdisjoint(tokens):
                continue
            if control.unknown not in tokens and self.decode_continuation(context, tokens) == text:
                return tokens, True
            inexact = inexact or tokens
        return inexact or self._encode(text), False

    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        last = context[-CONTEXT_TOKENS:]
        before = self._decode_context(last)
        while before.startswith(REPLACEMENT) and len(last) < len(context):
            # the context begins inside a character, or between bytes that belong together
            last = context[-2 * len(last) :]
            before = self._decode(last)
        return added(before, self._decode([*last, *tokens]))

    def token_texts(self) -> list[str]:
        """Return the text of each token in the middle of a text, by token id.

        U+FFFD stands for an incomplete character.
        """
        context = self._encode("a")
        ids = set(self._tokenizer.get_vocab().values())
        return [
            self.decode_continuation(context, [token]) if token in ids else ""
            for token in range(max(ids) + 1)
        ]

    def _encode_template(self, text: str, *, is_first: bool = True) -> list[int]:
        """Encode a part of a rendered conversation, including its control tokens.

        Parts after the first are encoded after an anchor, so that the tokenizer does not encode
        them as the start of a text.
        """
        for anchor, before in () if is_first else self._anchors[1:]:
            whole = self._encode(anchor + text, as_text=False)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._encode(text, as_text=False)

    def _encode(
        self, text: str, *, add_special_tokens: bool = False, as_text: bool = True
    ) -> list[int]:
        if as_text and self._fast is not None:
            with self._lock:  # the tokenizer must not run while its settings change
                return self._fast.encode(text, add_special_tokens=add_special_tokens)
        options = {"split_special_tokens": True} if as_text else {}
        tokenizer = self._tokenizer if as_text else self._chat_tokenizer
        with self._lock:
            ids = tokenizer.encode(
                text, add_special_tokens=add_special_tokens, **options, **self._silent
            )
        return [int(token) for token in ids]

    def _decode_context(self, tokens: Sequence[int]) -> str:
        if self._fast is None:
            return self._decode(tokens)
        with self._lock:
            return self._fast.decode_context(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._fast is not None:
            with self._lock:
                return self._fast.decode(tokens)
        with self._lock:
            text = self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return str(text)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        opens_reply: bool = True,
        variables: Mapping[str, Any] = AT_START.variables,
    ) -> str:
        options = {**variables, **({"tools": tools} if tools else {})}
        text = self._chat_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opens_reply, **options
        )
        return str(text)


def _rendered_within(work: Callable[[], T]) -> T:
    """Return the result of rendering.

    Raises:
        InvalidInputError: it takes longer than `RENDER_SECONDS`.
    """
    try:
        return run_within(RENDER_SECONDS, work)
    except TimeoutError as error:
        raise InvalidInputError(
            "the chat template was stopped, because it rendered these messages for more than "
            f"{RENDER_SECONDS:g} seconds. Send fewer messages, check the template for endless "
            "loops, or use another member."
        ) from error


def _unused_mark(conversation: Conversation) -> str:
    """Return a character for private use that no text of a conversation has."""
    joined = "".join(conversation.texts())
    return next(mark for mark in map(chr, _MARKS) if mark not in joined)


def _texts_in(variables: Mapping[str, Any]) -> list[str]:
    """Return all texts in the values of variables."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_values(variables, collect)
    return texts


def _map_values(variables: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return {name: map_json(value, change) for name, value in variables.items()}


def _separate_copy(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer, or the tokenizer itself if it cannot be copied."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # some parts of tokenizers that are written in Python cannot be copied
        return tokenizer


def _bound_cache(tokenizer: Any) -> None:
    """Reduce the memory that a fast tokenizer may use for its cache. This does not change tokens.

    Clearing the cache later would not help: `tokenizers` 0.23 does not free a BPE model's entries.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    resize = getattr(model, "_resize_cache", None)
    if resize is not None:  # WordPiece and WordLevel models have no cache
        resize(CACHED_TEXTS)


class _ControlTokens:
    """Tokens that the encoding of plain text must not contain.

    Args:
        tokens: spellings of the tokens by id.
        unknown: id of the token for text that has no other token, or None. Plain text may contain
            it, but its spelling must not become this token.
        reads_bytes: whether the tokenizer reads the spelling of a byte, such as ``<0x0A>``, as this
            byte. Unigram vocabularies contain such spellings as pieces.

    Attributes:
        ids: ids of the tokens, without `unknown`.
        unknown: id of the token for text that has no other token, or None.
        pattern: matches the spelling of a token or of a byte that the tokenizer reads.
    """

    def __init__(
        self, tokens: Mapping[int, str], unknown: int | None, *, reads_bytes: bool
    ) -> None:
        self.ids = frozenset(tokens) - {unknown}
        self.unknown = unknown
        texts = sorted((t for t in tokens.values() if len(t) > 1), key=len, reverse=True)
        bytes_ = ["<0x[0-9A-F]{2}>"] if reads_bytes else []
        self.pattern = re.compile("|".join([*map(re.escape, texts), *bytes_]) or "(?!)")

    def split(self, text: str, tokens: Sequence[int]) -> list[str]:
        """Split `text` so that its parts do not become control tokens.

        Every spelling is split after its first character. A text without spellings is halved if its
        `tokens` nevertheless contain a control token, because the tokenizer normalizes the text.
        """
        cuts = [0]
        while match := self.pattern.search(text, cuts[-1]):
            cuts.append(match.start() + 1)
        if len(cuts) == 1 and len(text) > 1 and not self.ids.isdisjoint(tokens):
            cuts.append(len(text) // 2)
        return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]
