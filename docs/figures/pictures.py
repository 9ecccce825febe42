"""Make the README's pictures of an answer and one of its rounds, light and dark."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from adafuse_llm import AdaFuseEngine

QUESTION = "What is 34 + 58 - 7?"
ROUND = 1
SIZE = {"width": 880, "height": 480}


def main() -> None:
    """Write ``rounds-light.png`` and ``rounds-dark.png`` next to this file."""
    with AdaFuseEngine.from_embedded() as engine:
        generation = engine.generate(messages=[{"role": "user", "content": QUESTION}])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = generation.to_html(Path(folder) / "report.html", title=QUESTION)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for scheme in ("light", "dark"):
            tab = browser.new_page(color_scheme=scheme, viewport=SIZE, device_scale_factor=2)
            tab.goto(page.as_uri())
            tab.locator(".span").nth(ROUND).focus()
            tab.screenshot(path=Path(__file__).parent / f"rounds-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
