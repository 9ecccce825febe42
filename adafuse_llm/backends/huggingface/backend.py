"""A Hugging Face causal language model as a member."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.huggingface.architecture import context_window, end_ids
from adafuse_llm.backends.huggingface.decoder import Decoder
from adafuse_llm.backends.huggingface.generation import advice, ignored_settings, own_adjustment
from adafuse_llm.backends.huggingface.passes import PackedPasses
from adafuse_llm.backends.huggingface.prefix import PrefixCache
from adafuse_llm.backends.huggingface.state import RequestState
from adafuse_llm.backends.huggingface.text import HuggingFaceText
from adafuse_llm.backends.huggingface.tree_form import TreeForm
from adafuse_llm.backends.huggingface.trial import Trial
from adafuse_llm.backends.logits.readout import TokenTable, distribution, read
from adafuse_llm.backends.logits.rows import check_tokens, separate
from adafuse_llm.backends.reading import in_turn, read_piece
from adafuse_llm.errors import InvalidOptionError, UnsupportedModelError, is_out_of_memory
from adafuse_llm.tree import Node, TokenTree

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

logger = logging.getLogger(__name__)

FORMS = ("auto", "tree", "path")

PREFIX_CACHE_BYTES = 256 * 2**20
"""Default maximum size, in bytes, of the key/value rows that a member keeps from finished
requests."""

PATH_STATES = 8
"""Estimated number of states per request in the path form: one for the trunk and one per branch."""


class HuggingFaceBackend(Backend):
    """A member that consists of a transformers model and its tokenizer.

    The constructor first runs the model on a few tokens. If tree attention gives the same numbers
    as plain forward passes, the backend uses the tree form. Otherwise it uses the path form.
    Requests share forward passes if the model uses PyTorch's attention
    (``attn_implementation="sdpa"``). The backend does not change the model or the tokenizer.

    Args:
        model: a causal language model (``AutoModelForCausalLM``) in evaluation mode.
        tokenizer: tokenizer of the model.
        name: the member's name.
        form: ``"tree"`` or ``"path"`` to require that form; ``"auto"`` to let the backend choose.
        prefix_cache_bytes: maximum size, in bytes, of the key/value rows that the member keeps from
            finished requests. Later requests that begin with the same tokens reuse these rows. With
            0, the member keeps no rows. If a pass runs out of memory, the member drops all kept
            rows and repeats the pass once.

    Attributes:
        form: the form in use, ``"tree"`` or ``"path"``.
        shares_passes: whether requests share forward passes.
        ignored_settings: settings of the generation config that would change responses and that
            the member does not follow. The member logs a warning if there are any.

    Raises:
        UnsupportedModelError: the model cannot be a member, or no form gives the right numbers.
            The message gives the reason.
        InvalidOptionError: an option is not valid, or options contradict each other.
    """

    full = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        form: str = "auto",
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        if form not in FORMS:
            raise InvalidOptionError(f"form must be one of {', '.join(FORMS)}; got {form!r}")
        if prefix_cache_bytes < 0:
            raise InvalidOptionError(
                f"prefix_cache_bytes must be 0 or more; got {prefix_cache_bytes}"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"member {name!r} is an encoder-decoder model ({model.config.model_type}); "
                "members must be causal (decoder-only) language models"
            )
        if model.training:
            raise UnsupportedModelError(
                f"member {name!r} is in training mode, so dropout makes its numbers random; "
                "call model.eval() first"
            )
        self.name = name
        self.model = model
        self.parameters = int(model.num_parameters())
        self.tokenizer = tokenizer
        self._text = HuggingFaceText(tokenizer)
        self.codec = self._text.codec
        self.end_ids = end_ids(model, tokenizer)
        self.context_window = context_window(model)
        self.own_adjustment = own_adjustment(model, self.end_ids)
        self.ignored_settings = ignored_settings(model)
        self._decoder = Decoder(model)
        text, device = self._text, self._decoder.device
        self.device = str(device)
        is_quantized = bool(getattr(model, "is_quantized", False))
        self.drafts_sparingly = is_quantized and device.type == "cpu"
        self._tokens = TokenTable(
            self.end_ids, lambda: text.token_texts, self.vocabulary_size, device
        )
        self._lock = threading.Lock()  # several engines may share this member
        self._running: weakref.WeakSet[RequestState] = weakref.WeakSet()
        self._prefixes = PrefixCache(prefix_cache_bytes)
        trial = Trial(name, self._decoder, self.context_window)
        self._executor = trial.choose(form)
        self._row_bytes, self._shares = trial.row_bytes, trial.shares
        self.form = self._executor.form
        self.shares_passes = isinstance(self._executor.passes, PackedPasses)
        if self.ignored_settings:
            logger.warning(
                "member %r: its generation config sets %s, which members do not follow. %s",
                name,
                ", ".join(f"{key}={value!r}" for key, value in self.ignored_settings.items()),
                advice(self.ignored_settings),
            )

    def cache_bytes(self, tokens: int) -> int:
        """Return the cache size, in bytes, of a request with sequences of up to `tokens` tokens.

        A buffer grows by doubling, so it has room for up to twice the rows that the request needs.
        In the path form, a member keeps several states.
        """
        return tokens * self._row_bytes * (2 if self.form == "tree" else PATH_STATES)

    def free_bytes(self) -> int:
        """Return the number of bytes that the member can still cache.

        If its layers are on several devices, the device that fills up first determines the result.
        """
        return min(int(_free_bytes(device) / share) for device, share in self._shares.items())

    def draft_limit(self, length: int) -> int:
        if self.form == "path":
            return length
        edge = self._decoder.rope_edge  # beyond the edge, all rows change
        return edge if edge is not None and length <= edge else sys.maxsize

    @property
    def token_texts(self) -> Sequence[str]:
        return self._text.token_texts

    def prepare_draws(self) -> None:
        self._tokens.prepare_draws()

    @property
    def follows_grammars(self) -> bool:
        return self._text.follows_grammars

    def grammar_tokenizer(self) -> Any:
        return self._text.grammar_tokenizer(self.vocabulary_size, self.end_ids)

    @property
    def vocabulary_size(self) -> int:
        """Number of the model's logits."""
        return self._decoder.vocabulary

    @torch.inference_mode()
    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        trees = [query.tree for query in queries]
        with self._lock:
            return self._try(trees, partial(in_turn, queries, self._read, self._evaluate_once))

    @torch.inference_mode()
    def read_piece(self, trees: Sequence[TokenTree]) -> list[bool]:
        with self._lock:
            return self._try(trees, partial(self._read, trees, self._running))

    def _read(self, trees: Sequence[TokenTree], others: Iterable[RequestState] = ()) -> list[bool]:
        return read_piece(
            trees,
            others,
            self._executor.pieces,
            find_late=self._late,
            state_of=self._state_of,
            read=self._executor.read,
        )

    @torch.inference_mode()
    def release(self, tree: TokenTree) -> None:
        with self._lock:
            if isinstance(tree.state, RequestState):
                self._finish(tree.state)
            tree.state = None

    def distribution(self, tree: TokenTree, node: Node) -> NDArray[np.floating[Any]]:
        with self._lock:
            return distribution(tree, node)

    def clear_prefix_cache(self) -> None:
        """Drop the rows of all requests so far. Call this after a change of the model's weights.

        Requests that are running keep their own rows, but later requests do not reuse them.
        """
        with self._lock:
            self._prefixes.clear()
            self._running.clear()

    def _finish(self, state: RequestState) -> None:
        """Keep the rows of a finished request for later requests."""
        is_current = state in self._running
        self._running.discard(state)
        if isinstance(state.form, TreeForm) and is_current and self._is_source(state):
            state.follow()
            self._prefixes.add(state.tree.ids, state.form)

    def _try(self, trees: Sequence[TokenTree], work: Callable[[], T]) -> T:
        """Do work for requests. If the memory is full, drop the kept rows and do it once more."""
        try:
            return self._attempt(trees, work)
        except BaseException as error:
            if not (self._prefixes.size and is_out_of_memory(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames hold tensors
        logger.warning(
            "member %r ran out of memory, so it drops the cached rows of finished requests",
            self.name,
        )
        self._prefixes.clear()
        return self._attempt(trees, work)

    def _attempt(self, trees: Sequence[TokenTree], work: Callable[[], T]) -> T:
        """Do work for requests. On failure, drop their states to allow a retry."""
        try:
            return work()
        except BaseException:
            for tree in trees:
                self._forget(tree)
            raise

    def _forget(self, tree: TokenTree) -> None:
        """Drop the state of a request, because it is incomplete or wrong."""
        if isinstance(tree.state, RequestState):
            self._running.discard(tree.state)
        tree.state = None

    def _late(self, new: Mapping[int, Sequence[int]]) -> set[int]:
        """Return the new requests that should wait, because they can copy rows of another one."""
        return self._prefixes.late(new, self._sources()) if self.form == "tree" else set()

    def _evaluate_once(self, queries: Sequence[Query]) -> list[QueryResult]:
        states = [self._state_of(query.tree) for query in queries]
        missing = []
        for query, state in zip(queries, states, strict=True):
            nodes = state.missing(query)
            if state.edge is not None and any(node.length > state.edge for node in nodes):
                nodes = self._cross(query, state, state.edge)
            missing.append(nodes)
        separate(states)
        self._executor.advance(states, missing)
        scored = [node.token for query in queries for node in query.score]
        check_tokens(scored, self.vocabulary_size)
        results = read(queries, states, self._tokens)
        for query, result in zip(queries, results, strict=True):
            if result.has_nan:
                self._forget(query.tree)
        return results

    def _cross(self, query: Query, state: RequestState, edge: int) -> list[Node]:
        """Prepare a query that has nodes beyond `edge`.

        The rotary frequencies change beyond this length. If there are more than `edge` committed
        tokens, this method resets the state of the request. Otherwise it evaluates the nodes beyond
        `edge` in a temporary state, for this query only.

        Returns:
            The nodes that must still be evaluated.
        """
        whole = self._executor.new_form(query.tree, whole=True)
        if len(query.tree.ids) > edge:
            state.restart(whole)
            return state.missing(query)
        beyond = RequestState(query.tree, whole, None)
        self._executor.advance([beyond], [beyond.missing(query)])
        state.rows.update({n: row for n, row in beyond.rows.items() if n.length > edge})
        state.passes += beyond.passes
        state.tokens += beyond.tokens
        return state.missing(query)

    def _state_of(self, tree: TokenTree) -> RequestState:
        """Return the current state of a request, and create it for a new request.

        A new state begins with the cached rows of the prompt's first tokens.
        """
        if tree.state is None:
            rows = None
            if self.form == "tree" and self._decoder.shares_prefixes(len(tree.ids)):
                rows = self._prefixes.longest(tree.ids, self._sources())
            form = self._executor.new_form(tree, rows)
            # The path form handles the edge itself.
            edge = self._decoder.rope_edge if self.form == "tree" else None
            state = RequestState(tree, form, edge, rows.rows if rows else 0)
            self._running.add(state)
            tree.state = state
        assert isinstance(tree.state, RequestState)
        tree.state.follow()
        return tree.state

    def _sources(self) -> list[tuple[Sequence[int], TreeForm]]:
        """Return the running requests whose rows other requests may copy."""
        return [
            (state.tree.ids, state.form)
            for state in self._running
            if isinstance(state.form, TreeForm) and self._is_source(state)
        ]

    def _is_source(self, state: RequestState) -> bool:
        """Return whether each row depends only on the row's token and the tokens before it."""
        return state.edge == self._decoder.rope_edge and self._decoder.shares_prefixes(0)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can allocate, with those that PyTorch keeps for reuse."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):  # creates no context on another GPU
        kept = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + kept)
    return int(psutil.virtual_memory().available)
