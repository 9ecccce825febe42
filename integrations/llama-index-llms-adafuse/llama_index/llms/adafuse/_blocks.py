"""The text in blocks of documents."""

from __future__ import annotations

from llama_index.core.base.llms.types import (
    BaseContentBlock,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    TextBlock,
)

from adafuse_llm import InvalidInputError

UNTITLED = "input_document"
"""The title that LlamaIndex gives to a document without one."""

TEXT_TYPES = (
    "application/json",
    "application/xml",
    "application/yaml",
    "application/x-yaml",
    "application/javascript",
)
"""Media types of text that do not begin with ``text/``."""


def block_text(number: int, block: BaseContentBlock, omitted: set[str] | None) -> str | None:
    """Return the text of a block. The text of a document begins with its title and its source.

    Args:
        number: number of the message, for errors.
        block: the block.
        omitted: receives the types of blocks without text, which are then left out; None to refuse
            such blocks.

    Returns:
        The text, or None if the block is left out.

    Raises:
        InvalidInputError: a block has no text or cannot be read, and `omitted` is None.
    """
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, (CitableBlock, CitationBlock)):
        parts = block.content if isinstance(block, CitableBlock) else [block.cited_content]
        texts = [block_text(number, part, omitted) for part in parts]
        return _with_heading(block.title, block.source, "\n".join(filter(None, texts)))
    try:
        if isinstance(block, DocumentBlock):
            title = None if block.title == UNTITLED else block.title
            return _with_heading(title, None, _document_text(number, block))
        raise InvalidInputError(
            f"message {number} contains {type(block).__name__}, but members accept only text"
        )
    except InvalidInputError:
        if omitted is None:
            raise
        omitted.add(type(block).__name__)
        return None


def _document_text(number: int, block: DocumentBlock) -> str:
    refused = f"message {number} contains a DocumentBlock "
    if not block.data and not block.path and (block.url or "").partition(":")[0] != "data":
        raise InvalidInputError(
            f"{refused}without data: pass data or path; a document at a URL is not downloaded"
        )
    kind = (block.document_mimetype or "text/plain").partition(";")[0].strip().lower()
    is_text = kind.startswith("text/") or kind in TEXT_TYPES or kind.endswith(("+json", "+xml"))
    try:
        content = block.resolve_document().read() if is_text else b"\0"
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{refused}that cannot be read: {error}") from error
    if "\0" in text:
        raise InvalidInputError(
            f"{refused}that is not text in UTF-8 ({kind}), but members accept only text; extract "
            "its text first, for example with a reader of LlamaIndex"
        )
    return text


def _with_heading(title: str | None, source: str | None, text: str) -> str:
    heading = [f"Title: {title}"] if title else []
    heading += [f"Source: {source}"] if source else []
    return "\n".join([*heading, text])
