"""Does fusing pay? Tasks, strict metrics, intervals and paired tests over recorded answers.

    metrics     how an answer is compared with the accepted ones
    statistics  intervals and paired tests, seeded
    files       test sets in, results out, resumable
    tasks       prompts, options and metrics of each benchmark
    runner      questions to an engine, many at a time; what the results say
    tuning      members and options: a search, and a test on held-out questions
    lm_eval     the engine as a model of lm-evaluation-harness

Scores are percentages (0 to 100) throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adafuse_llm.evaluation.tuning import tune

__all__ = ["tune"]


def __getattr__(name: str) -> Any:
    if name == "tune":
        from adafuse_llm.evaluation.tuning import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
