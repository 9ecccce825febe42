"""Which tokens may follow the nodes of a member's tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_llm.errors import MemberError
from adafuse_llm.grammar.grammar import Allowed, GrammarState, GrammarVocabulary
from adafuse_llm.grammar.matchers import after
from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.text.words import added
from adafuse_llm.tree.tokens import Node, TokenTree


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a member's response must have: the response as the grammar reads it (shared by
    all members), the member's vocabulary for grammars, and the grammar's state at the start.
    """

    text: GrammarState
    vocabulary: GrammarVocabulary
    state: Any

    def of(self, text: GrammarState) -> Form:
        """Return the same form for another response."""
        return Form(text, self.vocabulary, self.state.deep_copy())


class Permits:
    """The tokens that may follow a node: those that a grammar permits, or that write prompt spaces.

    After a prompt that ends in two spaces, the next token writes one of them, or both:

    >>> tree, texts = TokenTree([0]), SpaceTokens(["sky", " ", "  sky"])
    >>> permits = Permits("wren", tree, lambda node: "", None, texts)
    >>> bin(permits.mask(tree.root, Opening(spaces=2))[0])
    '0b110'

    `text_of` returns the text from the root to a node; `form` and `space_tokens` are those of
    `MemberState`.
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
        self._tree = tree
        self._text_of = text_of
        self._form = form
        self._space_tokens = space_tokens
        # the grammar's state at each node; None if it forbids the node
        self._states: dict[Node, Any | None] = {} if form is None else {tree.root: form.state}
        self._allowed: dict[Node, Allowed | None] = {}

    def mask(self, node: Node, opening: Opening) -> bytes | None:
        """Return the tokens that may follow a node, in the format of ``Node.allowed``.

        Raises:
            MemberError: the grammar permits none of the member's tokens.
        """
        if self._form is not None:
            allowed = self._after(node)
            if allowed is None and self._states[node] is not None:
                text = f"{self._text_of(node)!r:.80}"
                raise self._stuck(f"none of its tokens continues {text} as the grammar requires")
            return None if allowed is None else allowed.mask
        # without a grammar, the spaces of the prompt come first
        tokens = self._space_tokens
        if tokens is None or not opening.spaces:  # most nodes need no text
            return None
        text = self._text_of(node)
        missing = opening.spaces - len(text)
        is_mask = missing > 0 and not text.strip(" ") and tokens.can_write(missing)
        return tokens.mask(missing) if is_mask else None

    def permitted(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes after which the grammar permits a token; all without a grammar."""
        return [node for node in nodes if self._form is None or self._after(node) is not None]

    def is_forced(self, node: Node) -> bool:
        """Return whether the grammar permits only one token, or only the end, after `node`."""
        allowed = self._after(node)
        return allowed is not None and allowed.is_forced

    def is_whole(self, node: Node) -> bool:
        """Return whether the text ends with a whole character at `node`; True without a grammar."""
        if self._form is None:
            return True
        try:
            self._form.vocabulary.read(self._tree.tokens(node)).decode()
        except UnicodeDecodeError:
            return False
        return True

    def commit(self, node: Node, text: str) -> None:
        """Commit the path to `node`, the member's tokens for `text`.

        Raises:
            MemberError: the member's tokens cannot write the text.
        """
        if self._form is None:
            return
        if self._state(node) is None:  # other tokens for the text may fit
            self._states[node] = self._read(self._tree.root, self._form.vocabulary.encode(text))
        if self._states[node] is None:
            raise self._stuck(f"its tokens cannot write {text!r:.80}")
        # forget the nodes that do not follow the new root
        kept = set(self._tree.nodes(node))
        self._states = {node: state for node, state in self._states.items() if node in kept}
        self._allowed = {node: mask for node, mask in self._allowed.items() if node in kept}

    def _stuck(self, problem: str) -> MemberError:
        hint = "Leave it out with use=[...], or change the grammar"
        return MemberError(self._name, f"{problem}. {hint}")

    def _after(self, node: Node) -> Allowed | None:
        # what may follow; None if there is no grammar, or if it forbids the node or every token
        if self._form is not None and node not in self._allowed:
            state = self._state(node)
            if state is None:
                return None
            self._allowed[node] = self._form.vocabulary.mask(state)
        return self._allowed.get(node)

    def _state(self, node: Node) -> Any | None:
        if node not in self._states:
            for step in self._tree.path(node):
                if step in self._states:
                    continue
                assert self._form is not None, "without a grammar, nobody asks"
                assert step.parent is not None, "the root has a state"
                tokens: list[int] | None = [step.token]
                if not self._form.vocabulary.is_usable(step.token):
                    # llguidance has other bytes for this token than the codec, so it reads the text
                    text = added(self._text_of(step.parent), self._text_of(step))
                    tokens = self._form.vocabulary.encode(text)
                self._states[step] = self._read(step.parent, tokens)
        return self._states[node]

    def _read(self, node: Node, tokens: list[int] | None) -> Any | None:
        # the state after these tokens; None if the grammar forbids them or the node
        state = self._states[node]
        return None if state is None or tokens is None else after(state, tokens, self._name)
