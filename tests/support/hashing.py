"""An embedding that needs no model: words, hashed."""

from __future__ import annotations

import math
import re
import zlib

from llama_index.core.base.embeddings.base import BaseEmbedding


class HashingEmbedding(BaseEmbedding):
    """Counts of words, each at a place given by its hash."""

    size: int = 512

    def _get_text_embedding(self, text: str) -> list[float]:
        counts = [0.0] * self.size
        for word in re.findall(r"\w+", text.lower()):
            counts[zlib.crc32(word.encode()) % self.size] += 1
        return [math.sqrt(count) for count in counts]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
