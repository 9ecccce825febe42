"""The fields of requests that this server does not have, and what becomes of each.

Clients send fields of OpenAI's own service and of other servers. A field that could change an
answer is ignored with a warning, or refused by a strict server. A field that determines the form of
an answer is always refused, because the client could not read the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import nearest, short_repr
from adafuse_llm.option_errors import NOT_SUPPORTED
from adafuse_llm.serving.errors import invalid
from adafuse_llm.wire import EXTENSION

WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("cache_prompt", "cache_salt", "id_slot", "keep_alive", "request_id"),
        *("max_tool_calls", "spaces_between_special_tokens"),
    )
)
"""Fields that promise nothing about the answer: names of users, caches, speed."""

NO_TOOLS = "this server has no tools of its own"
NO_STORE = "this server stores nothing"
SEND_ALL = f"{NO_STORE}. Send the whole conversation in 'input'"
NO_IDS = "token ids differ between members"
OTHER_GRAMMAR = "its dialect differs from Lark. Send {'adafuse': {'grammar': ...}}"

IGNORED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    # vLLM
    "add_special_tokens": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    # llama.cpp
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "repeat_last_n"), (0,)),
    **dict.fromkeys(("dry_allowed_length", "dry_base", "dry_penalty_last_n", "lora"), ()),
    **dict.fromkeys(("dry_sequence_breakers", "samplers"), ()),
    **dict.fromkeys(("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold"), ()),
    **dict.fromkeys(("min_keep", "n_discard", "n_indent", "n_keep", "n_probs"), (0,)),
    **dict.fromkeys(("parse_tool_calls", "reasoning_format", "thinking_forced_open"), ()),
    **dict.fromkeys(("post_sampling_probs", "return_progress", "return_tokens"), (False,)),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typical_p"), (1,)),
    "penalize_nl": (False,),
    "t_max_predict_ms": (0, -1),
    "timings_per_token": (False,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    # SGLang, Text Generation Inference, Ollama, LM Studio
    **dict.fromkeys(("custom_params", "lora_path", "session_params"), ()),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), (True,)),
    **dict.fromkeys(("adapter_id", "do_sample", "options", "think", "thinking", "ttl"), ()),
    **dict.fromkeys(("decoder_input_details", "details", "watermark"), (False,)),
    "draft_model": (),
    "return_hidden_states": (False,),
    # OpenRouter and LiteLLM
    **dict.fromkeys(("models", "plugins", "provider", "route", "transforms", "usage"), ()),
    "context_management": (),
    "enable_thinking": (),
    "thinking_budget": (),
}
"""Fields that are ignored with a warning, with the values that change nothing. None is always one
of these."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "conversation": (),
    "ebnf": (),
    "format": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_full_text": (False,),
    "stop_token_ids": ([],),
    "structural_tag": (),
    "suffix": ("",),
    "truncate": (),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}
"""Fields that determine the form of an answer or what it answers, with the values that change
nothing. None is always one of these."""

REASONS: Mapping[str, str] = {
    "allowed_token_ids": NO_IDS,
    "bad_words": "send {'adafuse': {'logit_bias': {text: -100}}}",
    "background": NO_STORE,
    "chat_template": "every member uses its own; send chat_template_kwargs",
    "conversation": SEND_ALL,
    "ebnf": OTHER_GRAMMAR,
    "enable_thinking": "send {'chat_template_kwargs': {'enable_thinking': ...}}",
    "format": "send response_format",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "grammar": OTHER_GRAMMAR,
    "guided_grammar": OTHER_GRAMMAR,
    "options": "send these options as fields of their own",
    "previous_response_id": SEND_ALL,
    "repeat_penalty": "send repetition_penalty, which covers the whole text",
    "stop_token_ids": f"{NO_IDS}; send texts in stop",
    "store": NO_STORE,
    "think": "send {'chat_template_kwargs': {'enable_thinking': ...}}",
    "thinking": "send {'chat_template_kwargs': {'enable_thinking': ...}}",
    "web_search_options": NO_TOOLS,
    **{name: NOT_SUPPORTED[name] for name in ("early_stopping", "length_penalty", "typical_p")},
}
"""Why a field is not supported, or what to send instead."""

HEADER = "X-AdaFuse-Warnings"
"""The header with the warnings that are known before the response begins."""

MAX_HEADER = 2000
"""Maximum characters of this header."""


MAX_WARNINGS = 32
"""Maximum number of ignored parts of a request that are named."""


class Ignored:
    """The parts of a request that were ignored.

    Args:
        strict: whether to refuse the request instead.

    Attributes:
        warnings: what the client should know about them.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.warnings: list[str] = []
        self._strict = strict

    def add(self, name: str, reason: str = "") -> None:
        """Note that a part was ignored.

        Args:
            name: the name of the field, with the fields around it, such as ``a.b``.
            reason: why it is not supported, or what to send instead.

        Raises:
            ApiError: the server is strict.
        """
        reason = f": {reason}" if reason else ""
        if self._strict:
            raise _refused(name, reason)
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"the field {short_repr(name)} was ignored{reason}")
        elif len(self.warnings) == MAX_WARNINGS:
            self.warnings.append("more fields were ignored")

    def keep(self, given: Mapping[str, Any], known: Collection[str], place: str) -> dict[str, Any]:
        """Return the known keys of an object; the others are ignored unless they are None."""
        for name, value in given.items():
            if name not in known and value is not None:
                self.add(f"{place}.{name}")
        return {name: value for name, value in given.items() if name in known}


def warnings_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return warnings as a header, in ASCII; nothing if there are none."""
    text = " ".join("; ".join(warnings).split())
    shown = text.encode("ascii", "backslashreplace").decode()[:MAX_HEADER].rstrip()
    return {HEADER: shown} if shown else {}


def _refused(name: str, reason: str, value: object = None) -> Exception:
    got = "" if value is None else f"; got {short_repr(value)}"
    return invalid(
        f"the field {short_repr(name)} is not supported{reason}{got}. Leave it out.",
        name,
        "unsupported_parameter",
    )


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: Mapping[str, Any], ignored: Ignored) -> Body:
    """Check the fields of a body.

    Args:
        kind: the fields that the body can have.
        body: the body.
        ignored: takes the fields of other servers.

    Raises:
        ApiError: a field is unknown, is not supported and determines the form of the answer, or has
            an invalid value.
    """
    allowed = tuple(kind.model_fields)
    used = {}
    for name, value in body.items():
        if name in allowed:
            used[name] = value
            continue
        if name in WITHOUT_EFFECT:
            continue
        reason = f": {REASONS[name]}" if name in REASONS else ""
        if name in REFUSED:
            if value is not None and value not in REFUSED[name]:
                raise _refused(name, reason, value)
        elif name in IGNORED:
            if value is not None and value not in IGNORED[name]:
                ignored.add(name, REASONS.get(name, ""))
        else:
            raise invalid(
                f"unknown field {short_repr(name)}.{_advice(name, allowed)}",
                name[:100],
                "unknown_parameter",
            )
    try:
        return kind.model_validate(used)
    except ValidationError as error:
        raise _invalid_value(error) from None


def _invalid_value(error: ValidationError) -> Exception:
    """Return the error for the first field that pydantic refuses."""
    problem = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = "" if problem["type"] == "missing" else f"; got {short_repr(problem['input'])}"
    return invalid(f"{name}: {message}{shown}", name)


def _is_type(part: int | str) -> bool:
    """Return whether a part of a location is one of several types of a field, not a field."""
    return isinstance(part, str) and (part in ("str", "bool") or "[" in part)


def _advice(name: str, allowed: Sequence[str]) -> str:
    if name in AdaFuseConfig.model_fields:
        return f" It is an option of the ensemble: send {{{EXTENSION!r}: {{{name!r}: ...}}}}."
    return nearest(name, allowed) or f" Fields: {', '.join(allowed)}."
