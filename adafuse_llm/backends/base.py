"""The interface between the algorithm and a model."""

from __future__ import annotations

import functools
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adafuse_llm.config import GRAMMARS
from adafuse_llm.errors import GrammarError
from adafuse_llm.grammar.grammar import GrammarVocabulary
from adafuse_llm.grammar.matchers import llguidance
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.text.opening import SpaceTokens
from adafuse_llm.tree.adjustment import NOTHING, Adjustment
from adafuse_llm.tree.tokens import Next, Node, TokenTree

_reading_vocabulary = threading.Lock()


@dataclass(frozen=True, slots=True)
class Query:
    """What an engine asks a backend about the nodes of one tree.

    Attributes:
        tree: the request's tree at this member.
        evaluate: nodes, in any order, after which the backend returns next-token distributions. It
            may have to evaluate their ancestors first.
        score: nodes whose tokens need log-probabilities, conditional on the tokens before them.
            Their parents need not be in `evaluate`.
        top: number of likeliest tokens in every `Next` of the result, at least two.
        word_ends: whether every `Next` must have ``Next.word_end_logprob``.
    """

    tree: TokenTree
    evaluate: tuple[Node, ...]
    score: tuple[Node, ...]
    top: int
    word_ends: bool = False


@dataclass(frozen=True, slots=True)
class QueryResult:
    """A backend's answer to one query.

    Attributes:
        next: a summary of the next-token distribution after each node, in the order of
            ``Query.evaluate``.
        logprobs: the natural logarithm of the probability of each node's token, in the order of
            ``Query.score``. It may be minus infinity.
        passes: number of forward passes that the query took part in.
        tokens: number of tokens that the backend processed for the query.
        reused: number of committed tokens that the backend had processed for other requests.
    """

    next: tuple[Next, ...]
    logprobs: tuple[float, ...]
    passes: int
    tokens: int
    reused: int = 0

    @property
    def has_nan(self) -> bool:
        """Whether any log-probability in the result is NaN."""
        summaries = (value for summary in self.next for value in summary.values)
        return any(map(math.isnan, (*summaries, *self.logprobs)))


class Backend(ABC):
    """A member of an ensemble. Subclasses set `name`, `codec` and `end_ids`, and define `evaluate`.

    - `evaluate` answers queries about nodes of token trees.
    - `read_piece` reads a part of a long prompt, between the queries of other requests.
    - `release` forgets a request, and `close` frees everything.
    - `cache_bytes` and `free_bytes` measure memory, which limits how many requests run at a time.
    - `token_texts`, `has_word_ends` and `grammar_tokenizer` describe the tokens for masks, grammars
      and some strategies.

    A member without any state, which computes each distribution from the whole text before it:

    >>> from adafuse_llm.backends import FakeBackend, Query, TokenTree
    >>> member = FakeBackend("wren", lambda text: {"a": 0.9, "<end>": 0.1})
    >>> tree = TokenTree(member.codec.encode_prompt("b"))
    >>> member.evaluate([Query(tree, evaluate=(tree.root,), score=(), top=2)])[0].next[0].tokens
    (2, 0)

    The tree holds everything that a backend needs: ``tree.ids`` are the committed tokens, and
    ``tree.tokens(node)`` the tokens after these, up to `node`. A backend may keep a state for each
    request in ``TokenTree.state``. If ``tree.root`` has moved since the last query, the engine has
    committed a span, and the tree has dropped every node that is not below the new root.

    An engine calls `evaluate`, `release` and `read_piece` from one thread at a time. A backend that
    several engines share must synchronize these calls.

    Attributes:
        name: name of the member in results and errors, unique within an engine.
        codec: converts text to tokens and tokens to text.
        end_ids: token ids that end a response.
        context_window: maximum number of tokens in a sequence, prompt included; None for no limit.
        knows_distributions: whether the member knows the probability of every token. If so, it

            - lists in `Next` only tokens that ``Node.allowed`` permits, and sets ``Next.mass``;
            - sets ``Next.drawn`` for every node with a ``Node.draw``
              (:mod:`adafuse_llm.tree.sampling`);
            - applies ``TokenTree.changes`` to the logits after a node before it computes anything
              from them (:mod:`adafuse_llm.tree.adjustment`).

            `adafuse_llm.backends.answered` does all three. For other members, such as those on
            servers, an engine refuses the options that need this.
        listed_limit: maximum number of likeliest tokens in a summary; None for no limit.
        parameters: number of the model's parameters, by which `Mixture` weighs members; None if
            unknown.
        own_adjustment: the changes of distributions that the member's checkpoint sets. Options of a
            request replace them.
        device: what the member computes on, such as ``"cpu"``, ``"cuda:0"`` or the URL of a server.
        is_remote: whether the member computes outside this process.
        cache_limit: size, in bytes, of the cache that the member allocated for all requests when
            it was loaded. None if the cache grows with the requests.
        token_cost: time that each further token adds to a pass, as a share, from 0 to 1, of the
            time of a pass over one token. Transformers and GGUF members measure it when they are
            loaded. If it is high, the engine drafts fewer tokens; results stay the same.
    """

    name: str
    codec: TextCodec
    end_ids: frozenset[int]
    context_window: int | None = None
    knows_distributions: bool = False
    listed_limit: int | None = None
    parameters: int | None = None
    own_adjustment: Adjustment = NOTHING
    device: str = "unknown"
    is_remote: bool = False
    cache_limit: int | None = None
    token_cost: float = 0.02

    @abstractmethod
    def evaluate(self, queries: Sequence[Query]) -> list[QueryResult]:
        """Return one result for each query, in order. Queries may belong to different requests.

        At best, a backend runs one forward pass for all queries, over the nodes that it has not
        evaluated yet.

        Raises:
            Exception: any type. Unless it is a `MemberUnavailableError`, the engine repeats each
                query in its own call, and raises a `MemberError` if one fails again. An invalid
                result, such as a NaN, counts as a failure. So a backend must not cache anything
                from a result that contains NaN.
        """

    def release(self, tree: TokenTree) -> None:
        """After a request has ended, free what ``tree.state`` holds, and set the state to None.

        The engine may release a tree that had no query, and may release a tree twice.
        """
        tree.state = None

    def read_piece(self, trees: Sequence[TokenTree]) -> list[bool]:
        """Process a piece of prompts: some committed tokens that the member has not processed yet.

        A piece may have tokens of several trees. Between two pieces, an engine evaluates queries of
        other requests, and it reads no further piece for a cancelled request.

        Returns:
            For each tree, whether `evaluate` can process the rest of the prompt together with the
            nodes. By default, it always can.

        Raises:
            Exception: as for `evaluate`.
        """
        return [True] * len(trees)

    def close(self) -> None:
        """Free all resources. When an engine closes, it also closes the members that it loaded."""
        return

    @property
    def lane(self) -> str:
        """The member's lane (default: its device). Members of one lane share a thread."""
        return self.device

    @property
    def problem(self) -> str:
        """Why the member does not answer at the moment; "" if it answers, or if this is unknown."""
        return ""

    def cache_bytes(self, tokens: int) -> int:  # noqa: ARG002
        """Return the cache size, in bytes, of a request with sequences of up to `tokens` tokens.

        A request waits until its caches fit into the memory.
        """
        return 0

    def free_bytes(self) -> int:
        """Return the free memory of the device, in bytes."""
        return sys.maxsize

    def has_word_ends(self) -> bool:
        """Return whether the member sets ``Next.word_end_logprob`` if a query asks for it.

        By default, it does if `knows_distributions` is set and its class defines `token_texts`.
        """
        return self.knows_distributions and type(self).token_texts is not Backend.token_texts

    @property
    def token_texts(self) -> Sequence[str] | None:
        """By token id, the text that a token adds when it does not begin the text.

        U+FFFD stands for an incomplete character, and an empty text for an id without a token. If
        the property is None, the engine never restricts this member's tokens, and encodes a prompt
        with the spaces at its end, which other members write themselves.
        """
        return None

    @property
    def follows_grammars(self) -> bool:
        """Whether the member's tokens can follow a grammar."""
        return False

    def grammar_tokenizer(self) -> Any:
        """Return an ``llguidance.LLTokenizer`` with the member's tokens. This is called only once.

        Raises:
            Exception: llguidance cannot read the tokens.
        """
        raise NotImplementedError("it has no method 'grammar_tokenizer'")

    @functools.cached_property
    def _space_tokens(self) -> SpaceTokens:
        return SpaceTokens(self.token_texts or (), self.end_ids)

    def space_tokens(self, spaces: int) -> SpaceTokens | None:
        """Return the member's tokens that begin with spaces.

        The result is None if they cannot write `spaces` spaces, for example without `token_texts`.
        """
        return self._space_tokens if self._space_tokens.can_write(spaces) else None

    def grammar_vocabulary(self) -> GrammarVocabulary:
        """Return the member's tokens in the form that grammars need. The first call takes long.

        Raises:
            GrammarError: the member's tokens cannot follow a grammar.
            MissingDependencyError: llguidance is not installed.
        """
        llguidance()  # raises an error if it is not installed
        vocabulary = self.__dict__.get("_grammar_vocabulary")
        if vocabulary is None:
            with _reading_vocabulary:
                vocabulary = self._grammar_vocabulary
        if isinstance(vocabulary, str):
            raise GrammarError(
                f"member {self.name!r} cannot follow {', '.join(GRAMMARS[:-1])} or {GRAMMARS[-1]} "
                f"({vocabulary}). Leave it out with use=[...], or use choices."
            )
        return vocabulary

    @functools.cached_property
    def _grammar_vocabulary(self) -> GrammarVocabulary | str:
        """The member's tokens in the form that grammars need, or why they cannot follow one."""
        if not self.follows_grammars:
            if self.is_remote:
                return "it runs on a server"
            return "the bytes of its tokens are unknown"
        try:
            tokenizer, texts = self.grammar_tokenizer(), self.token_texts or ()
            return GrammarVocabulary(self.name, tokenizer, texts, self.end_ids)
        except Exception as error:
            return f"{error}" or type(error).__name__
