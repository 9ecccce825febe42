"""Encodes the prompt of a request for every member, and checks that a response has room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.checks import check_listed
from adafuse_llm.config import ADJUSTMENTS, AdaFuseConfig
from adafuse_llm.decoding.member import MemberState, naming_member
from adafuse_llm.decoding.permits import Form
from adafuse_llm.errors import ContextWindowError, InvalidInputError, InvalidOptionError, short_repr
from adafuse_llm.grammar.grammar import NO_LEAD, ONE_SPACE, Grammar, GrammarState
from adafuse_llm.request import Checked
from adafuse_llm.text.codec import TextCodec
from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.text.reply_start import mixed_reasoning, start_replies
from adafuse_llm.text.templates import ReplyStart, check_variables
from adafuse_llm.tree.adjustment import NOTHING, Adjustment, changes_of
from adafuse_llm.tree.sampling import Sampling

logger = logging.getLogger(__name__)

BEFORE = "\n"
"""Context for `text_tokens`. At the beginning of a prompt, a text may have other tokens."""

BASE_MODELS = (
    "no member has a chat template, so they read messages as plain text (User: ...), as base "
    "models do. For answers, use instruction-tuned models"
)

Active = Sequence[tuple[Backend, float]]
"""The members that decode, with their weights."""


class Encoder:
    """Encodes prompts for the members of an engine. It logs every kind of warning only once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn_of_members(self, active: Active, config: AdaFuseConfig) -> None:
        """Warn if only some members have a chat template, or only some of them reason."""
        codecs = {backend.name: backend.codec for backend, _ in active}
        variables = _variables(active, config)
        have_template = {name: codec.has_chat_template for name, codec in codecs.items()}
        self._warn_once("templates", mixed_templates(have_template))
        self._warn_once("reasoning", mixed_reasoning(codecs, variables))

    def _warn_once(self, kind: str, warning: str | None) -> None:
        if warning and kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", warning)

    def members(
        self,
        checked: Checked,
        active: Active,
        top: int,
        seeds: Sequence[int | None] = (None,),
        *,
        to_score: bool = False,
    ) -> list[list[MemberState]]:
        """Encode the prompt, and return the states of the active members for each response.

        Args:
            checked: the request.
            active: the members that decode.
            top: number of likeliest tokens that each distribution lists.
            seeds: the seed of each response; None if nothing is drawn.
            to_score: whether the members only score texts, whose leading whitespace then counts.
        """
        conversation, config = checked.conversation, checked.config
        check_listed([backend for backend, _ in active], top)
        is_free = not to_score and config.choices is None

        # the text that the response continues; members may write its last spaces
        begun = (checked.request.prompt or "") if conversation is None else conversation.begun
        text = begun.rstrip(" ")
        spaces = len(begun) - len(text)

        # the form of the response, and the part of it that the chat templates write
        grammar = None if to_score else Grammar.of(config)
        response = None if grammar is None else grammar.text()
        starts, prefix = self._reply_starts(checked, active, response, to_score=to_score)
        if response is not None:
            response = response.begun_with(prefix)
        is_exact = bool(begun) or to_score or (grammar and grammar.begins_with_space)
        opening = Opening(spaces, is_reply=not is_exact)

        # the prompt in every member's tokens
        prompts: list[tuple[Callable[..., MemberState], Form | None]] = []
        for backend, weight in active:
            name = backend.name
            with naming_member(name):
                space_tokens = backend.space_tokens(spaces) if spaces else None
            form = None
            if grammar is not None and response is not None:
                form, space_tokens = _form(backend, grammar, response, opening, space_tokens)
            ids = _encode(backend, checked, starts.get(name), bare=bool(space_tokens))
            if conversation is None:
                self._warn_once("tokens", spelled_token(name, backend.codec, text))
                ids = ids or (sorted(backend.end_ids)[:1] if not text else [])
            if not ids:
                raise InvalidInputError(f"the prompt has no tokens for member {name!r}")
            begin = partial(
                MemberState,
                backend,
                ids,
                top,
                weight,
                limit=checked.limit,
                opening=opening,
                space_tokens=space_tokens,
                reply_prefix=prefix,
                adjustment=_adjustment(backend, config, checked.limit) if is_free else None,
            )
            prompts.append((begin, form))

        # the members' states for each response; responses share nothing that changes
        responses = []
        for seed in seeds:
            own = None if response is None else response.copy()
            sampling = None
            if seed is not None:
                sampling = Sampling(
                    seed, config.temperature, config.top_p, config.top_k, config.min_p
                )
            responses.append(
                [
                    begin(form=form.of(own) if form and own else None, sampling=sampling)
                    for begin, form in prompts
                ]
            )
        _check_windows(responses[0])
        if conversation is not None and not any(b.codec.has_chat_template for b, _ in active):
            self._warn_once("base models", BASE_MODELS)
        return responses

    def prompt_tokens(self, checked: Checked, active: Active) -> dict[str, list[int]]:
        """Return the tokens of a whole prompt, by decoding member."""
        starts, _ = self._reply_starts(checked, active, None, to_score=True)
        return {
            backend.name: _encode(backend, checked, starts.get(backend.name), bare=False)
            for backend, _ in active
        }

    def _reply_starts(
        self, checked: Checked, active: Active, response: GrammarState | None, *, to_score: bool
    ) -> tuple[dict[str, ReplyStart], str]:
        variables = _variables(active, checked.config)
        if checked.conversation is None:
            return {}, ""
        permits: Callable[[str], bool] | None = None if response is None else response.holds
        if checked.config.choices is not None and not to_score:
            permits = lambda _: False  # noqa: E731
        codecs = {backend.name: backend.codec for backend, _ in active}
        return start_replies(codecs, checked.conversation, variables, permits)


def text_tokens(backend: Backend, text: str) -> tuple[list[int], bool]:
    """Return a member's tokens for a text after other text, and whether they spell it exactly."""
    with naming_member(backend.name):
        return backend.codec.encode_continuation(backend.codec.encode_prompt(BEFORE), text)


def check_distributions(backend: Backend, option: str, config: AdaFuseConfig) -> None:
    """Refuse `option`, which needs all probabilities, if the member knows only some."""
    if not backend.knows_distributions:
        raise InvalidOptionError(
            f"option {option!r}: member {backend.name!r} lists only its likeliest tokens, so it "
            "cannot draw tokens or change their probabilities; got "
            f"{short_repr(getattr(config, option))}. Leave the member out with use=[...], or leave "
            "the option out."
        )


def check_choices(members: Sequence[MemberState], config: AdaFuseConfig) -> int:
    """Check that the choices fit limit and windows. Return how many tokens all of them have."""
    choices, is_reply = config.choices or (), members[0].opening.is_reply
    if is_reply and (spaced := [text for text in choices if text[0].isspace()]):
        raise InvalidOptionError(
            f"option 'choices': a reply to messages cannot begin with whitespace; got "
            f"{short_repr(spaced[0])}"
        )
    # a member may begin a reply with a space
    forms = (*choices, *(f" {text}" for text in choices)) if is_reply else choices
    sizes = [member.size(form) for member in members for form in forms]
    longest, limit = max(sizes), members[0].limit
    if limit < longest:
        raise InvalidOptionError(
            f"option 'max_new_tokens': the longest of the choices has {longest} tokens; got "
            f"{limit}. Allow at least {longest}."
        )
    for member in members:
        if member.window is not None and member.prompt_tokens + longest > member.window:
            raise ContextWindowError(
                f"the prompt has {member.prompt_tokens} tokens for member {member.name!r}, and the "
                f"longest of the choices has {longest}, which exceeds the context window of "
                f"{member.window}. Shorten the prompt, or leave this member out."
            )
    return sum(sizes)


def _variables(active: Active, config: AdaFuseConfig) -> Mapping[str, Any]:
    facts = {backend.name: backend.codec.template_facts for backend, _ in active}
    check_variables(variables := config.chat_template_kwargs or {}, facts)
    return variables


def _encode(
    backend: Backend, checked: Checked, start: ReplyStart | None, *, bare: bool
) -> list[int]:
    # a `bare` prompt lacks the spaces at its end
    conversation = checked.conversation
    with naming_member(backend.name):
        if conversation is not None and start is not None:
            if bare:
                conversation = conversation.with_last(conversation.begun.rstrip(" "))
            return backend.codec.encode_conversation(conversation, start)
        prompt = checked.request.prompt or ""
        return backend.codec.encode_prompt(prompt.rstrip(" ") if bare else prompt)


def _form(
    backend: Backend,
    grammar: Grammar,
    response: GrammarState,
    opening: Opening,
    space_tokens: SpaceTokens | None,
) -> tuple[Form, SpaceTokens | None]:
    # The form of a response, and the tokens that write the spaces of the prompt. If no token writes
    # them as the grammar requires, they stay in the prompt, and the second value is None.
    vocabulary = backend.grammar_vocabulary()
    if opening.spaces and space_tokens is not None:
        state = vocabulary.matcher(grammar, f'"{" " * opening.spaces}" ', response.begun)
        if vocabulary.mask(state) is not None:
            return Form(response, vocabulary, state), space_tokens
    lead = ONE_SPACE if opening.is_reply else NO_LEAD
    state = vocabulary.matcher(grammar, lead, response.begun)
    return Form(response, vocabulary, state), None


def _adjustment(backend: Backend, config: AdaFuseConfig, limit: int) -> Adjustment | None:
    # what the request does not set comes from the member's checkpoint
    changes: dict[str, Any] = {
        name: value for name in ADJUSTMENTS if (value := getattr(config, name)) is not None
    }
    if (texts := changes.pop("logit_bias", None)) is not None:
        biases = ((_encode_bias(backend, text), bias) for text, bias in texts.items())
        changes["biases"] = tuple(biases)
    adjustment = replace(backend.own_adjustment, **changes)
    if adjustment == NOTHING:
        return None
    changed = changes_of(adjustment)
    option = next(name for name in ADJUSTMENTS if name in changed or name == "logit_bias")
    check_distributions(backend, option, config)
    if adjustment.min_new_tokens > limit:
        raise InvalidOptionError(
            f"option 'min_new_tokens' must be at most max_new_tokens ({limit}); got "
            f"{adjustment.min_new_tokens}"
        )
    return replace(adjustment, end_ids=tuple(sorted(backend.end_ids)))


def _encode_bias(backend: Backend, text: str) -> tuple[int, ...]:
    ids, exact = text_tokens(backend, text)
    if not exact or not ids:
        raise InvalidOptionError(
            f"option 'logit_bias': member {backend.name!r} cannot write the text "
            f"{short_repr(text)}. Leave the text out, or leave the member out with use=[...]."
        )
    return tuple(ids)


def _check_windows(members: Sequence[MemberState]) -> None:
    full = [member for member in members if member.is_full(member.tree.root)]
    if full:
        tokens = "; ".join(
            f"the prompt has {member.prompt_tokens} tokens for member {member.name!r}, so with the "
            f"response it exceeds the context window of {member.window} tokens"
            for member in full
        )
        advice = "" if len(full) == len(members) else ", or leave these members out"
        raise ContextWindowError(f"{tokens}. Shorten the prompt{advice}.")


def spelled_token(name: str, codec: TextCodec, prompt: str) -> str | None:
    """Return a warning if a prompt spells out a control token of a member, or None."""
    token = codec.control_token_in(prompt)
    return token and (
        f"the prompt contains {token!r}, which is a control token of member {name!r}. In a prompt, "
        "it is plain text, so the member reads neither a conversation nor a gap to fill in. To "
        "send a conversation, pass messages=[...]; each member then uses its own chat template"
    )


def mixed_templates(has_template: Mapping[str, bool]) -> str | None:
    """Return a warning if some members have a chat template and others do not, or None."""
    plain = [name for name, has in has_template.items() if not has]
    others = [name for name, has in has_template.items() if has]
    if not plain or not others:
        return None
    return (
        f"only some members have a chat template: {', '.join(map(repr, others))}, but not "
        f"{', '.join(map(repr, plain))}. Members without one are usually base models. They read "
        "messages as plain text (User: ...), and often expect other answers than members with one. "
        "Use only instruction-tuned models or only base models, or leave members out with use=[...]"
    )
