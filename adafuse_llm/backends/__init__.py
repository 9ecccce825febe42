"""Public names for authors of backends: `Backend`, its queries and results, and a fake backend.

A backend implements one kind of member. The backend for Hugging Face models is in
`adafuse_llm.backends.huggingface`. That backend imports torch, so this package does not export it.
`adafuse_llm.testing` has tests for backends.
"""

from adafuse_llm.backends.base import Backend, Query, QueryResult
from adafuse_llm.backends.fake import FakeBackend, answered
from adafuse_llm.text.codec import TextCodec, TokenizerCodec
from adafuse_llm.text.conversation import Conversation
from adafuse_llm.text.templates import ReplyStart, TemplateFacts
from adafuse_llm.tree.adjustment import Adjustment, Changes
from adafuse_llm.tree.tokens import Next, Node, TokenTree, is_allowed

__all__ = [
    "Adjustment",
    "Backend",
    "Changes",
    "Conversation",
    "FakeBackend",
    "Next",
    "Node",
    "Query",
    "QueryResult",
    "ReplyStart",
    "TemplateFacts",
    "TextCodec",
    "TokenTree",
    "TokenizerCodec",
    "answered",
    "is_allowed",
]
