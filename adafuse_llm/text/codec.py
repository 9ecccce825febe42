"""Conversion between text and the tokens of one member.

The engine never tokenizes committed tokens again. So a codec decodes new tokens, and encodes new
text, as a *continuation* of the tokens before. Some tokenizers add or strip a space at the start of
a string, or merge characters of old and new text into one token. An encoding is exact if its
tokens, decoded after the context, give exactly the text.
"""

# ruff: noqa: ARG002  default methods ignore their arguments

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from adafuse_llm.errors import InvalidInputError
from adafuse_llm.text.conversation import Conversation, check_conversation, map_json
from adafuse_llm.text.reasoning import REASONING_CLOSES, REASONING_OPENS
from adafuse_llm.text.templates import Messages, ReplyStart, TemplateFacts, render_conversation
from adafuse_llm.text.words import REPLACEMENT, added, same_start

CONTEXT = "a b"
"""Context that `change_of` puts before the text it checks."""

SHOWN = 24
"""Maximum number of characters of each text that `difference` shows."""

CONTEXT_TOKENS = 8
"""Number of context tokens that a codec decodes together with a continuation. If they begin inside
a character, the codec also decodes earlier ones."""

CACHED_CONTEXTS = 1_024
"""Number of contexts whose texts a codec caches."""

SHORT, CACHED_TEXTS = 64, 4_096
"""Maximum length of a text whose tokens a codec caches, and maximum number of these texts. Most are
common words, and llama.cpp compiles regular expressions for each with some vocabularies."""

ANCHORS = ("", "\n", "a", ".", " a")
"""Texts that a codec puts before a continuation, so that the tokenizer does not take it for the
start of a text. The codec uses the first one with an exact encoding."""

_MARKS = range(0xF0000, 0x10FFFD)
"""Private characters of Unicode. Two enclose each control token that a conversation spells out."""
_END = "\U0010fffd"
"""A private character, which marks the end of the last message."""
_STRIPPED = re.compile(r"\S(?:.*\S)?", re.DOTALL)
"""Matches a text without the whitespace at its ends, which templates may strip."""
_NO_THOUGHT = re.compile(rf"{REASONING_OPENS}\s*(?P<closed>{REASONING_CLOSES}\s*)?\Z")
"""Matches empty reasoning, open or closed, at the end of a prompt."""
_OWN_METHODS = ("encode", "decode", "_encode_plus", "_decode", "set_truncation_and_padding")
"""Methods of transformers that a codec bypasses unless a tokenizer has its own: for short texts,
they take several times as long as the tokenizer itself."""
AT_START = ReplyStart()


class TextCodec(ABC):
    """Converts text to one member's tokens, and back. It is thread-safe, and no request changes it.

    A codec without a chat template needs only the three abstract methods.

    Attributes:
        has_chat_template: whether the member reads conversations with its own chat template.
        template_facts: what is known of the chat template.
    """

    has_chat_template: bool = False
    template_facts: TemplateFacts = TemplateFacts()

    @abstractmethod
    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, including the special tokens that the member expects.

        A control token that `text` spells out stays plain text.
        """

    @abstractmethod
    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        """Encode `text` as a continuation of `context`.

        Returns:
            The tokens, and whether they are exact:
            ``decode(context + tokens) == decode(context) + text``.
        """

    @abstractmethod
    def decode_continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add to `context`, with U+FFFD for incomplete characters."""

    def token_text(self, token: int) -> str | None:
        """Return what a token adds after a whole character; None if it depends on earlier text."""
        return None

    def encode_conversation(
        self, conversation: Conversation, start: ReplyStart = AT_START
    ) -> list[int]:
        """Return the tokens of a conversation, and of the `start` of its reply.

        Raises:
            InvalidInputError: the chat template does not accept the messages.
        """
        return self.encode_prompt(conversation.plain_text())

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of messages with a role and content, up to the start of the reply."""
        return self.encode_conversation(check_conversation(messages))

    def reply_opening(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        """Return the text that the chat template writes after the last message, or ""."""
        return ""

    def control_token_in(self, text: str) -> str | None:
        """Return the first control token that a prompt spells out, or None."""
        return None


def cached(method: Any, size: int) -> Callable[..., Any]:
    """Return a bound method with a cache. The cache does not keep the method's object alive."""
    bound = functools.partial(method.__func__, weakref.proxy(method.__self__))
    return functools.lru_cache(size)(bound)


class TokenizerCodec(TextCodec):
    """A codec for a Hugging Face tokenizer (fast or slow). It does not change the tokenizer.

    In place of the tokenizer, any object will do that has the methods and attributes used here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode_context = cached(self._decode, CACHED_CONTEXTS)
        self._encode_short = cached(self._encode_text, CACHED_TEXTS)
        template = getattr(tokenizer, "chat_template", None)
        self.has_chat_template = bool(template)
        self.template_facts = TemplateFacts.of(
            template, getattr(tokenizer, "special_tokens_map", ())
        )
        self._core, self._template_core = _cores(tokenizer, needs_two=bool(template))
        self._lock = threading.Lock()  # a call of transformers stores its settings in the tokenizer
        self._joins = hasattr(tokenizer, "pieces") or _joins(self._core)  # GGUF files have pieces
        self._token_text = cached(self._read_token, size=2**20)  # more than any vocabulary has
        added_tokens = tokenizer.added_tokens_decoder.items()
        special = {int(i): str(t) for i, t in added_tokens if t.special}
        markers = {
            int(i): str(t)
            for i, t in added_tokens
            if str(t).strip() and str(t) in str(template or "")
        }
        self._anchors = [(anchor, self._encode(anchor) if anchor else []) for anchor in ANCHORS]
        # take the special tokens before a prompt's text, and leave out those after it
        text, whole = self._encode("a"), self._encode("a", add_special_tokens=True)
        starts = (i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        self._before = whole[: next(starts, 0)]
        # with GGUF files, some also stand before what a chat template renders, as in llama-server
        self._before_template = list(getattr(tokenizer, "prefix_ids", ()))
        reads_bytes = "A" in self._decode(self._encode("<0x41>"))
        # Text of a prompt must not become a special token or a marker of the template. Text of a
        # response may become a marker, because members write some themselves, such as <think>. Of
        # the text that a reply continues, only markers of reasoning may become such tokens.
        in_prompt = {**markers, **special}
        thoughts = (REASONING_OPENS, REASONING_CLOSES)
        in_begun = {i: token for i, token in in_prompt.items() if token not in thoughts}
        self._in_prompt, self._in_response, self._in_begun = (
            _ControlTokens(tokens, tokenizer.unk_token_id, reads_bytes=reads_bytes)
            for tokens in (in_prompt, special, in_begun)
        )

    def encode_prompt(self, text: str) -> list[int]:
        # most prompts spell no control token
        before, plain = self._before.copy(), self._encode(text)
        if self._in_prompt.ids.isdisjoint(plain) and not self._in_prompt.pattern.search(text):
            before += plain
        else:
            self._extend(before, text, self._in_prompt)
        return before

    def control_token_in(self, text: str) -> str | None:
        match = self._in_prompt.pattern.search(text)
        return None if match is None else match[0]

    def encode_conversation(
        self, conversation: Conversation, start: ReplyStart = AT_START
    ) -> list[int]:
        if not self.has_chat_template:
            return super().encode_conversation(conversation, start)
        if conversation.continues:
            return self._encode_begun(conversation, start.variables)
        rendered, marks = self._rendered(conversation, start.variables)
        return self._encode_rendered(rendered + start.added, marks)

    def reply_opening(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        if not self.has_chat_template:
            return ""
        marked = conversation.with_last(conversation.messages[-1]["content"] + _END)
        rendered, marks = self._rendered(marked, variables)
        _, mark, opening = rendered.rpartition(_END)
        return marks.sub("", opening) if mark else ""

    def _encode_begun(self, conversation: Conversation, variables: Mapping[str, Any]) -> list[int]:
        # the template renders a mark in place of the last message, so that the member reads the
        # message unchanged, whatever the template does to texts or writes after them
        text, mark = conversation.begun, ""
        with suppress(InvalidInputError):  # the template may require another role at the end
            rendered, marks = self._rendered(conversation.with_last(_END), variables)
            head, mark, _ = rendered.rpartition(_END)
        if not mark:
            head, marks = self._rendered(conversation.before_reply(), variables)
        # leave out reasoning that the template opens, and empty reasoning if the text has reasoning
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
        """Return the rendered conversation, and a pattern whose group is the text between marks.

        Marks enclose control tokens that messages, tools and variables spell out.
        """
        texts = [vars(conversation), list(map(vars, conversation.tools)), variables]
        whole = json.dumps(texts, ensure_ascii=False, default=str)
        # the marks are two characters that the conversation does not have
        unused = (character for character in map(chr, _MARKS) if character not in whole)
        start, end = next(unused), next(unused)

        @functools.cache
        def mark(text: str) -> str:
            # mark the whole text if text between spelled tokens would become control tokens, too
            others = filter(None, control.pattern.split(text))
            safe = all(control.ids.isdisjoint(self._encode_template(other)) for other in others)
            return (control.pattern if safe else _STRIPPED).sub(f"{start}\\g<0>{end}", text)

        def render(messages: Messages, tools: Messages) -> str:
            marked = [{**map_json(each, mark), "role": each["role"]} for each in messages]
            if self._reads_parts:
                for each in marked:
                    each["content"] = [{"type": "text", "text": each["content"]}]
            return self._apply_template(
                marked,
                tools=map_json(tools, mark) or None,
                add_generation_prompt=not conversation.continues,
                **{name: map_json(value, mark) for name, value in variables.items()},
            )

        control = self._in_prompt
        text = render_conversation(conversation, self.template_facts, render)
        for each in (start, end):  # a template may write JSON in ASCII
            text = text.replace(json.dumps(each)[1:-1], each)
        return text, re.compile(f"{start}([^{start}{end}]*){end}|[{start}{end}]")

    def _apply_template(self, messages: Messages, **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    @functools.cached_property
    def _reads_parts(self) -> bool:
        # the templates of some multimodal models read only content that is a list of parts
        word = "word0word"
        try:
            return word not in self._apply_template([{"role": "user", "content": word}])
        except Exception:  # templates raise errors of any type
            return False

    def _encode_rendered(self, rendered: str, marks: re.Pattern[str]) -> list[int]:
        # text between marks must not become control tokens
        first, *parts = marks.split(rendered)
        tokens, before = self._encode_template(first), self._before_template
        if tokens[: len(before)] != before:
            tokens = before + tokens
        # parts alternate between spelled tokens, which stay text, and other text
        for spelled, after in zip(parts[::2], parts[1::2], strict=True):
            if spelled:  # None if the template has separated a mark from its pair
                self._extend(tokens, spelled, self._in_prompt)
            if after:
                tokens += self._encode_template(after, is_first=False)
        return tokens

    def encode_continuation(self, context: Sequence[int], text: str) -> tuple[list[int], bool]:
        tokens, exact = self._encode_piece(context, text, self._in_response)
        if exact:
            return tokens, True
        tokens = list(context)
        exact = self._extend(tokens, text, self._in_response)
        return tokens[len(context) :], exact

    def _extend(self, tokens: list[int], text: str, control: _ControlTokens) -> bool:
        """Append the tokens of `text`, and return whether they are exact.

        No token of `control` is among them, unless a single character becomes one.
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
        # use the first anchor with an exact encoding; without any, tokens of `control` can occur
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
        before = self._decode_context(tuple(last))
        # after whole characters, most tokenizers join the texts of the tokens
        if self._joins and before and before[-1] != REPLACEMENT:
            text = "".join([self._token_text(token) for token in tokens])
            if REPLACEMENT not in text:
                return text
        while before.startswith(REPLACEMENT) and len(last) < len(context):
            # the context begins inside a character, or between bytes that belong together
            last = context[-2 * len(last) :]
            before = self._decode(last)
        return added(before, self._decode([*last, *tokens]))

    def token_text(self, token: int) -> str | None:
        text = self._token_text(token) if self._joins else REPLACEMENT
        return None if REPLACEMENT in text else text

    def token_texts(self) -> list[str]:
        """Return, by token id, the text that each token adds in the middle of a text.

        U+FFFD stands for an incomplete character.
        """
        ids = set(self._tokenizer.get_vocab().values())
        return [self._read_token(token) if token in ids else "" for token in range(max(ids) + 1)]

    def _read_token(self, token: int) -> str:
        context = self._encode("a")
        return added(self._decode_context(tuple(context)), self._decode([*context, token]))

    def _encode_template(self, text: str, *, is_first: bool = True) -> list[int]:
        # put an anchor before all parts but the first, because they do not start a text
        for anchor, before in () if is_first else self._anchors[1:]:
            whole = self._encode(anchor + text, as_text=False)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._encode(text, as_text=False)

    def _encode(
        self, text: str, *, add_special_tokens: bool = False, as_text: bool = True
    ) -> list[int]:
        encode = self._encode_short if len(text) <= SHORT else self._encode_text
        return list(encode(text, add_special_tokens=add_special_tokens, as_text=as_text))

    def _encode_text(self, text: str, *, add_special_tokens: bool, as_text: bool) -> list[int]:
        # if `as_text` is true, control tokens that the text spells out stay text
        core = self._core if as_text else self._template_core
        if core is not None:
            # other users of the tokenizer may have changed its settings
            if core.encode_special_tokens != as_text:
                core.encode_special_tokens = as_text
            if core.truncation is not None:
                core.no_truncation()
            if core.padding is not None:
                core.no_padding()
            tokens: list[int] = core.encode(text, add_special_tokens=add_special_tokens).ids
            return tokens
        with self._lock:
            ids = self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, split_special_tokens=as_text
            )
        return [int(token) for token in ids]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._core is not None:
            return str(self._core.decode(tokens, skip_special_tokens=False))
        with self._lock:
            text = self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return str(text)


def _cores(tokenizer: Any, *, needs_two: bool) -> tuple[Any, Any]:
    # return a `tokenizers.Tokenizer` for text and, if `needs_two`, a copy for conversations; None
    # twice if the tokenizer has none, has methods of its own, or cannot be copied when needed
    if not getattr(tokenizer, "is_fast", False):
        return None, None
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(getattr(tokenizer, name), "__func__", None)
        is not getattr(PreTrainedTokenizerFast, name)
        for name in _OWN_METHODS
    ):
        return None, None
    core = tokenizer.backend_tokenizer
    try:
        return core, copy.deepcopy(core) if needs_two else None
    except Exception:  # some parts of tokenizers that are written in Python cannot be copied
        return None, None


def _joins(core: Any) -> bool:
    # whether a `tokenizers.Tokenizer` joins the texts of tokens that follow whole characters
    try:
        decoder = json.loads(core.decoder.__getstate__())
    except Exception:  # there is no such tokenizer or decoder, or the decoder is Python code
        return False
    # each step's name, the text that Replace replaces, and how much Strip takes from the end
    steps = [
        f"{step['type']}{step.get('pattern', {}).get('String', '')}{step.get('stop', '')}"
        for step in decoder.get("decoders", [decoder])
    ]
    # transformers replaces `decode` of some, such as CLIP's
    joining = r"ByteLevel|(Replace.|Metaspace)?(ByteFallback)?(Metaspace)?(Fuse(Strip0)?)?"
    return "decode" not in vars(core) and re.fullmatch(joining, "".join(steps)) is not None


class _ControlTokens:
    """Tokens that the encoding of plain text must not contain.

    Args:
        tokens: spellings of the tokens by id.
        unknown: id of the token for text outside the vocabulary, or None. Plain text may become
            this token, but the token's spelling must not.
        reads_bytes: whether the tokenizer reads the spelling of a byte, such as ``<0x0A>``, as this
            byte.
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
        """Split a text, given its `tokens`, into parts that become no control tokens."""
        # split every spelling after its first character
        cuts = [0]
        while match := self.pattern.search(text, cuts[-1]):
            cuts.append(match.start() + 1)
        # halve other text, which becomes a control token only because the tokenizer normalizes it
        if len(cuts) == 1 and len(text) > 1 and not self.ids.isdisjoint(tokens):
            cuts.append(len(text) // 2)
        return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]


def change_of(codec: TextCodec, text: str) -> str | None:
    """Describe how a tokenizer changes a text that follows other text; None if it does not."""
    context = codec.encode_prompt(CONTEXT)
    tokens, is_exact = codec.encode_continuation(context, text)
    return None if is_exact else difference(text, codec.decode_continuation(context, tokens))


def difference(text: str, read: str) -> str:
    """Describe in ASCII how `read` differs from `text`, without what is equal at both ends."""
    before = same_start(text, read)
    text, read = text[before:], read[before:]
    after = same_start(text[::-1], read[::-1])
    return f"{_shown(text[: len(text) - after])} becomes {_shown(read[: len(read) - after])}"


def _shown(text: str) -> str:
    return ascii(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
