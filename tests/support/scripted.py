"""Members that write what a script says, in the tokens of real tokenizers.

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
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends import Backend, Query, QueryResult, answered
from adafuse_llm.backends.huggingface.vocabulary import HuggingFaceVocabulary
from tests.support.models import CHATML, STRICT, TokenizerKind, byte_letters, tokenizer

Script = Callable[[str], str]

CUES = re.compile(rb"(?m)^[ \t]*(?:\w+ )?(?:Answer|Assistant|Response|Output|AI|A):")
"""What a plain prompt ends in, but for whitespace, where it asks for a reply."""

SURE, ELSEWHERE = 0.9, 0.05
"""Probability of the next token, and of other tokens that the reply could go on with together."""

WINDOW = 8192
"""Positions of a member, in tokens."""


class Scripted(Backend):
    """A member with a tokenizer of transformers that writes the replies of a script."""

    knows_distributions = True
    device = "cpu"

    def __init__(self, script: Script, known: Any, name: str, window: int = WINDOW) -> None:
        self.name, self.context_window = name, window
        self.end_ids = frozenset({int(known.eos_token_id)})
        self._text = HuggingFaceVocabulary(known)
        self.codec = self._text.codec
        self._ask = functools.cache(lambda prompt: script(prompt.decode(errors="replace")).encode())
        self._marker = _reply_marker(known)
        self._pieces = _spelling(known)
        self._tokens: dict[bytes, list[int]] = {}
        special = {*known.all_special_ids, *known.added_tokens_decoder}
        for token, piece in enumerate(self._pieces):
            if piece and token not in special:
                self._tokens.setdefault(piece, []).append(token)
        self._longest = max(map(len, self._tokens))
        self._logits = functools.lru_cache(4096)(self._compute)

    @property
    def token_texts(self) -> Sequence[str]:
        return self._text.token_texts

    @property
    def follows_grammars(self) -> bool:
        return self._text.follows_grammars

    def grammar_tokenizer(self) -> Any:
        return self._text.grammar_tokenizer(len(self._pieces), self.end_ids)

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        return [answered(self, query, self._logits) for query in queries]

    def _compute(self, ids: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Logits after `ids`, [v]: logarithms of probabilities."""
        missing = self._missing(b"".join([self._pieces[token] for token in ids]))
        sizes = range(1, min(self._longest, len(missing)) + 1)
        fitting = [token for size in sizes for token in self._tokens.get(missing[:size], ())]
        *others, likely = fitting or self.end_ids
        rest = 1 - SURE - (ELSEWHERE if others else 0)
        chances = np.full(len(self._pieces), rest / (len(self._pieces) - 1 - len(others)))
        chances[others] = ELSEWHERE / max(len(others), 1)
        chances[likely] = SURE
        return np.log(chances)

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


def _after(written: bytes, reply: bytes) -> bytes | None:
    """What follows `written` in `reply`; None if it does not begin so."""
    return reply[len(written) :] if reply.startswith(written) else None


def _spelling(known: Any) -> list[bytes]:
    """The bytes that each token stands for; control tokens spell their names."""
    pieces = known.convert_ids_to_tokens(range(len(known)))
    if not any("▁" in piece for piece in pieces):
        letters = {letter: bytes([byte]) for letter, byte in byte_letters().items()}
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


def scripted(
    script: Script,
    kind: TokenizerKind = "bytelevel",
    *,
    name: str = "scripted",
    template: str | None = CHATML,
    window: int = WINDOW,
) -> Scripted:
    """A member that writes the replies of `script`. `kind` is as for `models.tokenizer`."""
    return Scripted(script, tokenizer(kind, template), name, window)


def scripted_engine(script: Script, *, window: int = WINDOW, **config: Any) -> AdaFuseEngine:
    """Two members, ``ink`` (byte-level, ChatML) and ``quill`` (SentencePiece, strictly alternating
    turns without a system role), that write the same.
    """
    members = [
        scripted(script, "bytelevel", name="ink", template=CHATML, window=window),
        scripted(script, "sentencepiece", name="quill", template=STRICT, window=window),
    ]
    return AdaFuseEngine(members, AdaFuseConfig(**config))
