"""What the author of a backend uses: the protocol, its data, and a fake to test with.

A backend is one kind of member. `adafuse_llm.backends.huggingface` holds the one for Hugging Face
models; it imports torch, so it is not exported here.
"""

from adafuse_llm.backends.base import (
    Backend,
    LimitsDrafting,
    NodeQuery,
    NodeResult,
    SupportsAnchors,
    SupportsPlacement,
)
from adafuse_llm.backends.fake import FakeBackend
from adafuse_llm.text.codec import TextCodec, TokenizerCodec
from adafuse_llm.tree import Next, Node, TokenTree

__all__ = [
    "Backend",
    "FakeBackend",
    "LimitsDrafting",
    "Next",
    "Node",
    "NodeQuery",
    "NodeResult",
    "SupportsAnchors",
    "SupportsPlacement",
    "TextCodec",
    "TokenTree",
    "TokenizerCodec",
]
