"""A Hugging Face causal language model as a member."""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.huggingface.checkpoint import (
    advice,
    context_window,
    eos_ids,
    ignored_settings,
    own_adjustment,
)
from adafuse_llm.backends.huggingface.finished import FinishedRows
from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.backends.huggingface.passes import RequestState
from adafuse_llm.backends.huggingface.rows import TreeForm
from adafuse_llm.backends.huggingface.text import HuggingFaceText
from adafuse_llm.backends.huggingface.trial import choose
from adafuse_llm.backends.logits.readout import TokenTable, distribution, read
from adafuse_llm.backends.logits.rows import check_tokens
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
    as plain forward passes, the backend uses the tree form, in which requests share forward passes.
    Otherwise it uses the path form, with a pass for each token. For the tree form, it sets the
    attention implementation of the model to its own. When others use the model, this one computes
    the same as ``"sdpa"`` or, for attention that ``"sdpa"`` does not know, as ``"eager"``.

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
        ends = eos_ids((getattr(model, "generation_config", None), model.config, tokenizer))
        self._decoder = Decoder(model)
        self.end_ids = frozenset(token for token in ends if 0 <= token < self.vocabulary_size)
        self.context_window = context_window(model.config.get_text_config(decoder=True))
        self.own_adjustment = own_adjustment(model, self.end_ids)
        self.ignored_settings = ignored_settings(model)
        device = self._decoder.device
        self.device = str(device)
        is_quantized = bool(getattr(model, "is_quantized", False))
        self.drafts_sparingly = is_quantized and device.type == "cpu"
        text = self._text  # without the member, which would keep itself in memory
        self._tokens = TokenTable(
            self.end_ids, lambda: text.token_texts, self.vocabulary_size, device
        )
        self._lock = threading.Lock()  # several engines may share this member
        self._running: weakref.WeakSet[RequestState] = weakref.WeakSet()
        self._passes = choose(name, self._decoder, form)
        self.form = self._passes.form
        self._finished = FinishedRows(prefix_cache_bytes if self.form == "tree" else 0)
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
        states = 2 if tokens <= self._passes.edge else PATH_STATES
        return tokens * sum(self._passes.token_bytes.values()) * states

    def free_bytes(self) -> int:
        """Return the number of bytes that the member can still cache.

        If its layers are on several devices, the device that fills up first determines the result.
        """
        sizes = self._passes.token_bytes or {self._decoder.device: 1}
        total = sum(sizes.values())
        return min(_free_bytes(device) * total // size for device, size in sizes.items())

    def draft_limit(self, length: int) -> int:
        return max(length, self._passes.edge)

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

    @torch.inference_mode()
    def release(self, tree: TokenTree) -> None:
        """End a request, and keep its rows for later requests."""
        with self._lock:
            state, tree.state = tree.state, None
            if isinstance(state, RequestState) and state in self._running:
                self._running.discard(state)
                state.follow()
                if isinstance(state.form, TreeForm):
                    self._finished.add(tree.ids, state.form)

    def distribution(self, tree: TokenTree, node: Node) -> NDArray[np.floating[Any]]:
        with self._lock:
            return distribution(tree, node)

    def clear_prefix_cache(self) -> None:
        """Drop the rows of all requests so far. Call this after a change of the model's weights.

        Requests that are running keep their own rows, but later requests do not reuse them.
        """
        with self._lock:
            self._finished.clear()
            self._running.clear()

    def _read(self, trees: Sequence[TokenTree], others: Iterable[RequestState] = ()) -> list[bool]:
        return read_piece(
            trees,
            others,
            self._passes.pieces,
            find_late=lambda new: self._finished.late(new, self._sources()),
            state_of=self._state_of,
            read=self._passes.read,
        )

    def _evaluate_once(self, queries: Sequence[Query]) -> list[QueryResult]:
        states = [self._state_of(query.tree) for query in queries]
        pairs = list(zip(queries, states, strict=True))
        self._passes.advance(states, [self._passes.missing(s, query) for query, s in pairs])
        check_tokens([n.token for query in queries for n in query.score], self.vocabulary_size)
        results = read(queries, states, self._tokens)
        for query, result in zip(queries, results, strict=True):
            if result.has_nan:
                self._forget(query.tree)
        return results

    def _try(self, trees: Sequence[TokenTree], work: Callable[[], T]) -> T:
        """Do work for requests. If the memory is full, drop the kept rows and do it once more."""
        try:
            return self._attempt(trees, work)
        except BaseException as error:
            if not (self._finished.size and is_out_of_memory(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames hold tensors
        logger.warning(
            "member %r ran out of memory, so it drops the cached rows of finished requests",
            self.name,
        )
        self._finished.clear()
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

    def _state_of(self, tree: TokenTree) -> RequestState:
        """Return the current state of a request, and create it for a new request.

        A new state begins with the rows of the prompt's first tokens, if another request has them.
        """
        if tree.state is None:
            rows = None
            if len(tree.ids) <= self._passes.edge:
                rows = self._finished.longest(tree.ids, self._sources())
            form = self._passes.new_form(tree, rows)
            tree.state = RequestState(tree, form, rows.count if rows else 0)
            self._running.add(tree.state)
        assert isinstance(tree.state, RequestState)
        tree.state.follow()
        return tree.state

    def _sources(self) -> list[tuple[Sequence[int], TreeForm]]:
        """Return the running requests whose rows other requests may copy."""
        states = [(state.tree.ids, state.form) for state in self._running]
        return [(ids, form) for ids, form in states if isinstance(form, TreeForm)]


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can allocate, with those that PyTorch keeps for reuse."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):  # creates no context on another GPU
        kept = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + kept)
    return int(psutil.virtual_memory().available)
