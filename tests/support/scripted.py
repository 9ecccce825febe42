"""Members that write what a script says: real models of transformers, with real tokenizers.

    engine = scripted_engine(lambda prompt: "Paris." if "France" in prompt else "I do not know.")
    engine.generate(messages=[{"role": "user", "content": "The capital of France?"}]).text

A script gets the prompt as a member reads it, chat template included, and returns the whole reply:
any text, such as JSON, calls of tools, several lines, emoji. It is asked again and again, so it has
to be a pure function. Where the prompt ends and the reply begins is read off the text:

- in a conversation, behind the last thing that the chat template writes before a reply;
- in a plain prompt, behind the first ``Answer:``, ``Assistant:`` or the like (`CUES`) after which
  the script's reply to the prompt up to there has begun, else behind the last one; the reply then
  begins with a space unless the prompt ends in one;
- in a plain prompt without any of these, at its end; the reply then begins on a new line.

The model keeps its tokens' ids as the keys of its one layer, so that it runs with and without a
cache, alone and in padded batches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from tests.support.models import CHATML, STRICT, TokenizerKind, _byte_letters, tokenizer

Script = Callable[[str], str]

CUES = re.compile(rb"(?m)^[ \t]*(?:\w+ )?(?:Answer|Assistant|Response|Output|AI|A):")
"""What a plain prompt ends in, but for whitespace, where it asks for a reply."""

SURE, ELSEWHERE = 0.9, 0.05
"""Probability of the next token, and of other tokens that the reply could go on with together."""

WINDOW = 8192
"""Positions of a member, in tokens."""

_SCRIPTS: dict[str, Script] = {}


class ScriptedConfig(PreTrainedConfig):
    """Names a script and a tokenizer of this process."""

    model_type = "scripted"
    script = ""
    kind = "bytelevel"
    template: str | None = None
    vocab_size = 1
    max_position_embeddings = WINDOW
    num_hidden_layers = 1


class ScriptedForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model that spells the replies of a script."""

    config_class = ScriptedConfig
    base_model_prefix = "model"

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, 1)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        torch.nn.init.zeros_(module.weight)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        size = input_ids.shape[1]
        keys = input_ids[:, None, :, None].to(torch.float32)  # [S, 1, n, 1]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            keys, _ = past_key_values.update(keys, keys, 0)
        rows = keys[:, 0, :, 0].long()  # [S, r]
        kept: Sequence[int] = range(size)
        if isinstance(logits_to_keep, torch.Tensor):
            kept = logits_to_keep.tolist()
        elif logits_to_keep:
            kept = range(max(0, size - logits_to_keep), size)
        writer = _writer(self.config.script, self.config.kind, self.config.template)
        logits = torch.stack(
            [
                torch.stack([writer.logits(_seen(ids, attention_mask, n, i, size)) for i in kept])
                for n, ids in enumerate(rows)
            ]
        )  # [S, kept, v]
        return CausalLMOutputWithPast(
            logits=logits.to(self.embedding.weight), past_key_values=past_key_values
        )


AutoConfig.register("scripted", ScriptedConfig)
AutoModelForCausalLM.register(ScriptedConfig, ScriptedForCausalLM)


def _seen(
    ids: torch.Tensor, mask: torch.Tensor | None, number: int, query: int, size: int
) -> tuple[int, ...]:
    """The tokens that a new token sees, itself included: of `ids`, [r], the last `size` are new."""
    ids = ids[: len(ids) - size + query + 1]
    return tuple((ids if mask is None else ids[mask[number, : len(ids)].bool()]).tolist())


class _Writer:
    """A script in the tokens of a tokenizer."""

    def __init__(self, script: Script, known: Any) -> None:
        from adafuse_llm.text.codec import TokenizerCodec

        self._codec = TokenizerCodec(known)
        self._pieces = _spelling(known)
        self._end = int(known.eos_token_id)
        self._size = len(known)
        self._ask = functools.cache(lambda prompt: script(prompt.decode(errors="replace")).encode())
        self._marker = _reply_marker(known)
        special = {*known.all_special_ids, *known.added_tokens_decoder}
        self._fitting: dict[bytes, list[int]] = {}
        for token, piece in enumerate(self._pieces):
            if piece and token not in special:
                self._fitting.setdefault(piece, []).append(token)
        self._longest = max(map(len, self._fitting))
        self._next = functools.lru_cache(maxsize=None)(self._next)  # type: ignore[method-assign]
        self.logits = functools.lru_cache(maxsize=4096)(self.logits)  # type: ignore[method-assign]

    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Logits after `ids`, [v]: logarithms of probabilities."""
        text = b"".join([self._pieces[token] for token in ids])
        likely, others = self._next(self._missing(text))
        rest = 1 - SURE - (ELSEWHERE if others else 0)
        logits = torch.full((self._size,), rest / (self._size - 1 - len(others))).log()
        if others:
            logits[list(others)] = torch.tensor(ELSEWHERE / len(others)).log()
        logits[likely] = torch.tensor(SURE).log()
        return logits

    def _missing(self, text: bytes) -> bytes:
        """What the reply lacks; nothing where it is complete, or something else was written."""
        if self._marker and self._marker in text:
            start = text.rfind(self._marker) + len(self._marker)
            return _after(text[start:], self._ask(text[:start])) or b""
        cues = [match.end() for match in CUES.finditer(text)]
        lines = [match.start() for match in re.finditer(rb"\n", text)]
        for end in sorted({*cues, *lines}):
            written = text[end:].lstrip()
            if written and (left := _after(written, self._ask(text[:end]))) is not None:
                return left
        if not cues:
            return (b"" if text.endswith(b"\n") else b"\n") + self._ask(text.rstrip(b"\n"))
        prompt, space = text[: cues[-1]], text[cues[-1] :]
        return b"" if space.strip() else (b"" if space else b" ") + self._ask(prompt)

    def _next(self, missing: bytes) -> tuple[int, tuple[int, ...]]:
        """The token that a reply goes on with, and others that it could go on with."""
        if not missing:
            return self._end, ()
        sizes = range(1, min(self._longest, len(missing)) + 1)
        fitting = [token for size in sizes for token in self._fitting.get(missing[:size], ())]
        likely = fitting[-1]
        try:
            text = missing[:64].decode(errors="ignore" if len(missing) > 64 else "strict")
            tokens, exact = self._codec.encode_continuation((), text)
            if exact and tokens[0] in fitting:
                likely = tokens[0]
        except UnicodeDecodeError:  # inside a character
            pass
        return likely, tuple(token for token in fitting if token != likely)


def _after(written: bytes, reply: bytes) -> bytes | None:
    """What follows `written` in `reply`; None if it does not begin so."""
    return reply[len(written) :] if reply.startswith(written) else None


def _spelling(known: Any) -> list[bytes]:
    """The bytes that each token stands for; control tokens spell their names."""
    letters = {letter: bytes([byte]) for letter, byte in _byte_letters().items()}
    pieces = known.convert_ids_to_tokens(range(len(known)))
    if not any("▁" in piece for piece in pieces):
        return [b"".join(letters.get(c, c.encode()) for c in piece) for piece in pieces]
    return [
        bytes.fromhex(piece[3:5])
        if re.fullmatch("<0x[0-9A-F]{2}>", piece)
        else piece.replace("▁", " ").encode()
        for piece in pieces
    ]


def _reply_marker(known: Any) -> bytes:
    """What the chat template writes between the user's words and the reply."""
    if not known.chat_template:
        return b""
    messages = [{"role": "user", "content": "WORDS"}]
    text = known.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text).rpartition("WORDS")[2].strip(" ").encode()


@functools.cache
def _writer(script: str, kind: TokenizerKind, template: str | None) -> _Writer:
    return _Writer(_SCRIPTS[script], tokenizer(kind, template))


def scripted_model(
    script: Script,
    kind: TokenizerKind = "bytelevel",
    template: str | None = CHATML,
    *,
    window: int = WINDOW,
) -> tuple[Any, Any]:
    """A model that spells the replies of `script`, and its tokenizer.

    Args:
        script: from the text of a prompt to the whole reply.
        kind: as for `models.tokenizer`.
        template: the chat template; None for a member without one.
        window: positions of the model, in tokens.
    """
    name = f"{getattr(script, '__name__', 'script')}-{id(script)}"
    _SCRIPTS[name] = script  # kept for good, so that no other has its id
    known = tokenizer(kind, template)
    config = ScriptedConfig(
        script=name,
        kind=kind,
        template=template,
        vocab_size=len(known),
        max_position_embeddings=window,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.eos_token_id,
        attn_implementation="eager",
    )
    model = ScriptedForCausalLM(config).eval()
    model.generation_config.do_sample = False  # pipelines sample unless a model says otherwise
    return model, known


def scripted(
    script: Script,
    kind: TokenizerKind = "bytelevel",
    *,
    name: str = "scripted",
    template: str | None = CHATML,
    window: int = WINDOW,
) -> HuggingFaceBackend:
    """A member that writes the replies of `script`."""
    made = scripted_model(script, kind, template, window=window)
    return HuggingFaceBackend(*made, name)


def scripted_engine(
    script: Script,
    other: Script | None = None,
    *,
    window: int = WINDOW,
    **config: Any,
) -> AdaFuseEngine:
    """Two members, ``ink`` (byte-level, ChatML) and ``quill`` (SentencePiece, strictly alternating
    turns without a system role), that write the same, or `other` for the second.
    """
    members = [
        scripted(script, "bytelevel", name="ink", template=CHATML, window=window),
        scripted(other or script, "sentencepiece", name="quill", template=STRICT, window=window),
    ]
    return AdaFuseEngine(members, AdaFuseConfig(**config))


def save_scripted(
    folder: str | Path,
    script: Script,
    kind: TokenizerKind = "bytelevel",
    template: str | None = CHATML,
) -> str:
    """Save a scripted member; this process can load it from there by path, as any other model."""
    model, known = scripted_model(script, kind, template)
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return str(folder)
