"""A Hugging Face causal language model as a member."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import psutil
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adafuse_llm.backends.base import NodeQuery, NodeResult
from adafuse_llm.backends.huggingface.anchors import AnchorSpace
from adafuse_llm.backends.huggingface.forms import (
    PREFILL_TOKENS,
    Attention,
    Decoder,
    PackedPasses,
    PathForm,
    SinglePasses,
    TreeForm,
)
from adafuse_llm.backends.huggingface.kv import KeyValues, RowCache
from adafuse_llm.backends.huggingface.packing import Piece
from adafuse_llm.backends.huggingface.prefix import PrefixCache
from adafuse_llm.backends.huggingface.state import Logits, RequestState, read
from adafuse_llm.backends.huggingface.static import EMPTY, StaticPasses
from adafuse_llm.errors import InvalidOptionError, UnsupportedModelError, is_out_of_memory
from adafuse_llm.forks import after_fork
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.tree import Node, TokenTree

logger = logging.getLogger(__name__)

FORMS = ("auto", "tree", "path")

PREFIX_CACHE_BYTES = 256 * 2**20
"""Key/value rows of finished requests that a member keeps unless told otherwise."""

PATH_STATES = 8
"""States that the path form is taken to hold at a time: the trunk's, and one per branch."""

TRIAL_TOKENS, TRIAL_DEPTH = 9, 3
"""Longest sequence on which a model is tried, and how many of its tokens are beyond the prompt."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Mean error of logits, relative to their spread, up to which a form is right."""

ROUNDED_TOLERANCE, ROUNDED_NOISE = 5e-3, 4
"""The same for weights of lower precision and quantized ones, and how many times the difference
between their own plain passes is right if that is more: where activations are rounded, a token's
numbers move with the shape of the pass it is in."""

ROW_COUNTING = ("attention_chunk_size", "attention_types", "alibi", "attn_config")
"""Configuration entries of models (Llama 4, GPT-Neo, Falcon, MPT) whose attention counts rows of
the cache where tree attention needs positions."""


Passes = StaticPasses | PackedPasses | SinglePasses
"""Ways to run the passes of tree forms."""


class HuggingFaceBackend:
    """A transformers model and its tokenizer as one member. Neither is changed.

    The model is tried on a few tokens first: if tree attention gives the numbers of plain forward
    passes, the tree form is used, else the path-by-path form. Requests share forward passes where
    the model's attention is PyTorch's (``attn_implementation="sdpa"``).

    Args:
        model: a causal language model (``AutoModelForCausalLM``), in evaluation mode.
        tokenizer: its tokenizer.
        name: the member's name.
        form: ``"tree"`` or ``"path"`` to insist on one form.
        prefix_cache_bytes: most bytes of key/value rows that are kept of finished requests, for
            those that begin with the same tokens; 0 to keep none. All are dropped where a pass
            runs out of memory, before it is tried once more.
        static_cache: run decoding passes in fixed sizes over buffers that stay in place, on a
            GPU as CUDA graphs. For GPUs, where it spares the launches of small passes. The
            buffers hold up to four times the rows that requests running at the same time need,
            and are kept. Needs the tree form and shared passes; a member for which it gives no
            right numbers goes without, with a warning.
        compile: compile these passes with ``torch.compile``, each size when it is first met. A
            member that cannot be compiled goes without, with a warning.

    Attributes:
        form: ``"tree"`` or ``"path"``, whichever serves.
        static_cache, compiles: whether these serve.
        shares_passes: whether requests share forward passes.

    Raises:
        UnsupportedModelError: the model gives right numbers in no form, with the reason.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        form: str = "auto",
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        static_cache: bool = False,
        compile: bool = False,  # noqa: A002  # torch's and transformers' word for it
    ) -> None:
        if form not in FORMS:
            raise InvalidOptionError(f"form must be one of {', '.join(FORMS)}; got {form!r}")
        if prefix_cache_bytes < 0:
            raise InvalidOptionError(
                f"prefix_cache_bytes must be 0 or more; got {prefix_cache_bytes}"
            )
        if static_cache and form == "path":
            raise InvalidOptionError(
                "static_cache=True needs the tree form; got form='path'. Leave one of them out"
            )
        if compile and not static_cache:
            raise InvalidOptionError(
                "compile=True compiles the passes of a static cache; pass static_cache=True, too"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"member {name!r} is an encoder-decoder model ({model.config.model_type}); "
                "an ensemble takes causal (decoder-only) language models"
            )
        if model.training:
            raise UnsupportedModelError(
                f"member {name!r} is in training mode, where dropout makes its numbers random; "
                "call model.eval() first"
            )
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self._codec = TokenizerCodec(tokenizer)
        self._end_ids = _end_ids(model, tokenizer)
        self._context_window = _context_window(model)
        self._decoder = Decoder(model)
        self._ends = torch.tensor(sorted(self._end_ids), device=self._decoder.device).long()
        self._passes: Passes | None = None
        self._row_bytes = 0
        self._shares = {self._decoder.device: 1.0}
        after_fork(self._renew)
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self._space = AnchorSpace(model, tokenizer)
        self.form = self._choose_form(form, static=static_cache, compiled=compile)
        self.shares_passes = isinstance(self._passes, (StaticPasses, PackedPasses))
        self.static_cache = isinstance(self._passes, StaticPasses)
        self.compiles = isinstance(self._passes, StaticPasses) and self._passes.compiled

    def _renew(self) -> None:
        self._lock = threading.Lock()  # for engines that share this member
        self._running: weakref.WeakSet[RequestState] = weakref.WeakSet()

    @property
    def codec(self) -> TokenizerCodec:
        return self._codec

    @property
    def end_ids(self) -> frozenset[int]:
        return self._end_ids

    @property
    def context_window(self) -> int | None:
        return self._context_window

    @property
    def device(self) -> str:
        return str(self._decoder.device)

    def cache_bytes(self, tokens: int) -> int:
        """Buffers grow by doubling, so up to twice the rows; those of a static cache do so in two
        directions, and a path member keeps several states.
        """
        copies = EMPTY if self.static_cache else 2 if self.form == "tree" else PATH_STATES
        return tokens * self._row_bytes * copies

    def free_bytes(self) -> int:
        """Of layers on several devices, what can be kept before the first device is full."""
        return min(int(_free_bytes(device) / share) for device, share in self._shares.items())

    def draft_limit(self, length: int) -> int:
        if self.form == "path":
            return length
        edge = self._decoder.rope_edge  # tokens beyond it change what those before it are
        return edge if edge is not None and length <= edge else sys.maxsize

    @property
    def vocabulary(self) -> Mapping[str, int]:
        return self._space.vocabulary

    def relative(self, tree: TokenTree, node: Node, anchors: Sequence[int]) -> list[float]:
        with self._lock:
            return self._space.relative(_logits(tree, node), anchors)

    def corrected(
        self,
        tree: TokenTree,
        node: Node,
        anchors: Sequence[int],
        target: Sequence[float],
        *,
        steps: int,
        rate: float,
    ) -> tuple[int, float]:
        with self._lock:
            logits = _logits(tree, node)
            return self._space.corrected(logits, anchors, target, steps=steps, rate=rate)

    @torch.inference_mode()
    def evaluate(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        with self._lock:
            try:
                return self._try(queries)
            except BaseException as error:
                if not (self._prefixes.size and is_out_of_memory(error)):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
            logger.warning("member %r ran out of memory: forgets finished requests", self.name)
            self._prefixes.clear()
            return self._try(queries)

    @torch.inference_mode()
    def release(self, tree: TokenTree) -> None:
        with self._lock:
            state, tree.state = tree.state, None
            if isinstance(state, RequestState) and isinstance(state.form, TreeForm):
                self._running.discard(state)
                if not self._is_source(state):
                    return
                state.follow()
                self._prefixes.add(tree.ids, state.form)

    def clear_prefix_cache(self) -> None:
        """Forget the rows of finished requests, as after a change of the model's weights."""
        with self._lock:
            self._prefixes.clear()

    def _try(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        """Answer asks; where that fails, they start over if asked again."""
        try:
            return self._in_turn(queries)
        except BaseException:
            for query in queries:
                self._forget(query.tree)
            raise

    def _forget(self, tree: TokenTree) -> None:
        """Drop what is kept of a request, as it is half written or wrong."""
        if isinstance(tree.state, RequestState):
            self._running.discard(tree.state)
        tree.state = None

    def _in_turn(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        """Answer asks, but those of new requests that begin like another's only after that one."""
        results: dict[int, NodeResult] = {}
        waiting = dict(enumerate(queries))
        while waiting:
            new = {i: query.tree.ids for i, query in waiting.items() if query.tree.state is None}
            late = self._prefixes.late(new, self._sources()) if self.form == "tree" else ()
            ready = {i: query for i, query in waiting.items() if i not in late}
            results.update(zip(ready, self._evaluate_once(list(ready.values())), strict=True))
            waiting = {i: query for i, query in waiting.items() if i in late}
        return [results[i] for i in range(len(queries))]

    def _evaluate_once(self, queries: Sequence[NodeQuery]) -> list[NodeResult]:
        states = [self._state_of(query.tree) for query in queries]
        missing = []
        for query, state in zip(queries, states, strict=True):
            state.follow()
            nodes = state.missing(query)
            if state.edge is not None and any(node.length > state.edge for node in nodes):
                nodes = self._cross(query, state, state.edge)
            missing.append(nodes)
        self._advance(states, missing)
        results = read(queries, states, self._decoder, self._ends)
        for query, result in zip(queries, results, strict=True):
            if result.has_nan:
                self._forget(query.tree)
        return results

    def _cross(self, query: NodeQuery, state: RequestState, edge: int) -> list[Node]:
        """Go past the length at which what was computed before is worth nothing: for good once
        the committed tokens do, until then with rows that serve this ask only.

        Returns:
            The nodes that are missing then.
        """
        whole = self._new_form(query.tree, self.form, whole=True)
        if len(query.tree.ids) > edge:
            state.restart(whole)
            return state.missing(query)
        beyond = RequestState(query.tree, whole, None)
        self._advance([beyond], [beyond.missing(query)])
        state.rows.update({n: row for n, row in beyond.rows.items() if n.length > edge})
        state.passes += beyond.passes
        state.tokens += beyond.tokens
        return state.missing(query)

    def _state_of(self, tree: TokenTree) -> RequestState:
        """What is kept of a request; at first, the rows of what it shares with others."""
        if tree.state is None:
            rows = None
            if self.form == "tree" and self._decoder.shares_prefixes(len(tree.ids)):
                rows = self._prefixes.longest(tree.ids, self._sources())
            form = self._new_form(tree, self.form, rows)
            edge = self._decoder.rope_edge if self.form == "tree" else None  # paths see to it
            state = RequestState(tree, form, edge, rows.rows if rows else 0)
            self._running.add(state)
            tree.state = state
        assert isinstance(tree.state, RequestState)
        return tree.state

    def _sources(self) -> list[tuple[Sequence[int], TreeForm]]:
        """Running requests whose rows may serve others."""
        return [
            (state.tree.ids, state.form)
            for state in self._running
            if isinstance(state.form, TreeForm) and self._is_source(state)
        ]

    def _is_source(self, state: RequestState) -> bool:
        """Whether rows depend on nothing but the tokens up to theirs."""
        return state.edge == self._decoder.rope_edge and self._decoder.shares_prefixes(0)

    def _advance(self, states: Sequence[RequestState], missing: Sequence[Sequence[Node]]) -> None:
        """Evaluate missing nodes, those of all tree forms in the same passes."""
        plans: list[tuple[RequestState, list[Piece]]] = []
        for state, nodes in zip(states, missing, strict=True):
            if not nodes:
                continue
            if isinstance(state.form, TreeForm):
                plans.append((state, state.form.plan(nodes)))
            else:
                passes, tokens = state.form.passes, state.form.tokens
                state.learn(nodes, Logits(state.form.extend(nodes)), 0)
                state.passes += state.form.passes - passes
                state.tokens += state.form.tokens - tokens
        for batch in _batches(plans, self._passes):
            assert self._passes is not None
            logits = Logits(self._passes.run([piece for _, piece in batch]))
            row = 0
            for state, piece in batch:
                state.learn(piece.nodes, logits, row)
                row += len(piece.nodes)
                state.tokens += len(piece.tokens)
            for state in dict.fromkeys(state for state, _ in batch):
                state.passes += 1

    def _new_form(
        self, tree: TokenTree, form: str, rows: RowCache | None = None, *, whole: bool = False
    ) -> TreeForm | PathForm:
        """Fresh state, with the rows of a prompt's beginning; `whole` to run all of it at once."""
        if form == "tree":
            cache: KeyValues | None = rows
            if isinstance(self._passes, StaticPasses):
                cache = self._passes.pool.take(len(tree.ids), rows)
            chunked = not whole and self._decoder.takes_chunks(len(tree.ids))
            return TreeForm(tree, chunked=chunked, cache=cache)
        return PathForm(self._decoder, tree)

    def _choose_form(self, wanted: str, *, static: bool, compiled: bool) -> str:
        """The first form whose numbers are right; sets how it is run."""
        attention = _tree_attention(self.model, self._decoder.device)
        ways: list[tuple[str, Passes | None]] = []
        if attention is not None and not attention.additive and self._decoder.packs:
            if compiled:
                ways.append(("tree", StaticPasses(self._decoder, attention, compiled=True)))
            if static:
                ways.append(("tree", StaticPasses(self._decoder, attention)))
            ways.append(("tree", PackedPasses(self._decoder, attention)))
        elif static:
            logger.warning(
                "member %r goes without a static cache: its layers or its attention share no "
                "passes (attn_implementation='sdpa' may)",
                self.name,
            )
        if attention is not None:
            ways.append(("tree", SinglePasses(self._decoder, attention)))
        reasons = {} if ways else {"tree": "its layers or its attention take no tree mask"}
        for form, passes in (*ways, ("path", None)):
            if wanted not in ("auto", form):
                continue
            self._passes = passes
            reason = self._try_form(form)
            if reason is None:
                return form
            if isinstance(passes, StaticPasses):
                lost = "compilation" if passes.compiled else "a static cache"
                logger.warning("member %r goes without %s: %s", self.name, lost, reason)
            reasons[form] = reason
        explained = "; ".join(
            f"{form} form: {reason}" for form, reason in reasons.items() if wanted in ("auto", form)
        )
        raise UnsupportedModelError(
            f"member {self.name!r} ({self.model.config.model_type}) cannot take part in an "
            f"ensemble: {explained}"
        )

    def _try_form(self, form: str) -> str | None:
        """The reason why a form does not serve, or None."""
        if form == "path" and self._decoder.cache_name is None:
            return "it keeps no cache"
        room = min(self._context_window or TRIAL_TOKENS, TRIAL_TOKENS) - TRIAL_DEPTH
        if room < 1:
            return None if form == "path" else "its context window is too small for a trial"
        try:
            logits, expected = self._trial(form, room)
        except Exception as error:  # a model may fail in any way
            return f"{type(error).__name__}: {error}"
        if expected.isnan().any():
            return "its logits are NaN"
        return _difference(logits, expected, self._tolerance(room + TRIAL_DEPTH))

    @torch.inference_mode()
    def _tolerance(self, length: int) -> float:
        """Up to which error a form is right for this model."""
        if self.model.dtype in TOLERANCE and not getattr(self.model, "is_quantized", False):
            return TOLERANCE[self.model.dtype]
        tokens = [(7 * i + 3) % self._decoder.vocabulary for i in range(length)]
        ids = torch.tensor([tokens], device=self._decoder.device)
        whole = self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0].float()
        parts = torch.stack([self._plain(tokens[: end + 1]) for end in range(length)])
        noise = float((whole - parts).abs().mean() / parts.std())
        return max(ROUNDED_TOLERANCE, ROUNDED_NOISE * noise)

    @torch.inference_mode()
    def _trial(self, form: str, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate two small trees side by side, commit and go on: logits of the form, and of
        plain forward passes over the same sequences.
        """
        vocabulary = self._decoder.vocabulary
        lengths = (room, max(1, room - 2))
        trees = [TokenTree([(7 * i + n) % vocabulary for i in range(n)]) for n in lengths]
        states = [RequestState(tree, self._new_form(tree, form), None) for tree in trees]
        found, expected = [], []

        def check(nodes: Sequence[Sequence[Node]]) -> None:
            self._advance(states, nodes)
            for state, own in zip(states, nodes, strict=True):
                for node in own:
                    logits, row = state.rows[node]
                    found.append(logits.values[row])
                    expected.append(self._plain([*state.tree.ids, *state.tree.tokens(node)]))

        check([[tree.root] for tree in trees])
        forks = [
            [tree.grow([(11 * i + j) % vocabulary for j in range(2)]) for i in (1, 2)]
            for tree in trees
        ]
        check(
            [[*t.path(left), *t.path(right)] for t, (left, right) in zip(trees, forks, strict=True)]
        )
        for tree, (left, _) in zip(trees, forks, strict=True):
            tree.commit(tree.path(left)[0])
        for state in states:
            state.follow()
        check([[t.child(left, 5 % vocabulary)] for t, (left, _) in zip(trees, forks, strict=True)])
        self._row_bytes = states[0].form.row_bytes
        self._shares = _shares(states[0].form.layers) or {self._decoder.device: 1.0}
        return torch.stack(found), torch.stack(expected)

    def _plain(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after `tokens` from a forward pass without any cache, [v]."""
        ids = torch.tensor([list(tokens)], device=self._decoder.device)
        output = self.model(input_ids=ids, use_cache=False, return_dict=True)
        logits: torch.Tensor = output.logits[0, -1]
        return logits if logits.dtype == torch.float64 else logits.float()


def _logits(tree: TokenTree, node: Node) -> torch.Tensor:
    """The logits after an evaluated node, [v]."""
    assert isinstance(tree.state, RequestState), "asked for before it was evaluated"
    logits, row = tree.state.rows[node]
    return logits.values[row]


def _batches(
    plans: Sequence[tuple[RequestState, Sequence[Piece]]], passes: Passes | None
) -> list[list[tuple[RequestState, Piece]]]:
    """Pieces that go into one pass, up to `PREFILL_TOKENS` tokens: first pieces first, each in the
    earliest pass that has room and is not before that of the request's previous piece.
    """
    limit = 0 if isinstance(passes, SinglePasses) else PREFILL_TOKENS
    apart = int(isinstance(passes, StaticPasses))  # rows of a pass are counted when it is through
    batches: list[list[tuple[RequestState, Piece]]] = []
    sizes: list[int] = []
    earliest = [0] * len(plans)
    for wave in zip_longest(*(pieces for _, pieces in plans)):
        for number, piece in enumerate(wave):
            if piece is None:
                continue
            size, index = len(piece.tokens), earliest[number]
            while index < len(batches) and sizes[index] + size > limit:
                index += 1
            if index == len(batches):
                batches.append([])
                sizes.append(0)
            batches[index].append((plans[number][0], piece))
            sizes[index] += size
            earliest[number] = index + apart
    return batches


def _difference(logits: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """How far logits are from the expected ones, if too far for the weights' precision."""
    finite = torch.isfinite(expected)
    gap = float((logits - expected)[finite].abs().mean())
    scale = float(expected[finite].std())
    if gap <= tolerance * scale:
        return None
    return f"its logits differ from plain forward passes by {gap:.2g} (scale {scale:.2g})"


def _tree_attention(model: Any, device: torch.device) -> Attention | None:
    """How the model takes tree masks; None if its layers do not."""
    implementation = getattr(model.config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        return None
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention"} or any(getattr(config, n, None) for n in ROW_COUNTING):
        return None
    layers = DynamicCache(config=config).layers
    if not layers or any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    ):
        return None
    windows = {
        index: int(layer.sliding_window)
        for index, layer in enumerate(layers)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    if len(set(windows.values())) > 1:
        return None
    return Attention(
        frozenset(
            "sliding_attention" if layer.is_sliding else "full_attention" for layer in layers
        ),
        windows=windows,
        additive=implementation == "eager",
        dtype=model.dtype,
        device=device,
    )


def _free_bytes(device: torch.device) -> int:
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):  # asks this device alone: no context on others
        return int(module.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _shares(layers: Sequence[Any]) -> dict[torch.device, float]:
    """The part of a token's key/value bytes that lies on each device; empty without such rows."""
    found: Counter[torch.device] = Counter()
    for layer in layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 4:
                found[tensor.device] += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return {device: size / found.total() for device, size in found.items()}


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: the generation config's, the config's, the tokenizer's."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            ids.add(found)
        elif isinstance(found, (list, tuple)):
            ids.update(int(token) for token in found)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return frozenset(token for token in ids if 0 <= token < vocabulary)


def _context_window(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
