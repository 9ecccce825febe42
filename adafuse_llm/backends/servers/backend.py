"""A member that an inference server runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TypeAlias

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.servers.api import Prompt, ServerApi, ServerFacts
from adafuse_llm.backends.servers.connection import Connection
from adafuse_llm.backends.vocabulary import Vocabulary
from adafuse_llm.errors import MemberError, MemberUnavailableError
from adafuse_llm.tree.adjustment import log_sum
from adafuse_llm.tree.tokens import Next, Node, TokenTree

logger = logging.getLogger(__name__)

PROBE = "The ferry leaves at nine."
PROBE_TOP = 5
PROBE_TOLERANCE = 0.5
"""To recognize the model, the member compares the `PROBE_TOP` likeliest tokens after `PROBE`. Their
log-probabilities can depend on other requests, and may differ by `PROBE_TOLERANCE` nats."""

SAMPLED = 40
"""To check the server's regular expressions, the member tries the likeliest tokens, at most this
many others that end a word, and as many that do not."""

UNEXPECTED = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""Errors that mean that an answer does not have the expected form."""

Prompts: TypeAlias = dict[tuple[int, ...], Prompt]


class ServerBackend(Backend):
    """A member that vLLM, SGLang or llama-server runs. Closing it closes the connection `server`.

    Every node is a prompt, which the server continues by one token. All prompts go to the server at
    the same time, and its prefix cache makes them cheap. After a loss of the connection, and for
    every new request, the member checks that the server still runs the same model.

    The member knows the likeliest tokens, the probabilities of given tokens and, on vLLM and
    SGLang, how likely the end of a word is. It knows no whole distribution, so it cannot restrict
    or draw tokens, or change its distributions.
    """

    is_remote = True

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        *,
        end_ids: frozenset[int],
        server: Connection,
        api: ServerApi,
        facts: ServerFacts,
    ) -> None:
        self.name = name
        self.facts = facts
        self._vocabulary = vocabulary
        self.codec = vocabulary.codec
        self.end_ids = end_ids
        self.context_window = facts.window
        self.listed_limit = facts.listed_limit
        self.parameters = facts.parameters
        self.device = f"server {server.url}"
        self._server = server
        self._api = api
        # remember a distribution, to recognize the model
        self._probe_ids = tuple(vocabulary.codec.encode_prompt(PROBE)[: facts.window])
        probe = self._probe()
        self._ask([probe])
        self._fingerprint = probe.listed
        self._word_ends = frozenset[int]()
        self._tells_word_ends: bool | None = None
        self._losses = server.losses

    @property
    def lane(self) -> str:
        return f"member {self.name}"

    @property
    def problem(self) -> str:
        return self._server.problem

    def has_word_ends(self) -> bool:
        # ask the server at the first call, and again after an error
        if self._tells_word_ends is None:
            self._tells_word_ends = self.facts.limits_tokens and self._find_word_ends()
        return bool(self._tells_word_ends)

    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        # send one prompt for every node, and a probe if there are new requests
        prompts: Prompts = {}
        counts = [self._add(query, prompts) for query in queries]
        asked = [*zip(queries, counts, strict=True)]
        new = [query.tree for query, count in asked if count and query.tree.state is None]
        probes = [self._probe()] if new else []
        self._ask([*prompts.values(), *probes])
        if self._losses < self._server.losses:  # the server may be another one
            probes.append(self._probe())
            self._ask(probes[-1:])
        # compare the answers to the probe with the answer when the member was loaded
        before = self._fingerprint
        for now in (probe.listed for probe in probes):
            shared = before.keys() & now.keys()
            if 2 * len(shared) < len(before) or any(
                abs(before[token] - now[token]) > PROBE_TOLERANCE for token in shared
            ):
                raise MemberUnavailableError(
                    self.name,
                    f"server {self._server.url} runs another model under the name "
                    f"{self.facts.model!r} now. Load the ensemble again",
                )
        self._losses = self._server.losses
        # mark the new requests as known, now that they have results
        results = [self._result(query, prompts, count) for query, count in asked]
        for tree in new:
            tree.state = self.name
        return results

    def close(self) -> None:
        self._server.close()

    def _add(self, query: Query, prompts: Prompts) -> int:
        """Add the questions of a query to `prompts`, and return how many prompts it needs."""
        # ask for distributions, and for the tokens that end a response or a word
        mine = set()
        for node in query.evaluate:
            prompt = _prompt_of(query.tree, node, prompts)
            prompt.top = max(prompt.top, min(query.top, self.facts.listed_limit))
            prompt.given |= self.end_ids
            if query.word_ends:
                prompt.word_end = True
                prompt.given |= self._word_ends
            mine.add(prompt.ids)
        # ask for the tokens to score, after their parents
        for node in query.score:
            prompt = _prompt_of(query.tree, node.parent, prompts)
            prompt.given.add(node.token)
            mine.add(prompt.ids)
        return len(mine)

    def _ask(self, prompts: Sequence[Prompt]) -> None:
        if not prompts:
            return
        try:
            with self._server.in_turn():
                self._api.evaluate(self._server, self.facts, prompts)
            for prompt in prompts:
                if lacking := prompt.given - prompt.logprobs.keys():
                    raise KeyError(min(lacking))
        except UNEXPECTED as error:
            raise self._server.error(
                f"its answer has not the expected form ({type(error).__name__}: {error})"
            ) from error

    def _result(self, query: Query, prompts: Prompts, count: int) -> QueryResult:
        # summarize the distributions, and read the scores
        summaries = []
        for node in query.evaluate:
            prompt = _prompt_of(query.tree, node, prompts)
            likely = sorted(prompt.listed.items(), key=lambda item: (-item[1], item[0]))
            tokens, logprobs = zip(*likely[: query.top], strict=True)
            ends = log_sum([prompt.logprobs[token] for token in self.end_ids])
            word_end = self._word_end(prompt) if query.word_ends else None
            summaries.append(Next(tokens, logprobs, ends, word_end_logprob=word_end))
        scores = [
            _prompt_of(query.tree, node.parent, prompts).logprobs[node.token]
            for node in query.score
        ]
        # count the tokens: the server reads the prompt once, and one token for every distribution
        read = len(query.tree.ids) - 1 if count and query.tree.state is None else 0
        return QueryResult(tuple(summaries), tuple(scores), min(count, 1), read + count)

    def _word_end(self, prompt: Prompt) -> float:
        # a regular expression changes the probability p of a permitted token to p / total
        known = {**prompt.listed, **prompt.logprobs}
        best = max(prompt.ends.keys() & known.keys(), key=prompt.ends.__getitem__)
        total = known[best] - prompt.ends[best]
        # add the tokens that end a word, but that the regular expression does not permit
        apart = [known[t] for t in self._word_ends if prompt.ends[t] == -math.inf]
        return min(0.0, log_sum([total, *apart]))

    def _find_word_ends(self) -> bool | None:
        """Return whether the server returns probabilities of word ends; None to ask again later."""
        # find the tokens that end a word, and choose those to ask for by id
        texts = self._vocabulary.token_texts
        spaces = {token for token, text in enumerate(texts) if text[:1].isspace()}
        permitted = [token for token in sorted(spaces) if texts[token][0].isascii()]
        others = [token for token, text in enumerate(texts) if text and token not in spaces]
        self._word_ends = self.end_ids | spaces.difference(permitted) | {*permitted[:1]}
        # ask for likely tokens, for some that end a word, and for some that do not
        spread = (ids[:: max(1, math.ceil(len(ids) / SAMPLED))] for ids in (permitted, others))
        sample = set(self._fingerprint).union(*spread)
        prompt = self._probe()
        prompt.given, prompt.word_end = sample | self._word_ends, True
        # check that the regular expression permits only tokens that begin with whitespace
        answer: bool | None = None
        problem = "its regular expressions do not permit those tokens that they should"
        try:
            self._ask([prompt])
            total = self._word_end(prompt)
            answer = all(
                math.isclose(
                    prompt.ends[token],
                    prompt.logprobs[token] - total if token in spaces else -math.inf,
                    abs_tol=PROBE_TOLERANCE,
                )
                for token in sample - self._word_ends
            )
        except MemberUnavailableError:
            raise
        except (MemberError, KeyError, ValueError) as error:
            problem = str(error)
        if not answer:
            logger.warning(
                "member %r cannot be used with strategy 'mixture', because server %s does not tell "
                "how likely a word ends: %s",
                self.name,
                self._server.url,
                problem,
            )
        return answer

    def _probe(self) -> Prompt:
        return Prompt(self._probe_ids, min(self.facts.listed_limit, PROBE_TOP))


def _prompt_of(tree: TokenTree, node: Node | None, prompts: Prompts) -> Prompt:
    assert node is not None, "the root has no log-probability"
    ids = (*tree.ids, *tree.tokens(node))
    return prompts.setdefault(ids, Prompt(ids))
