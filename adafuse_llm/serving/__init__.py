"""A server for the protocol of OpenAI: one ensemble for many applications.

`create_app` returns an ASGI application, and ``adafuse serve`` runs it. It needs the extra
``serve``; importing this package does not.
"""

from __future__ import annotations

from adafuse_llm.serving_config import ServingConfig

__all__ = ["ServingConfig"]
