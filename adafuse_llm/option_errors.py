"""Errors about options: what is wrong, what is allowed, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from adafuse_llm.errors import nearest, short_repr

NO_BEAMS = "it has no effect without beams, which do not exist here"

NOT_SUPPORTED = {
    "bad_words_ids": "token ids differ between members; pass logit_bias={text: -100}",
    "early_stopping": NO_BEAMS,
    "length_penalty": NO_BEAMS,
    "num_beams": "members would search in tokens of their own; leave it out",
    "sequence_bias": "token ids differ between members; pass logit_bias={text: number}",
    "suppress_tokens": "token ids differ between members; pass logit_bias={text: -100}",
    "typical_p": "it would forbid a member's likeliest tokens, which the ensemble compares; pass "
    "min_p or top_p",
}
"""Options of decoding in other libraries that do not exist here, with the reason and what to do
instead."""


def hint(name: str, allowed: Iterable[str]) -> str:
    """Return a hint that names the right option for an unknown one, or an empty string."""
    if name == "members":
        return " To choose among the loaded members, pass use=[...]."
    if name == "strategy":
        return (
            " Pass the strategy when you create the model or the engine: strategy='single'. For a "
            "loaded engine, use engine.with_strategy('single'). One member alone needs no "
            "strategy: use=['name']."
        )
    if name in NOT_SUPPORTED:
        return f" This option of other libraries is not supported: {NOT_SUPPORTED[name]}."
    return nearest(name, allowed)


def explain(error: ValidationError, names: Sequence[str]) -> str:
    """Describe the first problem in one line: the option, what is allowed and what was given."""
    problems = error.errors(include_url=False, include_context=False)
    name = str(problems[0]["loc"][0]) if problems[0]["loc"] else "options"
    if problems[0]["type"] == "extra_forbidden":
        return (
            f"unknown option {short_repr(name)}.{hint(name, names)} The options are: "
            f"{', '.join(names)}."
        )
    # a value that fits none of several types has a problem for each; the deepest fits best
    same = [problem for problem in problems if problem["loc"][:1] == problems[0]["loc"][:1]]
    problem = max(same, key=lambda each: len(each["loc"]))
    allowed = problem["msg"].removeprefix("Value error, ")
    allowed = allowed[:1].lower() + allowed[1:]
    return f"option {name!r}: {allowed}; got {short_repr(problem['input'])}"
