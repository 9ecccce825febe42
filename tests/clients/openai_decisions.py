"""OpenAI's client for typed questions: all kinds, a conversation, errors, and its tool runner.

Usage: python openai_decisions.py ADDRESS. It needs openai 3.57 or later.
"""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.lib.decisions_tool_runner import DecisionsToolRunner  # type: ignore[import-not-found]

SETTINGS: Any = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
CLIENT: Any = OpenAI(**SETTINGS)
TEAM: Any = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which team should handle it?"}],
    "choices": [{"value": "billing", "description": "payments"}, {"value": "technical"}],
}
QUESTIONS: Any = [
    {"type": "predicate", "instructions": "Is it urgent?", "name": "urgent"},
    TEAM,
    {
        "type": "score",
        "instructions": "How angry is the customer?",
        "levels": [{"label": "calm"}, {"label": "angry", "description": "shouts"}],
    },
]
DATA = {"type": "input_json", "data": {"plan": "pro"}}
INPUT: Any = [{"role": "user", "content": [{"type": "input_text", "text": "It fails."}, DATA]}]
ASKED: Any = {"model": "adafuse", "input": INPUT, "questions": QUESTIONS}


def check(decision):
    urgent, team, mood = decision.answers
    assert [each.type for each in decision.answers] == ["predicate", "choice", "score"]
    assert (urgent.name, team.name) == ("urgent", None)
    assert 0 < urgent.probability < 1
    assert team.choice in ("billing", "technical")
    assert abs(sum(each.probability for each in team.probabilities) - 1) < 1e-9
    assert [(each.value, each.label) for each in mood.probabilities] == [(0, "calm"), (1, "angry")]
    assert [*team.model_extra["adafuse"]["members"]] == ["oak", "elm"]
    assert decision.usage.total_tokens >= decision.usage.input_tokens > 0


async def converse():
    client: Any = AsyncOpenAI(**SETTINGS)
    check(await client.decisions.create(**ASKED))


check(CLIENT.decisions.create(**ASKED))
asyncio.run(converse())
try:
    CLIENT.decisions.create(**{**ASKED, "questions": [{**TEAM, "choices": TEAM["choices"][:1]}]})
except BadRequestError as error:
    assert error.param == "questions.0"
    assert "2 to 255 different options" in error.message
else:
    raise AssertionError("one choice is not refused")

done = []
runner = DecisionsToolRunner(
    observe=lambda: "The door is closed.",
    candidates=lambda _: [
        {"id": "open", "description": "open it", "execute": lambda: done.append("open")},
        {"id": "stop", "description": "all is done", "done": True},
    ],
)
result = runner.run(CLIENT, {"model": "adafuse", "input": "Open the door."}, max_steps=1)
assert (result["status"], done) == ("unverified", [])
print("done")
