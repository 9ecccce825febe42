"""Make the pictures of an answer and one of its rounds, as a report and on the server's page.

Run it from the root of the repository: ``python -m docs.figures.pictures``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import create_app
from tests.support.serving import served

HERE = Path(__file__).parent
QUESTION = "What is 34 + 58 - 7?"
ROUND = 1


def main() -> None:
    """Write ``rounds-light.png``, ``rounds-dark.png`` and ``page.png`` next to this file."""
    with AdaFuseEngine.from_embedded() as engine, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        picture_report(engine, browser)
        picture_page(engine, browser)
        browser.close()


def picture_report(engine: AdaFuseEngine, browser: Browser) -> None:
    """Make the pictures of the HTML report, light and dark."""
    generation = engine.generate(messages=[{"role": "user", "content": QUESTION}])
    with tempfile.TemporaryDirectory() as folder:
        page = generation.to_html(Path(folder) / "report.html", title=QUESTION)
        for scheme in ("light", "dark"):
            size = {"width": 880, "height": 560}
            tab = browser.new_page(color_scheme=scheme, viewport=size, device_scale_factor=2)
            tab.goto(page.as_uri())
            tab.add_style_tag(content=".adafuse .charts { visibility: hidden }")
            tab.locator(".span").nth(ROUND).focus()
            tab.screenshot(path=HERE / f"rounds-{scheme}.png")


def picture_page(engine: AdaFuseEngine, browser: Browser) -> None:
    """Make the picture of the server's page."""
    with served(create_app(engine)) as address:
        size = {"width": 1000, "height": 590}
        tab = browser.new_page(color_scheme="light", viewport=size, device_scale_factor=1.5)
        tab.goto(address)
        tab.fill("#text", QUESTION)
        tab.keyboard.press("Enter")
        tab.locator("#send").wait_for()
        tab.locator(".span").nth(ROUND).click()
        tab.mouse.move(0, 0)
        tab.screenshot(path=HERE / "page.png")


if __name__ == "__main__":
    main()
