"""The page at ``/``: a chat that shows which member wrote each span of an answer."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from adafuse_llm.report.page import STROKES, STROKES_OF_SHARED, palette
from adafuse_llm.report.styles import AGREED, CHOSEN, COLORS, ENDINGS, FORCED, MARKS

TEMPLATE = Path(__file__).parent / "page.html"
SHARED = {"agreed": AGREED, "chosen": CHOSEN, "forced": FORCED}


def page_route() -> Route:
    """Return the route of the page."""
    html = page()
    headers = {
        "content-security-policy": _policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def show(_: Request) -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return Route("/", show, methods=["GET"])


@cache
def page() -> str:
    """Return the page with the colors, marks and words of the reports."""
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("/* palette */", palette()).replace("/* looks */", _looks())


def _looks() -> str:
    """Return how members and shared spans look, as JSON for the page's script."""
    looks = {
        "marks": MARKS,
        "strokes": STROKES,
        "colors": len(COLORS),
        "endings": ENDINGS,
        "shared": {
            kind: {"mark": each.mark, "name": each.name, "stroke": STROKES_OF_SHARED[each]}
            for kind, each in SHARED.items()
        },
    }
    return json.dumps(looks)


def _policy(html: str) -> str:
    """Return the content security policy that permits only the page's own style and script."""
    rules = {
        "default-src": "'none'",
        "script-src": _digest(html, "script"),
        "style-src": _digest(html, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # the script cannot insert HTML
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(html: str, tag: str) -> str:
    """Return the hash of the one element `tag` without attributes, as a policy writes it."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
