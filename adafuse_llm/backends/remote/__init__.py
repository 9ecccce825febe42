"""Members that compute in another process.

protocol   the messages, and what a transport must offer (`Channel`)
client     the member as an engine sees it (`RemoteBackend`)
host       the other side: a backend that answers the messages
processes  the transport to a process on the same machine

Only `processes` knows what a process is. Another transport needs only another `Channel`.
"""

from __future__ import annotations

from adafuse_llm.backends.remote.client import MemberText, RemoteBackend, join_host
from adafuse_llm.backends.remote.protocol import Channel, HostDied

__all__ = ["Channel", "HostDied", "MemberText", "RemoteBackend", "join_host"]
