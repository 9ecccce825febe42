"""A Hugging Face causal language model as a member."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from adafuse_llm.backends.base import Query
from adafuse_llm.backends.file_facts import context_window
from adafuse_llm.backends.huggingface.checkpoint import eos_ids, ignored_settings, own_adjustment
from adafuse_llm.backends.huggingface.model import Decoder
from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.backends.huggingface.self_test import choose
from adafuse_llm.backends.huggingface.tree_cache import Rows, TreeForm
from adafuse_llm.backends.huggingface.vocabulary import HuggingFaceVocabulary
from adafuse_llm.backends.logits.backend import PREFIX_CACHE_BYTES, LogitsBackend
from adafuse_llm.backends.logits.pass_cost import measured_token_cost
from adafuse_llm.backends.prefixes import CachedTokens, PrefixCache
from adafuse_llm.errors import UnsupportedModelError, is_out_of_memory
from adafuse_llm.tree.tokens import TokenTree

logger = logging.getLogger(__name__)

PATH_STATES = 8
"""Estimated number of caches that a request has in the path form, for its trunk and its tips."""


class HuggingFaceBackend(LogitsBackend[TreeForm | PathForm]):
    """A member that consists of a transformers model and its tokenizer.

    The constructor tests the model on a few tokens. If attention to trees of tokens gives the same
    numbers as plain forward passes, requests share passes (the tree form). Otherwise, every token
    after the prompt takes a pass (the path form). The tree form replaces the attention of the
    model. If other code runs the model, the new attention acts like ``"sdpa"`` or ``"eager"``.

    Args:
        model: a causal language model (``AutoModelForCausalLM``) in evaluation mode.
        tokenizer: tokenizer of the model.
        name: the member's name.
        prefix_cache_bytes: maximum size, in bytes, of the key/value rows that the member keeps from
            finished requests (only in the tree form), for later ones that begin with the same
            tokens. If a pass runs out of memory, the member drops these rows, and tries once more.

    Attributes:
        form: the form in use, ``"tree"`` or ``"path"``.

    Raises:
        UnsupportedModelError: the model cannot be a member, or no form gives the right numbers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        if model.training:
            raise UnsupportedModelError(
                f"member {name!r} is in training mode, so dropout makes its numbers random; "
                "call model.eval() first"
            )
        self.name = name
        self.model = model
        self.parameters = int(model.num_parameters())
        self.tokenizer = tokenizer
        # set up the vocabulary, and read the model's configurations
        self._decoder = Decoder(model)
        ends = eos_ids((getattr(model, "generation_config", None), model.config, tokenizer))
        size, device = self._decoder.vocabulary_size, self._decoder.device
        end_ids = frozenset(token for token in ends if 0 <= token < size)
        self._set_up(HuggingFaceVocabulary(tokenizer), end_ids, size, device)
        self.context_window = context_window(model.config.get_text_config(decoder=True).to_dict())
        self.own_adjustment = own_adjustment(model, self.end_ids)
        self.device = str(device)
        # choose the form, and create the cache of finished requests
        self._passes = choose(name, self._decoder)
        self.form = self._passes.form
        self._pieces = self._passes.pieces
        row_bytes = max(1, sum(self._passes.token_bytes.values()))
        limit = max(0, prefix_cache_bytes) // row_bytes if self.form == "tree" else 0
        self._kept: PrefixCache[Rows | TreeForm] = PrefixCache(limit)
        self.token_cost = measured_token_cost(self, self._forget)
        if ignored := ignored_settings(model):
            logger.warning(
                "member %r: its generation config sets %s, which members do not follow. To get the "
                "same, pass the options of these names; instead of do_sample, a temperature",
                name,
                ", ".join(f"{key}={value!r}" for key, value in ignored.items()),
            )

    def cache_bytes(self, tokens: int) -> int:
        # a slot can have twice as many rows as needed, and a slab 1.5 times as many slots
        states = 3 if self.form == "tree" else PATH_STATES
        return tokens * sum(self._passes.token_bytes.values()) * states

    def free_bytes(self) -> int:
        # of several devices with layers, the one that fills up first counts
        sizes = self._passes.token_bytes or {self._decoder.device: 1}
        total = sum(sizes.values())
        return min(_free_bytes(device) * total // size for device, size in sizes.items())

    def clear_prefix_cache(self) -> None:
        """Let no new request reuse rows of earlier ones. Call this if the weights change."""
        with self._lock:
            self._kept.clear()
            self._running.clear()

    def _advance(self, queries: Sequence[Query]) -> list[TreeForm | PathForm]:
        states = [self._state_of(query.tree) for query in queries]
        pairs = zip(states, queries, strict=True)
        self._passes.advance([(state, state.missing(query)) for state, query in pairs])
        return states

    def _run_parts(self, parts: Sequence[tuple[TreeForm | PathForm, int]]) -> None:
        self._passes.read(parts)

    def _made_room(self, error: BaseException) -> bool:
        if not (len(self._kept) and is_out_of_memory(error)):
            return False
        traceback.clear_frames(error.__traceback__)  # the frames hold tensors
        logger.warning(
            "member %r ran out of memory, so it drops the cached rows of finished requests",
            self.name,
        )
        self._kept.clear()
        return True

    def _new_state(self, tree: TokenTree) -> TreeForm | PathForm:
        prefix = self._kept.longest(tree.ids, self._sources())
        return self._passes.new_request(tree, prefix and prefix[0].first(prefix[1]))

    def _sources(self) -> list[CachedTokens[Rows | TreeForm]]:
        trees = [state for state in self._running if isinstance(state, TreeForm)]
        return [(state.tree.ids, state.committed, state) for state in trees]

    def _keep(self, state: TreeForm | PathForm) -> None:
        if isinstance(state, TreeForm):
            ids = self._kept.fitting(state.tree.ids[: state.committed])
            if len(ids):
                self._kept.add(ids, state.first(len(ids)))


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, including what PyTorch reserves but does not use."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):  # creates no context on another GPU
        kept = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + kept)
    return int(psutil.virtual_memory().available)
