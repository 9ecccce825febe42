"""Evaluation: tasks, strict metrics, confidence intervals and paired tests over recorded answers.

    metrics     compare answers with accepted answers
    statistics  compute intervals and paired tests, with a seed
    files       read test sets, write results, and resume interrupted runs
    tasks       define the prompts, options and metrics of each benchmark
    runner      answer questions with an engine, and summarize and compare the results
    tuning      search for members and options, and test them on held-out questions
    lm_eval     make the engine a model of lm-evaluation-harness

All scores are percentages (0 to 100).
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
