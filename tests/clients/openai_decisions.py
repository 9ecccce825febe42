"""OpenAI's client for typed questions: all kinds, a conversation, and errors.

Usage: python openai_decisions.py ADDRESS. It needs openai 3.57 or later.
"""

import sys
from typing import Any

from openai import BadRequestError, OpenAI

CLIENT: Any = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
TEAM: Any = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which team should handle it?"}],
    "choices": [{"value": "billing", "description": "payments"}, {"value": "technical"}],
}
LEVELS = [{"label": "calm"}, {"label": "angry", "description": "shouts"}]
QUESTIONS: Any = [
    {"type": "predicate", "instructions": "Is it urgent?", "name": "urgent"},
    TEAM,
    {"type": "score", "instructions": "How angry is the customer?", "levels": LEVELS},
]
DATA = {"type": "input_json", "data": {"plan": "pro"}}
INPUT: Any = [{"role": "user", "content": [{"type": "input_text", "text": "It fails."}, DATA]}]
ASKED: Any = {"model": "adafuse", "input": INPUT, "questions": QUESTIONS}

decision = CLIENT.decisions.create(**ASKED)
urgent, team, mood = decision.answers
assert [each.type for each in decision.answers] == ["predicate", "choice", "score"]
assert (urgent.name, team.name) == ("urgent", None)
assert [(each.value, each.label) for each in mood.probabilities] == [(0, "calm"), (1, "angry")]
assert decision.usage.total_tokens >= decision.usage.input_tokens > 0
try:
    CLIENT.decisions.create(**{**ASKED, "questions": [{**TEAM, "choices": TEAM["choices"][:1]}]})
except BadRequestError as error:
    assert error.param == "questions.0"
    assert "2 to 255 different options" in error.message
else:
    raise AssertionError("one choice is not refused")
print("done")
