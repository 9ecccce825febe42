"""Warnings about what the members of an engine read, each logged once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from adafuse_llm.text.codec import TextCodec, TokenizerCodec
from adafuse_llm.text.conversation import Conversation
from adafuse_llm.text.exactness import change_of
from adafuse_llm.text.reply_start import mixed_reasoning

logger = logging.getLogger(__name__)

FRAME_TOKENS = 50
"""Number of tokens that chat templates write after the last message, at most in general."""

MAX_READ = 100_000
"""Maximum number of texts that are remembered, so that they are not read again."""


class PromptWarnings:
    """Warnings of one engine. Members are named by the keys of the codecs."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._read: set[int] = set()

    def check_members(
        self,
        codecs: Mapping[str, TextCodec],
        given: Mapping[str, Any] | None,
        members: Sequence[str],
    ) -> None:
        """Log a warning if only some members have a chat template, or reason before they answer.

        Args:
            codecs: the codecs of the active members, by name.
            given: the option ``chat_template_kwargs``.
            members: names of all members of the engine.

        Raises:
            InvalidOptionError: `given` has invalid variables.
        """
        if mixture := mixed_templates(
            {name: codec.has_chat_template for name, codec in codecs.items()}
        ):
            logger.warning("%s", mixture)
        reasoning, others = mixed_reasoning(codecs, given, members)
        if reasoning:
            logger.warning(
                "only some members reason before they answer: %s, but not %s. All members write "
                "the same text. So reasoning that a chat template opens is closed before the "
                "response, and other reasoning is a part of it. Use members that all reason, or "
                "members that do not",
                _names(reasoning),
                _names(others),
            )

    def check_prompt(self, name: str, codec: TextCodec, ids: Sequence[int], prompt: str) -> None:
        """Log a warning if a prompt spells out a control token, or is changed.

        Args:
            name: the member's name.
            codec: its codec.
            ids: the tokens of the prompt.
            prompt: the prompt.
        """
        spelled = spelled_token(name, codec, prompt)
        if spelled and self._is_new("spelled"):
            logger.warning("%s", spelled)
        self._check_exact(name, codec, ids, [prompt])

    def check_conversation(
        self, name: str, codec: TextCodec, ids: Sequence[int], conversation: Conversation
    ) -> None:
        """Log a warning if a member's tokenizer changes a message.

        Args:
            name: the member's name.
            codec: its codec.
            ids: the tokens of the conversation.
            conversation: the conversation.
        """
        texts = [message["content"] for message in conversation.messages]
        self._check_exact(name, codec, ids, texts)

    def _check_exact(
        self, name: str, codec: TextCodec, ids: Sequence[int], texts: Sequence[str]
    ) -> None:
        """Log a warning if a member reads one of the texts in its prompt differently.

        Texts of earlier requests are not read again. New ones are usually the last. A text whose
        characters are all in the decoded tokens is unchanged. Another text may be missing for
        another reason, such as a template that omits it, so it is encoded alone.
        """
        key = f"exact {name}"
        new = {hash((name, text)): text.strip() for text in texts if text.strip()}
        new = {number: text for number, text in new.items() if number not in self._read}
        if key in self._said or not new:
            return
        last = sum(len(text.encode()) for text in new.values()) + FRAME_TOKENS
        read = codec.decode_continuation((), ids[-last:])
        missing = (text for text in new.values() if text not in read)
        change = next(filter(None, (change_of(codec, text) for text in missing)), None)
        if len(self._read) > MAX_READ:
            self._read.clear()
        self._read.update(new)
        if change and self._is_new(key):
            logger.warning(
                "member %r does not read exactly the given prompt, because its tokenizer changes "
                "it: %s. The member cannot score a response with such text, either. Write the text "
                "in another form, or leave the member out with use=[...]",
                name,
                change,
            )

    def _is_new(self, key: str) -> bool:
        is_new = key not in self._said
        self._said.add(key)
        return is_new


def spelled_token(name: str, codec: TextCodec, prompt: str) -> str | None:
    """Return a warning if a prompt spells out a control token of a member, or None."""
    token = codec.control_token_in(prompt) if isinstance(codec, TokenizerCodec) else None
    return token and (
        f"the prompt contains {token!r}, which is a control token of member {name!r}. In a prompt, "
        "it is plain text, so the member reads neither a conversation nor a gap to fill in. To "
        "send a conversation, pass messages=[...]; each member then uses its own chat template"
    )


def mixed_templates(has_template: Mapping[str, bool]) -> str | None:
    """Return a warning if some members have a chat template and others do not, or None.

    Args:
        has_template: whether a member has a chat template, by name.
    """
    plain = [name for name, has in has_template.items() if not has]
    others = [name for name, has in has_template.items() if has]
    if not plain or not others:
        return None
    return (
        f"only some members have a chat template: {_names(others)}, but not {_names(plain)}. "
        "Members without one are usually base models. They read messages as plain text (User: ...),"
        " and often expect other answers than members with one. Use only instruction-tuned models "
        "or only base models, or leave members out with use=[...]"
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
