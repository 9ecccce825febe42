"""The beginning of a response.

A prompt often ends in spaces, but tokenizers join a space to the word after it. So a member whose
tokens can write these spaces reads the prompt without them, and writes them first. The spaces
belong to the prompt, not to the response.

After a chat template, some members begin a reply with whitespace and others do not. This whitespace
is no part of the reply.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of the next text that the members commit.

    The prompt ``"The sky is  "`` ends in two spaces, so the next text begins with them:

    >>> opening = Opening(spaces=2)
    >>> opening.with_spaces("blue")
    '  blue'
    >>> opening.visible("  blue")
    'blue'
    >>> opening.advanced(" ").spaces
    1

    Attributes:
        spaces: number of spaces (U+0020) at the end of the prompt that are not committed yet.
        is_reply: whether the response answers messages, and is still empty.
        is_held: whether the member has read these spaces with the prompt, so it writes none.
    """

    spaces: int = 0
    is_reply: bool = False
    is_held: bool = False

    def with_spaces(self, response: str) -> str:
        """Return the next text, given the part of it that belongs to the response."""
        return " " * self.spaces + response

    def visible(self, text: str) -> str:
        """Return the part of the next text that belongs to the response."""
        return text.lstrip() if self.is_reply else text[self.spaces :]

    def tree_text(self, text: str) -> str:
        """Return the part of the next text that is added to the member's tree."""
        return text[self.spaces :] if self.is_held else text

    def from_tree_text(self, text: str) -> str:
        """Return the next text, given the part of it that is added to the member's tree."""
        return self.with_spaces(text) if self.is_held else text

    def advanced(self, text: str) -> Opening:
        """Return the opening after `text` has been committed."""
        spaces = max(0, self.spaces - len(text))
        return Opening(spaces, self.is_reply and not text.strip(), self.is_held)


class SpaceTokens:
    """The tokens of a vocabulary that begin with spaces, except those that are `excluded`.

    `texts`: by token id, the text that a token adds after other text.
    """

    def __init__(self, texts: Sequence[str], excluded: Collection[int] = ()) -> None:
        self._size = len(texts)
        self._leading = {
            token: len(text) - len(text.lstrip(" "))
            for token, text in enumerate(texts)
            if text.startswith(" ") and token not in excluded
        }
        self._only_spaces = {t for t, size in self._leading.items() if size == len(texts[t])}
        self._masks: dict[int, bytes] = {}

    def can_write(self, spaces: int) -> bool:
        """Return whether tokens can write so many spaces. The last one may also write more text."""
        # a token of spaces alone can write any number of them: it repeats, and also begins the rest
        longest = max(self._leading.values(), default=0)
        return spaces <= longest or bool(self._only_spaces)

    def mask(self, spaces: int) -> bytes:
        """Return a mask (`Node.allowed`) of the tokens that can begin to write so many spaces."""
        if spaces not in self._masks:
            bits = bytearray((self._size + 7) // 8)
            for token, leading in self._leading.items():
                if leading >= spaces or token in self._only_spaces:
                    bits[token // 8] |= 1 << token % 8
            self._masks[spaces] = bytes(bits)
        return self._masks[spaces]
