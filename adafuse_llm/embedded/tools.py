"""Two tools that let the embedded members act as small agents.

    look_up     finds what the handbook says about a name
    calculate   works out a sum of numbers
    TOOLS       descriptions of both for the members (`adafuse_llm.text.conversation.Tool`)

The members can write calls in two forms: in the common form of `adafuse_llm.text.conversation`, or
as ReAct's thoughts and actions. For ReAct, pass `REACT_HEADER` as the ``system_header`` of
LlamaIndex's ``ReActChatFormatter``.
"""

# This module does not use `from __future__ import annotations`, because frameworks show the
# annotations to members, and string annotations would appear in quotes. The docstrings of both
# tools are part of the prompts.

import ast
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Final

from adafuse_llm.documents import Passage, Retriever, read_documents
from adafuse_llm.embedded import handbook_path
from adafuse_llm.errors import InvalidInputError
from adafuse_llm.text.conversation import Tool

__all__ = ["CALCULATE", "LOOK_UP", "REACT_HEADER", "TOOLS", "calculate", "look_up", "one_line"]

MAX_PASSAGES: Final = 2

REACT_HEADER: Final = """\
You have these tools:

{tool_desc}
Reply in one of two forms. To use a tool ({tool_names}):

Thought: why
Action: the tool's name
Action Input: {{"the argument's name": "its value"}}

What it returns comes next, as an Observation. To answer:

Thought: why
Answer: the answer"""


def look_up(query: str) -> str:
    """Find out what the handbook says about a name."""
    return one_line(_handbook().search(query, MAX_PASSAGES))


def calculate(expression: str) -> str:
    """Work out a sum of numbers with +, - and *."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return f"{_value(tree.body, expression):f}"
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _not_a_sum(expression) from error


def _tool(name: str, description: str, argument: str) -> Tool:
    schema = {
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "type": "object",
    }
    return Tool(name, description, schema)


LOOK_UP: Final = _tool("look_up", look_up.__doc__ or "", "query")
CALCULATE: Final = _tool("calculate", calculate.__doc__ or "", "expression")
TOOLS: Final[tuple[Tool, ...]] = (LOOK_UP, CALCULATE)


def one_line(passages: Sequence[Passage]) -> str:
    """Number the passages and join them into one line, as `look_up` does."""
    return " ".join(
        f"[{number}] {' '.join(passage.text.split())}"
        for number, passage in enumerate(passages, start=1)
    )


@cache
def _handbook() -> Retriever:
    return Retriever(read_documents([handbook_path()]))


def _value(node: ast.expr, expression: str) -> Decimal:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return Decimal(ast.get_source_segment(expression.strip(), node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, expression)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, expression) + _value(right, expression)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, expression) - _value(right, expression)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, expression) * _value(right, expression)
    raise _not_a_sum(expression)


def _not_a_sum(expression: str) -> InvalidInputError:
    return InvalidInputError(
        f"calculate takes decimal numbers, +, -, * and parentheses; got {expression!r:.80}"
    )
