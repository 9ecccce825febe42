"""Requests that several test files compare with the reference."""

from typing import Any

from hypothesis import strategies as st

from tests.support.models import CHATTING, Recipe
from tests.support.schemas import PERSON

EAGER = (
    Recipe("llama", "bytelevel", seed=41, end_bias=6.0),
    Recipe("qwen2", "sentencepiece", seed=42, end_bias=6.0),
)
"""Two members that soon end a response."""

TEMPLATES = (*CHATTING, Recipe("qwen3", "unigram", seed=53))
OTHERS = (Recipe("qwen2", "gemma", seed=85), Recipe("llama", "legacy", seed=86))
PREFIXED = (Recipe("mistral", "prefixed", seed=87), Recipe("llama", "unigram", seed=88))

PROMPTS = (
    "The ferry to Orrin leaves at nine.",
    "Question: who keeps the light?\nAnswer: ",
    " - bread, salt and oil\n - rope\n\n",
    "Caf\u00e9 \U0001f600 Orrin   ",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002\u4e2d\u6587",
    "a\ttab, and  two spaces\t",
    "The light\u00a0",
    "x",
)
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Who keeps the light?"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Who keeps the light? "},
    ],
    [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "Count."},
        {"role": "user", "content": "Caf\u00e9 \U0001f600"},
        {"role": "assistant", "content": "one, two"},
        {"role": "user", "content": "Go on\n"},
    ],
)
STARTS: tuple[dict[str, Any], ...] = (
    {"prompt": "The ferry to"},
    {"prompt": "Answer:   "},
    {"prompt": " - bread\n"},
    {"messages": CONVERSATIONS[0]},
)
FORMS: tuple[dict[str, Any], ...] = (
    {"json_schema": PERSON},
    {"regex": "[a-c]{2,5}( [d-f]{2,4}){1,3}"},
    {"regex": "(caf\u00e9|\u4e2d\u6587|\U0001f600)+( the light)?"},
    {"regex": " *\\w+ {1,3}\\w+\\n?"},
    {"grammar": 'start: sum\nsum: sum "+" num | num\nnum: /[0-9]{1,3}/ | "(" sum ")"'},
    {"regex": "the light is the light"},
    {"grammar": 'start: "the " ("cat"|"dog") (" and the " ("cat"|"dog"))*'},
)
TEXTS = st.text(
    st.sampled_from([*"aeiortn  .,\n\t\"'0159-", "\u00e9", "\u4e2d", "\U0001f600", "\u00a0"]),
    min_size=1,
    max_size=24,
).filter(lambda text: bool(text.rstrip(" ")))
WORDS: dict[str, Any] = {
    "margin_threshold": st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]),
    "max_words": st.integers(1, 3),
    "branching_factor": st.sampled_from([1, 2, 3, 5]),
    "max_word_tokens": st.sampled_from([1, 2, 4, 16]),
    "max_word_letters": st.sampled_from([1, 2, 256]),
}
FREE = {
    **WORDS,
    "max_new_tokens": st.integers(1, 20),
    "stop": st.sampled_from([(), ("\n",), ("e",), ("th", " o")]),
}
"""Options of responses of any form."""
