"""Evaluation: which members and options answer a user's questions best, and public benchmarks.

tuning      search for members and options, and test them on held-out questions
comparison  compare two systems on the same questions
metrics     compare answers with accepted answers
lm_eval     make the engine a model of lm-evaluation-harness
files       read test sets, write results, and resume interrupted runs
parallel    several questions at the same time
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
