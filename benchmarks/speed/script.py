"""Random-weight members that write a scripted text but run their full computation.

Random-weight members rarely agree, so they cannot show how fast the engine is when members agree. A
script therefore replaces a few logits at each position of the response. All other logits and the
whole computation remain the model's own. The script depends only on the position, so a member
behaves in the same way in every system.

    sure word     the scripted token has nearly all probability
    unsure word   the first scripted token has probability 0.5, two other tokens have 0.3 and 0.15;
                  for every second unsure word, one of the members, in turns, prefers another token

The scripted text wins every round, because each member gives almost no probability to the
alternatives of the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.speed.members import Member, Members, pieces

ALTERNATIVES: Final = 2
SURE: Final = (0.98, 0.01, 0.005)
UNSURE: Final = (0.5, 0.3, 0.15)
LIFT: Final = 30.0  # far above the logits of random weights
DIGIT: Final = 256  # bfloat16 represents all whole numbers up to this one exactly

WORDS_PER_ROUND: Final = (0.53, 0.19, 0.28)
"""Default shares of the rounds that commit one, two and three words. They were measured with the
embedded members on six prompts of 100 tokens (default options, 116 rounds)."""


class Script(nn.Module):
    """The output layer of a scripted model.

    It reads the position of each token from the token's hidden state, into which `_Position` has
    written it. So the script also works if the model omits, batches or pads tokens.

    Attributes:
        tokens: the tokens whose logits the script replaces at each position, [p, c].
        logits: the new logits of these tokens, [p, c].
    """

    def __init__(self, head: nn.Module, positions: int, device: torch.device) -> None:
        super().__init__()
        self.head = head
        shape = (positions, 1 + ALTERNATIVES)
        self.tokens: Tensor
        self.logits: Tensor
        places = torch.arange(shape[1], device=device).repeat(positions, 1)
        self.register_buffer("tokens", places)
        self.register_buffer("logits", torch.full(shape, -LIFT, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits [b, n, v] of hidden states [b, n, d]."""
        logits: Tensor = self.head(hidden)
        places = (hidden[..., 0].float() * DIGIT + hidden[..., 1].float()).long()  # [b, n]
        places = places.clamp(0, len(self.tokens) - 1)
        return logits.scatter(-1, self.tokens[places], self.logits[places].to(logits.dtype))


class _Position(nn.Module):
    """The final normalization. It also writes each token's position into its hidden state."""

    def __init__(self, norm: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.positions: Tensor | None = None
        rotary.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        self.positions = inputs["position_ids"] if "position_ids" in inputs else args[1]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize hidden states [b, n, d] and write positions into the first two channels."""
        assert self.positions is not None
        places = self.positions.expand(hidden.shape[:2])  # [b, n]
        digits = torch.stack([places // DIGIT, places % DIGIT], -1).to(hidden.dtype)
        rest: Tensor = self.norm(hidden)
        return torch.cat([digits, rest[..., 2:]], -1)


def make_scripted(model: Any, positions: int) -> None:
    """Add an empty script of `positions` positions to a Llama-like model, in place."""
    model.model.norm = _Position(model.model.norm, model.model.rotary_emb)
    model.lm_head = Script(model.lm_head, positions, model.device)


def write_script(
    members: Members,
    prompt: str,
    text: str,
    words_per_round: Sequence[float] = WORDS_PER_ROUND,
    *,
    dissent: bool = True,
    seed: int = 0,
) -> list[int]:
    """Make scripted members write `text` after `prompt`.

    Args:
        members: scripted members.
        prompt: the prompt.
        text: the text that they write.
        words_per_round: shares of the rounds that commit one, two and three words.
        dissent: let one member prefer another token at every second unsure word.
        seed: seed of the unsure words and the alternatives.

    Returns:
        Number of tokens of the text for each member.
    """
    words = re.findall(r"\s*\S+", text)
    sure = list(_sureness(words_per_round, random.Random(seed)))[: len(words)]
    while len(sure) < len(words):
        sure += list(_sureness(words_per_round, random.Random(seed + len(sure))))
    lengths = []
    for index, member in enumerate(members):
        rng = random.Random(f"{seed} {index}")
        word_tokens = [i for i, t in enumerate(pieces(member.tokenizer)) if t and t.isalpha()]
        ids = member.encode(prompt)
        place = start = len(ids) - 1  # the position whose logits predict the next token
        unsure = 0
        for word, is_sure in zip(words, sure, strict=False):
            tokens = member.backend.codec.encode_continuation(ids, word)[0]
            for nth, token in enumerate(tokens):
                others = rng.sample([i for i in word_tokens if i != token], ALTERNATIVES)
                choices = [token, *others]
                shares = SURE if is_sure or nth else UNSURE
                if shares is UNSURE:
                    unsure += 1
                    if dissent and unsure % 2 and (unsure // 2) % len(members) == index:
                        choices[:2] = choices[1::-1]
                _set_logits(member, place, choices, shares)
                place += 1
            ids += tokens
        lengths.append(place - start)
    return lengths


def _set_logits(member: Member, place: int, tokens: Sequence[int], shares: Sequence[float]) -> None:
    script: Script = member.model.lm_head
    script.tokens[place] = torch.tensor(tokens, device=script.tokens.device)
    logs = torch.tensor(shares).log() + LIFT
    script.logits[place] = logs.to(script.logits.device)


def _sureness(words_per_round: Sequence[float], rng: random.Random) -> Iterator[bool]:
    """Yield whether the members are sure of each word.

    A round that commits less than the maximum number of words ends with an unsure word.
    """
    most = len(words_per_round)
    for words in rng.choices(range(1, most + 1), words_per_round, k=64):
        yield from [True] * (words - 1)
        yield words == most
