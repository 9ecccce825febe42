"""Make the picture of an answer and one of its rounds on the server's page.

The members are two real models, which ``make demo-real`` fetches. Run it from the root of the
repository: ``python -m docs.figures.pictures``. Times are left out, because they are those of the
machine that makes the picture.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from adafuse_llm import AdaFuseEngine
from adafuse_llm.serving import create_app
from benchmarks.real.members import MEMBERS, fetch, real_files
from tests.support.serving import served

HERE = Path(__file__).parent
QUESTION = "What is 12 + 7?"

WITHOUT_TIMES = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    node.data = node.data.replace(/( · )?[\\d.]+ (m?s\\b|tokens\\/s)/g, "");
  }
}"""


def main() -> None:
    """Write ``page.png`` next to this file."""
    names = {"smollm": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-0.5B"}
    fetch([member for member in MEMBERS if member.name in names], convert=False)
    files = real_files()
    members = [{"path": files[each], "name": name} for each, name in names.items()]
    with (
        AdaFuseEngine.from_pretrained(members, strategy="adafuse") as engine,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        picture_page(engine, browser)
        browser.close()


def picture_page(engine: AdaFuseEngine, browser: Browser) -> None:
    """Make the picture of the server's page."""
    with served(create_app(engine)) as address:
        size = {"width": 1000, "height": 590}
        tab = browser.new_page(color_scheme="light", viewport=size, device_scale_factor=1.5)
        tab.goto(address)
        tab.fill("#text", QUESTION)
        tab.keyboard.press("Enter")
        tab.locator("#send").wait_for(timeout=600_000)
        tab.locator(".span").last.click()
        tab.mouse.move(0, 0)
        tab.evaluate(WITHOUT_TIMES)
        tab.screenshot(path=HERE / "page.png")


if __name__ == "__main__":
    main()
