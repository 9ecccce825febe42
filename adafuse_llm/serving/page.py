"""The page at ``/``: a chat that shows which member wrote each span of an answer."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from adafuse_llm.documents import question_messages
from adafuse_llm.embedded import MEMBERS, heldout_questions
from adafuse_llm.report import styles

STATIC = Path(__file__).parent / "static"

LIBRARY = "markdown-it.umd.min.js"
"""The script that renders Markdown. `LICENSE-markdown-it.txt` names its source and its SHA-256."""

NAMES = "base talks state server markdown answer asking round settings main"
EXAMPLES = ("people", "dates", "arithmetic")
"""Skills of the embedded members. An empty chat with these members offers a question for each."""

SCRIPTS = tuple(f"{name}.js" for name in NAMES.split())
"""The scripts of the page, in order. They share one scope."""


def page_route() -> Route:
    """Return the route of the page, with headers for security and for browser caches."""
    html = page()
    headers = {
        "content-security-policy": _policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(html.encode()).hexdigest()}"',
    }

    async def show(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(html, headers=headers)

    return Route("/", show, methods=["GET"])


@cache
def page() -> str:
    """Return the page as one file, with its style, its scripts, and the symbols of members."""

    def read(name: str) -> str:
        return (STATIC / name).read_text(encoding="utf-8")

    first = {each.skill: each for each in reversed(heldout_questions(20))}
    asked = {first[skill].question: first[skill].passages for skill in EXAMPLES}
    looks = {
        "embedded": {
            "members": MEMBERS,
            "questions": [(q, question_messages(q, asked[q])[0]["content"]) for q in asked],
        },
        "marks": styles.MARKS,
        "strokes": styles.STROKES,
        "colors": len(styles.COLORS),
        "endings": styles.ENDINGS,
        "meanings": styles.MEANINGS,
        "shared": {
            each.kind: {"mark": each.mark, "name": each.name, "stroke": each.stroke}
            for each in (styles.AGREED, styles.CHOSEN, styles.FORCED)
        },
    }
    parts = {
        "/* style */": read("page.css"),
        "/* looks */": json.dumps(looks),
        "/* library */": read(LIBRARY),
        "/* script */": "".join(map(read, SCRIPTS)),
    }
    html = read("page.html")
    for place, content in parts.items():
        html = html.replace(place, content)
    return html


def _policy(html: str) -> str:
    """Return the content security policy. It permits no style and no scripts but the page's own."""

    def digests(tag: str) -> str:
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)  # without attributes
        each = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in contents]
        return " ".join(f"'sha256-{digest.decode()}'" for digest in each)

    rules = {
        "default-src": "'none'",
        "script-src": digests("script"),
        "style-src": digests("style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # no script can insert HTML
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
