"""Which tokens may follow the nodes of a member's tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_llm.errors import GrammarError, MemberError
from adafuse_llm.text.grammar import GrammarFollower, GrammarText, GrammarVocabulary
from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.tree import Node, TokenTree


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a response must have.

    Attributes:
        text: the response so far. All members of a request share this object.
        vocabulary: the member's tokens.
        state: the grammar's state at the start of the member's response.
    """

    text: GrammarText
    vocabulary: GrammarVocabulary
    state: Any

    def of(self, text: GrammarText) -> Form:
        """Return the same form of another response."""
        return Form(text, self.vocabulary, self.state.deep_copy())


class Permits:
    """The tokens that may follow in one member's tree: those of a grammar, or spaces of the prompt.

    Args:
        name: the member's name.
        tree: the tree.
        text_of: returns the text from the root to a node.
        form: the form that the response must have, or None.
        space_tokens: as for `Member`.

    Attributes:
        grammar: the response as its grammar reads it, or None.
    """

    def __init__(
        self,
        name: str,
        tree: TokenTree,
        text_of: Callable[[Node], str],
        form: Form | None,
        space_tokens: SpaceTokens | None,
    ) -> None:
        self._name = name
        self._text_of = text_of
        self._space_tokens = space_tokens
        self.grammar: GrammarText | None = None
        self._follower: GrammarFollower | None = None
        if form is not None:
            self.grammar = form.text
            self._follower = GrammarFollower(form.vocabulary, form.state, tree, text_of)

    def mask(self, node: Node, opening: Opening) -> bytes | None:
        """Return the tokens that may follow a node, in the format of ``Node.allowed``.

        While spaces of the prompt are missing, only tokens that continue them may follow.

        Raises:
            MemberError: the grammar permits none of the member's tokens.
        """
        if self._follower is None:
            return self._spaces(node, opening)
        allowed = self._follower.allowed(node)
        if allowed is None:
            return None
        if not allowed.is_empty:
            return allowed.mask
        if node.children:  # another member wrote the text, so only its score matters
            return None
        raise MemberError(
            self._name,
            f"none of its tokens continues {self._text_of(node)!r:.80} as the grammar requires. "
            "Leave it out with use=[...], or change the grammar",
        )

    def _spaces(self, node: Node, opening: Opening) -> bytes | None:
        tokens = self._space_tokens
        if tokens is None or not opening.spaces:
            return None
        text = self._text_of(node)
        missing = opening.spaces - len(text)
        is_mask = missing > 0 and not text.strip(" ") and tokens.can_write(missing)
        return tokens.mask(missing) if is_mask else None

    def permitted(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes after which the grammar permits a token. Parents come first."""
        if self._follower is None:
            return list(nodes)
        permitted = []
        dropped: set[Node | None] = set()
        for node in nodes:
            allowed = self._follower.allowed(node)
            if node.parent in dropped or allowed is None or allowed.is_empty:
                dropped.add(node)
            else:
                permitted.append(node)
        return permitted

    def is_forced(self, node: Node) -> bool:
        """Return whether the grammar leaves one alternative after `node`."""
        allowed = None if self._follower is None else self._follower.allowed(node)
        return allowed is not None and allowed.is_forced

    def is_whole(self, node: Node) -> bool:
        """Return whether the text up to `node` ends at the end of a character."""
        return self._follower is None or self._follower.is_whole(node)

    def prepare_commit(self, node: Node, text: str) -> None:
        """Prepare for the commit of the path to `node`, which adds `text` to the member's tree.

        Raises:
            MemberError: the grammar does not allow the text.
        """
        if self._follower is not None:
            try:
                self._follower.commit(node, text)
            except GrammarError as error:
                raise MemberError(self._name, f"{error}") from error

    def forget_dropped(self) -> None:
        """Forget the nodes that are no longer in the tree."""
        if self._follower is not None:
            self._follower.forget_dropped()
