"""A Hugging Face causal language model as a member."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adafuse_llm.backends.base import Answer, Ask
from adafuse_llm.backends.huggingface.forms import Attention, Decoder, Form, PathForm, TreeForm
from adafuse_llm.errors import InvalidOptionError, UnsupportedModelError
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.tree import Next, Node, TokenTree

FORMS = ("auto", "tree", "path")

TRIAL_TOKENS, TRIAL_DEPTH = 9, 3
"""Longest sequence on which a model is tried, and how many of its tokens are beyond the prompt."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Mean error of logits, relative to their spread, up to which a form is right; 0.05 for weights of
lower precision."""


ROW_COUNTING = ("attention_chunk_size", "attention_types", "alibi", "attn_config")
"""Configuration entries of models (Llama 4, GPT-Neo, Falcon, MPT) whose attention counts rows of
the cache where tree attention needs positions."""


class HuggingFaceBackend:
    """A transformers model and its tokenizer as one member. Neither is changed.

    The model is tried on a few tokens first: if tree attention gives the numbers of plain forward
    passes, the tree form is used, else the path-by-path form.

    Args:
        model: a causal language model (``AutoModelForCausalLM``), in evaluation mode.
        tokenizer: its tokenizer.
        name: the member's name.
        form: ``"tree"`` or ``"path"`` to insist on one form.

    Attributes:
        form: ``"tree"`` or ``"path"``, whichever serves.

    Raises:
        UnsupportedModelError: the model gives right numbers in no form, with the reason.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, *, form: str = "auto") -> None:
        if form not in FORMS:
            raise InvalidOptionError(f"form must be one of {', '.join(FORMS)}; got {form!r}")
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
        self._attention = _tree_attention(model, self._decoder.device)
        self._lock = threading.Lock()  # for engines that share this member
        self.form = self._choose_form(form)

    @property
    def codec(self) -> TokenizerCodec:
        return self._codec

    @property
    def end_ids(self) -> frozenset[int]:
        return self._end_ids

    @property
    def context_window(self) -> int | None:
        return self._context_window

    def draft_limit(self, length: int) -> int:
        if self.form == "path":
            return length
        edge = self._decoder.rope_edge  # tokens beyond it change what those before it are
        return edge if edge is not None and length <= edge else sys.maxsize

    @torch.inference_mode()
    def evaluate(self, asks: Sequence[Ask]) -> list[Answer]:
        with self._lock:
            return [self._answer(ask) for ask in asks]

    def release(self, tree: TokenTree) -> None:
        tree.memory = None

    def _answer(self, ask: Ask) -> Answer:
        tree = ask.tree
        if tree.memory is None:
            tree.memory = _Memory(
                tree, lambda: self._new_form(tree, self.form), self._decoder, self._end_ids
            )
        assert isinstance(tree.memory, _Memory)
        try:
            return tree.memory.answer(ask)
        except BaseException:
            tree.memory = None  # its cache may be half written: start over if asked again
            raise

    def _new_form(self, tree: TokenTree, form: str) -> Form:
        if form == "tree":
            assert self._attention is not None
            return TreeForm(self._decoder, self._attention, tree)
        return PathForm(self._decoder, tree)

    def _choose_form(self, wanted: str) -> str:
        reasons = []
        for form in ("tree", "path") if wanted == "auto" else (wanted,):
            reason = self._try_form(form)
            if reason is None:
                return form
            reasons.append(f"{form} form: {reason}")
        raise UnsupportedModelError(
            f"member {self.name!r} ({self.model.config.model_type}) cannot take part in an "
            f"ensemble: {'; '.join(reasons)}"
        )

    def _try_form(self, form: str) -> str | None:
        """The reason why a form does not serve, or None."""
        if form == "tree" and self._attention is None:
            return "its layers or its attention implementation take no tree mask"
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
        return _difference(logits, expected, TOLERANCE.get(self.model.dtype, 0.05))

    @torch.inference_mode()
    def _trial(self, form: str, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate a small tree, commit and go on: logits of the form, and of plain forward
        passes over the same sequences.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        tree = TokenTree([(7 * i + 3) % vocabulary for i in range(room)])
        left, right = (tree.grow([(11 * i + j) % vocabulary for j in range(2)]) for i in (1, 2))
        nodes = [tree.root, *tree.path(left), *tree.path(right)]
        expected = [self._plain([*tree.ids, *tree.tokens(node)]) for node in nodes]
        state = self._new_form(tree, form)
        logits = [state.extend(nodes[:1]), state.extend(nodes[1:])]
        tree.commit(nodes[1])
        state.reroot()
        deeper = tree.child(left, 5 % vocabulary)
        expected.append(self._plain([*tree.ids, *tree.tokens(deeper)]))
        logits.append(state.extend([deeper]))
        return torch.cat(logits), torch.cat(expected)

    def _plain(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after `tokens` from a forward pass without any cache, [1, v]."""
        ids = torch.tensor([list(tokens)], device=self._decoder.device)
        output = self.model(input_ids=ids, use_cache=False, return_dict=True)
        logits: torch.Tensor = output.logits[0, -1:]
        return logits if logits.dtype == torch.float64 else logits.float()


class _Memory:
    """What a member keeps of one request: a form's state, and the logits of live nodes.

    Logits are kept for nodes of the tree only, as children may be asked for in a later pass.
    """

    def __init__(
        self,
        tree: TokenTree,
        new_form: Callable[[], Form],
        decoder: Decoder,
        end_ids: frozenset[int],
    ) -> None:
        self._tree = tree
        self._new_form = new_form
        self._form = new_form()
        self._root = tree.root
        self._decoder = decoder
        self._end_ids = sorted(end_ids)
        self._edge = decoder.rope_edge
        self._rows: dict[Node, tuple[torch.Tensor, int]] = {}  # logits [n, v] of a pass, row

    def answer(self, ask: Ask) -> Answer:
        """Evaluate what is missing, then read off what was asked."""
        self._follow()
        missing = self._missing(ask)
        if self._edge is not None and any(node.length > self._edge for node in missing):
            self._form, self._rows, self._edge = self._new_form(), {}, None
            missing = self._missing(ask)
        passes, tokens = self._form.passes, self._form.tokens
        if missing:
            logits = self._form.extend(missing)
            for row, node in enumerate(missing):
                self._rows[node] = (logits, row)
        summaries = self._summaries(ask.evaluate, ask.top)
        logprobs = self._logprobs(ask.score)
        return Answer(summaries, logprobs, self._form.passes - passes, self._form.tokens - tokens)

    def _follow(self) -> None:
        """Forget what a commit has dropped."""
        if self._root is self._tree.root:
            return
        self._root = self._tree.root
        self._form.reroot()
        self._rows = {n: self._rows[n] for n in self._tree.nodes() if n in self._rows}

    def _missing(self, ask: Ask) -> list[Node]:
        """Nodes to evaluate, parents before children: those asked for, the parents of those to
        be scored, and what lies above them.
        """
        missing: dict[Node, None] = {}
        for wanted in (*ask.evaluate, *(node.parent for node in ask.score)):
            line: list[Node] = []
            above = wanted
            while above is not None and above not in self._rows and above not in missing:
                line.append(above)
                above = above.parent
            missing.update(dict.fromkeys(reversed(line)))
        return list(missing)

    def _stack(self, nodes: Sequence[Node]) -> torch.Tensor:
        """Logits after each node, [n, v]."""
        return torch.stack([logits[row] for logits, row in map(self._rows.__getitem__, nodes)])

    def _summaries(self, nodes: Sequence[Node], top: int) -> tuple[Next, ...]:
        if not nodes:
            return ()
        logits = self._stack(nodes)
        total = logits.logsumexp(-1, keepdim=True)  # [n, 1]
        values, tokens = _likeliest(logits, top)  # [n, top]
        end = logits[:, self._end_ids].logsumexp(-1, keepdim=True)  # -inf without such ids
        numbers = torch.cat([values - total, end - total], -1).tolist()
        return tuple(
            Next(tuple(ids), tuple(logprobs), end_logprob)
            for ids, (*logprobs, end_logprob) in zip(tokens.tolist(), numbers, strict=True)
        )

    def _logprobs(self, nodes: Sequence[Node]) -> tuple[float, ...]:
        if not nodes:
            return ()
        logits = self._stack([node.parent for node in nodes if node.parent is not None])
        ids = [node.token for node in nodes]
        self._decoder.check(ids)
        tokens = torch.tensor(ids, device=logits.device)
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        return tuple((chosen - logits.logsumexp(-1)).tolist())


def _likeliest(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top` highest logits and their ids, [n, top] each; equal ones by lower id.

    ``topk`` leaves the order of equal values open. One more value is asked for: only where it
    equals the last wanted one could a lower id have been left out.
    """
    top = min(top, logits.shape[-1])
    values, tokens = logits.topk(min(top + 1, logits.shape[-1]))
    if bool((values[:, top:] == values[:, top - 1 : top]).any()):
        tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        return logits.gather(-1, tokens), tokens
    values, tokens = values[:, :top], tokens[:, :top]
    tokens, order = tokens.sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, by_value)


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
        int(layer.sliding_window)
        for layer in layers
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    if len(windows) > 1:
        return None
    return Attention(
        frozenset(
            "sliding_attention" if layer.is_sliding else "full_attention" for layer in layers
        ),
        window=windows.pop() if windows else None,
        additive=implementation == "eager",
        dtype=model.dtype,
        device=device,
    )


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
