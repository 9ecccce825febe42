"""DeePEn: whole distributions, averaged over the tokens that all vocabularies share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from typing_extensions import override

from adafuse_llm import AdaFuseConfig, InvalidInputError
from adafuse_llm.backends import Backend, is_allowed
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.strategies import (
    MemberState,
    PlayRound,
    RoundOutcome,
    Steps,
    Strategy,
    StrategyContext,
    choose_best,
    in_lockstep,
    to_result,
)
from benchmarks.peers.gac import distribution
from benchmarks.peers.token_level import LISTED, first_logprobs, offer, offer_tokens, union

SHARPNESS = 100.0
"""Inverse temperature of the softmax over anchors."""

COOLING, COOLEST = 10, 0.25
"""Within `COOLING` steps, the learning rate falls along a cosine to `COOLEST` times its initial
value."""


@dataclass(frozen=True)
class DeePEn(Strategy):
    """The members' whole distributions, averaged over anchors (arXiv 2404.12715).

    Anchors are the tokens that all vocabularies share. A vector represents each token of a member:
    the cosines between its input embedding and those of the anchors, normalized to length one. A
    sharp softmax turns it into a distribution over the anchors, and a member's distribution over
    tokens into one over anchors. These are averaged. The first member moves its own distribution
    toward the average by a few steps of gradient descent. The likeliest token after these steps is
    committed. If the first member's likeliest token ends the response before these steps, the
    response ends without them.

    The score is -log of the token's probability after these steps. The NLL of a member is -log of
    the probability that it gives to its own first token for the text, in nats.

    Cost: one pass per member for each committed token, and matrix products. A running request keeps
    a matrix for each member that takes 4 bytes times the vocabulary size times the number of
    anchors; requests of the same members share it.

    Args:
        steps: number of steps of gradient descent.
        rate: learning rate. The source tunes it for each task. The default is its example.
    """

    steps: int = 5
    rate: float = 0.15

    options = frozenset({"weights"})

    @property
    @override
    def name(self) -> str:
        return "deepen" if self.rate == 0.15 else f"deepen-{self.rate:g}"

    @override
    def check(self, members: Sequence[Backend]) -> None:
        if lacking := [m.name for m in members if not isinstance(m, HuggingFaceBackend)]:
            raise InvalidInputError(
                f"strategy {self.name!r} needs embeddings, so members must be transformers models; "
                f"leave out {', '.join(lacking)}"
            )
        if not (shared := _shared(members)):
            raise InvalidInputError(f"strategy {self.name!r} needs tokens that all members share")
        if _cached.get("last", ([], []))[0] == list(members):
            return
        hugging = [each for each in members if isinstance(each, HuggingFaceBackend)]
        needed = sum(4 * each.vocabulary_size * len(shared) for each in hugging)
        free = sum({each.device: each.free_bytes() for each in hugging}.values())
        if needed > free:
            raise InvalidInputError(
                f"strategy {self.name!r} needs {needed / 1e9:.1f} GB of memory for the "
                f"{len(shared)} tokens that the members share, and {free / 1e9:.1f} GB are free"
            )

    @override
    def top(self, config: AdaFuseConfig) -> int:
        return LISTED

    @override
    def begin(self, context: StrategyContext) -> PlayRound:
        return partial(self._play, context.members, _matrices([m.backend for m in context.members]))

    def _play(
        self, members: Sequence[MemberState], matrices: Sequence[torch.Tensor]
    ) -> Steps[RoundOutcome]:
        main, *others = members
        offers = yield from in_lockstep([offer(member, LISTED) for member in members])
        likeliest = main.next(main.tree.root)
        token, logprob = likeliest.tokens[0], likeliest.logprobs[0]
        if token not in main.end_ids:
            token, logprob = self._fuse(members, matrices)
        chosen = yield from offer_tokens(main, [token])
        pool, margins = union([main, *others], [chosen, *offers[1:]])
        del pool.candidates[1:]
        logprobs = yield from first_logprobs(members, pool)
        nll = [0.0 - each[0] for each in logprobs]
        scored = to_result(pool.candidates[0], members, nll, 0.0 - logprob)
        return choose_best(pool, [scored], margins)

    def _fuse(
        self, members: Sequence[MemberState], matrices: Sequence[torch.Tensor]
    ) -> tuple[int, float]:
        """Return the first member's likeliest token after the steps, and its log-probability."""
        own = [
            torch.from_numpy(distribution(member)).to(matrix)
            for member, matrix in zip(members, matrices, strict=True)
        ]
        total = math.fsum(member.weight for member in members)
        target = sum(
            member.weight / total * (each.exp() @ matrix).to(own[0])
            for member, each, matrix in zip(members, own, matrices, strict=True)
        )
        assert isinstance(target, torch.Tensor)
        logprobs = self._moved(own[0], matrices[0], target)
        allowed = members[0].tree.root.allowed
        for token in logprobs.argsort(descending=True, stable=True).tolist():
            if allowed is None or is_allowed(allowed, token):
                return token, float(logprobs[token])
        raise AssertionError("some token may follow")

    def _moved(
        self, logits: torch.Tensor, matrix: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Move a distribution over tokens toward a target over anchors, and return its logs."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            moved = logits.clone().requires_grad_()
            optimizer = torch.optim.AdamW([moved], lr=self.rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=COOLING, eta_min=self.rate * COOLEST
            )
            smallest = torch.finfo(logits.dtype).tiny
            for _ in range(self.steps):
                relative = (moved.softmax(-1) @ matrix).clamp_min(smallest)
                optimizer.zero_grad()
                loss = torch.nn.functional.kl_div(relative.log(), target, reduction="sum")
                (loss / len(target)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        return moved.detach().log_softmax(-1)


_cached: dict[str, tuple[list[Backend], list[torch.Tensor]]] = {}
"""The matrices of the last ensemble, under the key ``last``."""


def _matrices(members: Sequence[Backend]) -> list[torch.Tensor]:
    """Return the matrix of each member, [vocabulary, anchors], whose rows are distributions."""
    known, matrices = _cached.get("last", ([], []))
    if known != list(members):
        shared = _shared(members)
        matrices = [_matrix(each, [spellings(each)[text] for text in shared]) for each in members]
        _cached["last"] = list(members), matrices
    return matrices


@torch.no_grad()
def _matrix(member: Backend, anchors: Sequence[int]) -> torch.Tensor:
    assert isinstance(member, HuggingFaceBackend)
    weight = member.model.get_input_embeddings().weight.detach()
    weight = weight if weight.dtype == torch.float64 else weight.float()
    rows = torch.nn.functional.normalize(weight, dim=-1)
    chosen = rows[torch.tensor(anchors, device=rows.device)]
    return torch.cat(
        [
            torch.softmax(torch.nn.functional.normalize(part @ chosen.T, dim=-1) * SHARPNESS, -1)
            for part in torch.split(rows, 1024)
        ]
    )


def spellings(member: Backend) -> dict[str, int]:
    """Return the token ids of a member by a spelling that is the same in every member.

    Tokenizers mark a space with U+0120 or with U+2581. Here, all spellings use U+2581. If two
    tokens get the same spelling, it stands for the token with the lower id.
    """
    assert isinstance(member, HuggingFaceBackend)
    known = sorted(member.tokenizer.get_vocab().items(), key=lambda item: -item[1])
    size = member.vocabulary_size
    return {text.replace("\u0120", "\u2581"): token for text, token in known if token < size}


def _shared(members: Sequence[Backend]) -> list[str]:
    """Return the spellings of the tokens that all members share, sorted."""
    first, *others = [spellings(member).keys() for member in members]
    return sorted(set(first).intersection(*others))
