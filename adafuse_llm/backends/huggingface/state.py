"""The state that a member keeps for a running request."""

from __future__ import annotations

from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from adafuse_llm.backends.logits.rows import RequestLogits
from adafuse_llm.tree import TokenTree


class RequestState(RequestLogits):
    """The state of one request at a member: its form, and the logits of its nodes.

    Args:
        tree: the request's tree.
        form: form of the request, which has not evaluated any nodes yet.
        edge: length beyond which all rows must be computed again; None if no length requires this.
        reused: number of prompt tokens whose rows the form already has.
    """

    def __init__(
        self, tree: TokenTree, form: TreeForm | PathForm, edge: int | None, reused: int = 0
    ) -> None:
        super().__init__(tree, reused)
        self.form = form
        self.edge = edge

    @property
    def unread(self) -> int:
        """Number of committed tokens that the form can read in pieces, and has not read."""
        return self.form.unread

    def restart(self, form: TreeForm | PathForm) -> None:
        """Start again with `form` and without logits, because the rotary frequencies change."""
        self.form, self.rows, self.edge = form, {}, None

    def follow(self) -> bool:
        """Drop the rows and logits of nodes that the tree has dropped."""
        is_cut = super().follow()
        if is_cut:
            self.form.reroot()
        return is_cut
