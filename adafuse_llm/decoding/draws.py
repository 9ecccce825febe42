"""How a member draws the tokens of a response, so that members with the same seed draw alike."""

from __future__ import annotations

from collections.abc import Callable

from adafuse_llm.text.words import REPLACEMENT
from adafuse_llm.tree.sampling import Draw, Sampling
from adafuse_llm.tree.tokens import Node


class Draws:
    """The draws of one member in one response (`adafuse_llm.tree.sampling`).

    A draw depends on the text of the response before it, in whole characters, so members with the
    same seed draw alike. It also depends on the number of silent tokens, which add no text.
    """

    def __init__(self, sampling: Sampling, root: Node) -> None:
        self._sampling = sampling
        self._text = ""  # the committed response, in whole characters
        self._unfinished = ""  # the end of the committed response inside a character
        self._known = {root: ("", 0)}  # by node: text after `_text`, number of silent tokens

    def draw(self, node: Node, shown: Callable[[Node], str]) -> Draw:
        """Return how to draw the token after a node. `shown` is `MemberState.shown`."""
        added, silent = self._state(node, shown)
        return self._sampling.draw(self._text + added, silent)

    def commit(self, node: Node, text: str, shown: Callable[[Node], str]) -> None:
        """Commit the path to `node`, which adds `text` to the response."""
        before, silent = self._state(node.parent or node, shown)
        new = self._unfinished + text
        whole = new.rstrip(REPLACEMENT)
        # half a character waits for the tokens that complete it
        is_new = node.parent is not None
        self._known = {node: ("", silent + is_new if whole == before else 0)}
        self._unfinished = new[len(whole) :]
        self._text += whole

    def _state(self, node: Node, shown: Callable[[Node], str]) -> tuple[str, int]:
        # the text that the path to `node` adds, in whole characters, and how many tokens at its end
        # are silent
        path = [node]
        while (last := path[-1]) not in self._known:
            assert last.parent is not None, "the state of the root is known"
            path.append(last.parent)
        text, silent = self._known[path.pop()]
        while path:
            before, text = text, (self._unfinished + shown(path[-1])).rstrip(REPLACEMENT)
            silent = silent + 1 if text == before else 0
            self._known[path.pop()] = text, silent
        return text, silent
