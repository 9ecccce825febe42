"""The alternatives that the engine is compared with, implemented from their descriptions.

All of them run the members' own transformers models. They share only one piece of code
with the engine: the encoding of prompts and continuations.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from adafuse_llm import AdaFuseEngine, Generation
from benchmarks.speed.measure import Outcome
from benchmarks.speed.members import Member, Members, pieces

# The engine itself ----------------------------------------------------------------------------


def outcome_of(generation: Generation) -> Outcome:
    """Convert a generation to an outcome, with the engine's own counts."""
    usage = generation.usage
    return Outcome(
        generation.text,
        usage.completion_tokens,
        usage.forward_passes,
        usage.tokens_processed,
        usage.prompt_tokens,
    )


def run_engine(engine: AdaFuseEngine, prompt: str, tokens: int) -> Outcome:
    """Run the engine once. The part ``per word`` is the time per word after the first event."""
    started = first_words = None
    for event in engine.stream(prompt, max_new_tokens=tokens):
        if started is None:
            started, first_words = time.perf_counter(), len(event.text.split())
    assert event.generation is not None
    assert started is not None
    assert first_words is not None
    words = len(event.generation.text.split()) - first_words
    per_word = (time.perf_counter() - started) / max(1, words)
    return replace(outcome_of(event.generation), parts={"per word": per_word})


def add_up(outcomes: Sequence[Outcome]) -> Outcome:
    """Combine many outcomes into one: join their texts with line breaks and add their counts."""

    def total(field: str) -> dict[str, int]:
        names = outcomes[0].tokens
        return {name: sum(getattr(each, field)[name] for each in outcomes) for name in names}

    return Outcome(
        "\n".join(each.text for each in outcomes),
        total("tokens"),
        total("passes"),
        total("processed"),
        total("prompt"),
    )


# The members alone ----------------------------------------------------------------------------


@torch.inference_mode()
def run_generate(
    members: Members, prompts: Sequence[Sequence[int]], tokens: Sequence[int], **options: Any
) -> Outcome:
    """Run the greedy ``generate()`` of each member, with its cache, one member after the other.

    Args:
        members: the members.
        prompts: the prompt in each member's tokens.
        tokens: exact number of tokens that each member generates.
        options: further options of ``generate()``.
    """
    texts, parts, counts = [], {}, {}
    for member, prompt, new in zip(members, prompts, tokens, strict=True):
        member.meter.read()
        start = time.perf_counter()
        ids = torch.tensor([list(prompt)], device=member.model.device)
        output = _generate(member.model, ids, new, **options)[0, len(prompt) :].tolist()
        parts[member.name] = time.perf_counter() - start
        assert len(output) == new, f"generate() ended after {len(output)} of {new} tokens"
        counts[member.name] = member.meter.read()
        texts.append(member.tokenizer.decode(output))
    names = [member.name for member in members]
    return Outcome(
        texts[0],
        dict(zip(names, tokens, strict=True)),
        {name: passes for name, (passes, _) in counts.items()},
        {name: processed for name, (_, processed) in counts.items()},
        {name: len(prompt) for name, prompt in zip(names, prompts, strict=True)},
        parts,
    )


def _generate(model: Any, ids: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
    output: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        **options,
    )
    return output


# The paper's script ---------------------------------------------------------------------------


class PaperLoop:
    """The loop of the paper's published script, without a cache between calls.

    A round works as follows:

    1. Each member reads the text so far and computes its margin: the difference between the
       probabilities of its two likeliest next tokens. The member is sure if the margin is at least
       the threshold.
    2. The member generates ``GROWN`` greedy tokens with one call of ``generate()``, which uses a
       cache only within the call. The first word of the result is the member's candidate. If the
       member is unsure and B > 1, it instead makes one such call from each of its B likeliest first
       tokens and has one candidate from each call.
    3. If the member is sure, it adds further words of the same call to its candidate, up to
       ``max_words``. Before it adds a word, it reads the text and the candidate again, and it stops
       if it is now unsure.
    4. Every member reads the text with each candidate and computes the mean negative log-likelihood
       of the tokens that the candidate adds.
    5. The candidate with the lowest sum of these means wins. Words are joined with one space.

    Each reading is a forward pass over all tokens, without a cache. Candidates with the same text
    are scored only once, which favors the loop.

    Args:
        members: the members.
        branches: the branching factor B.
        threshold: the threshold τ of the margin.
        max_words: the maximum number of words M in a candidate.
    """

    GROWN = 10

    def __init__(
        self, members: Members, branches: int, threshold: float = 0.7, max_words: int = 3
    ) -> None:
        self.members = members
        self.branches = branches
        self.threshold = threshold
        self.max_words = max_words

    def run(self, prompt: str, rounds: int) -> Outcome:
        """Run some rounds. The parts of the outcome are the durations of the rounds in seconds."""
        for member in self.members:
            member.meter.read()
        text, parts = prompt, {}
        for index in range(rounds):
            start = time.perf_counter()
            text = self.round(text)
            parts[f"round {index}"] = time.perf_counter() - start
        counts = {member.name: member.meter.read() for member in self.members}
        lengths = {m.name: (len(m.encode(prompt)), len(m.encode(text))) for m in self.members}
        return Outcome(
            text[len(prompt) :],
            {name: whole - before for name, (before, whole) in lengths.items()},
            {name: passes for name, (passes, _) in counts.items()},
            {name: processed for name, (_, processed) in counts.items()},
            {name: before for name, (before, _) in lengths.items()},
            parts,
        )

    @torch.inference_mode()
    def round(self, text: str) -> str:
        """Run one round and return the text with the winning candidate at its end."""
        candidates: dict[str, None] = {}
        for member in self.members:
            candidates.update(dict.fromkeys(self._propose(member, text)))
        scores = {
            span: sum(self._score(member, text, span) for member in self.members)
            for span in candidates
        }
        return f"{text} {min(scores, key=scores.__getitem__)}" if scores else text

    def _propose(self, member: Member, text: str) -> list[str]:
        ids = member.encode(text)
        margin, likeliest = self._confidence(member, ids)
        sure = margin >= self.threshold
        starts: list[list[int]] = [[]]
        if not sure and self.branches > 1:
            starts = [[token] for token in likeliest]
        grown = [self._grow(member, ids, start) for start in starts]
        spans = [words[:1] for words in grown if words]
        for word in grown[0][1 : self.max_words] if sure else ():
            span = " ".join(spans[0])
            if self._confidence(member, member.encode(f"{text} {span}"))[0] < self.threshold:
                break
            spans[0].append(word)
        return [" ".join(span) for span in spans]

    def _confidence(self, member: Member, ids: list[int]) -> tuple[float, list[int]]:
        probabilities = self._read(member, ids)[-1].softmax(-1)
        values, tokens = probabilities.topk(max(2, self.branches))
        return float(values[0] - values[1]), tokens[: self.branches].tolist()

    def _grow(self, member: Member, ids: list[int], start: list[int]) -> list[str]:
        whole = torch.tensor([[*ids, *start]])
        output = _generate(member.model, whole, self.GROWN - len(start))[0, len(ids) :]
        text = member.tokenizer.decode(output, skip_special_tokens=True)
        return str(text).split()

    def _score(self, member: Member, text: str, span: str) -> float:
        before = len(member.encode(text))
        ids = member.encode(f"{text} {span}")
        logprobs = self._read(member, ids).log_softmax(-1)[before - 1 : -1]
        chosen = logprobs.gather(-1, torch.tensor(ids[before:])[:, None])
        return -float(chosen.mean())

    def _read(self, member: Member, ids: list[int]) -> torch.Tensor:
        """Compute the logits after every token, [n, v]."""
        logits: torch.Tensor = member.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits


# Ensembles of single tokens -------------------------------------------------------------------


class TokenByToken(ABC):
    """An ensemble that commits one token's text at a time, with a cache for each member.

    Each step fuses the members' next-token distributions and chooses a text. Each member then reads
    the text in its own tokens. If exactly one token of its vocabulary has this text, the member
    reads this token. Otherwise it reads the encoding of the text as a continuation; this encoding
    is computed once and then reused. A step takes one forward pass of each member.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.texts = [pieces(member.tokenizer) for member in members]
        self.ids: list[dict[str, list[int]]] = []
        for texts in self.texts:
            counts = Counter(texts)  # if several tokens have the same text, `encode` decides
            self.ids.append(
                {text: [i] for i, text in enumerate(texts) if text and counts[text] == 1}
            )

    @abstractmethod
    def choose(self, logits: Sequence[torch.Tensor]) -> str:
        """Choose the text to commit. The next-token logits of each member have the shape [v_k]."""

    @torch.inference_mode()
    def run(self, prompt: str, size: int) -> Outcome:
        """Write a response of at least `size` bytes."""
        for member in self.members:
            member.meter.read()
        caches = [DynamicCache(config=member.model.config) for member in self.members]
        unread = [member.encode(prompt) for member in self.members]
        lengths = [len(ids) for ids in unread]
        new = [0] * len(unread)
        text = ""
        while True:
            logits = [
                member.model(
                    torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1
                ).logits[0, -1]
                for member, ids, cache in zip(self.members, unread, caches, strict=True)
            ]
            piece = self.choose(logits)
            text += piece
            unread = [self.encode(index, piece) for index in range(len(self.members))]
            new = [count + len(ids) for count, ids in zip(new, unread, strict=True)]
            if len(text.encode()) >= size:
                break
        names = [member.name for member in self.members]
        counts = [member.meter.read() for member in self.members]
        return Outcome(
            text,
            dict(zip(names, new, strict=True)),
            {name: passes for name, (passes, _) in zip(names, counts, strict=True)},
            {name: processed for name, (_, processed) in zip(names, counts, strict=True)},
            dict(zip(names, lengths, strict=True)),
        )

    def encode(self, index: int, text: str) -> list[int]:
        """Encode a text that is part of the response in a member's tokens."""
        known = self.ids[index]
        if text not in known:
            member = self.members[index]
            anchor = member.encode("a")
            known[text] = member.backend.codec.encode_continuation(anchor, text)[0]
        return known[text]


class UniTE(TokenByToken):
    """UniTE: the union of each member's ``TOP`` likeliest tokens, by text.

    Each member gives a text the probability of the first token with which the member reads this
    text. For each member, these probabilities are normalized over the union. Then they are averaged
    over the members, and the likeliest text wins.
    """

    TOP = 10

    def choose(self, logits: Sequence[torch.Tensor]) -> str:
        union: dict[str, None] = {}
        for texts, row in zip(self.texts, logits, strict=True):
            likeliest = (texts[token] for token in row.topk(self.TOP).indices.tolist())
            union.update(dict.fromkeys(text for text in likeliest if text is not None))
        fused = torch.zeros(len(union))
        for index, row in enumerate(logits):
            fused += row[[self.encode(index, text)[0] for text in union]].softmax(-1)
        return list(union)[int(fused.argmax())]


class GaC(TokenByToken):
    """GaC: the sum of the members' full distributions over the union of their vocabularies."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.union = list(dict.fromkeys(text for texts in self.texts for text in texts if text))
        place = {text: index for index, text in enumerate(self.union)}
        self.columns = [  # tokens without a text share one extra column
            torch.tensor([place[text] if text else len(place) for text in texts])
            for texts in self.texts
        ]

    def choose(self, logits: Sequence[torch.Tensor]) -> str:
        fused = torch.zeros(len(self.union) + 1)
        for columns, row in zip(self.columns, logits, strict=True):
            fused.index_add_(0, columns, row[: len(columns)].softmax(-1))
        return self.union[int(fused[:-1].argmax())]


TOKEN_BY_TOKEN: dict[str, Callable[[Members], TokenByToken]] = {
    "UniTE, cached": UniTE,
    "GaC, cached": GaC,
}
