"""What a member's vocabulary can write: spaces of a prompt, and texts that fit a grammar."""

from __future__ import annotations

import logging
import threading

from adafuse_llm.backends.base import Backend
from adafuse_llm.config import GRAMMARS
from adafuse_llm.errors import GrammarError
from adafuse_llm.forks import after_fork
from adafuse_llm.text.grammar import GrammarVocabulary
from adafuse_llm.text.opening import SpaceTokens

logger = logging.getLogger(__name__)


class Vocabularies:
    """The members' tokens for spaces and grammars, read on first use."""

    def __init__(self) -> None:
        self._spaces: dict[str, SpaceTokens] = {}
        self._grammars: dict[str, GrammarVocabulary] = {}
        self._warned: set[str] = set()
        after_fork(self._renew)

    def _renew(self) -> None:
        self._building = threading.Lock()

    def space_tokens(self, backend: Backend, spaces: int) -> SpaceTokens | None:
        """Return a member's tokens that continue a prompt without its last spaces.

        Return None if the member cannot restrict its tokens to them.
        """
        if backend.name not in self._spaces:
            self._spaces[backend.name] = SpaceTokens(backend.token_texts or (), backend.end_ids)
        tokens = self._spaces[backend.name]
        if tokens.can_write(spaces):
            return tokens
        if backend.name not in self._warned:
            self._warned.add(backend.name)
            logger.warning(
                "member %r reads the spaces at the end of a prompt (here %d) as a part of it, "
                "because it cannot restrict its next tokens to those that begin with spaces; its "
                "text after such a prompt may be worse",
                backend.name,
                spaces,
            )
        return None

    def grammar(self, backend: Backend) -> GrammarVocabulary:
        """Return a member's tokens for grammars.

        Raises:
            GrammarError: the member's tokens cannot follow a grammar.
        """
        with self._building:
            if backend.name not in self._grammars:
                self._grammars[backend.name] = read_grammar_vocabulary(backend)
            return self._grammars[backend.name]


def read_grammar_vocabulary(backend: Backend) -> GrammarVocabulary:
    """Read a member's tokens for grammars.

    Raises:
        GrammarError: the member's tokens cannot follow a grammar.
    """
    reason = "the bytes of its tokens are not known"
    if backend.follows_grammars:
        try:
            texts = backend.token_texts or ()
            tokenizer = backend.grammar_tokenizer()
            return GrammarVocabulary(backend.name, tokenizer, texts, backend.end_ids)
        except Exception as error:
            reason = f"llguidance cannot read its tokenizer: {error}"
    raise GrammarError(
        f"member {backend.name!r} cannot follow {', '.join(GRAMMARS[:-1])} or {GRAMMARS[-1]} "
        f"({reason}). Leave it out with use=[...], or use choices."
    )
