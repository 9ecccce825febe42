"""Make the pictures of an answer and one of its rounds, as a report and on the server's page.

The members are two real models, which ``make demo-real`` fetches. Run it from the root of the
repository: ``python -m docs.figures.pictures``. Times are left out, because they are those of the
machine that makes the pictures.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from adafuse_llm import AdaFuseEngine
from adafuse_llm.documents import Retriever, question_messages, read_documents
from adafuse_llm.embedded import handbook_path
from adafuse_llm.serving import create_app
from benchmarks.real.members import MEMBERS, fetch, real_files
from tests.support.serving import served

HERE = Path(__file__).parent
READ_QUESTION = "Which product is the Jalith Museum known for?"
WORD = "Mavtron"
"""The question of ``make demo-real``, and the word that the shown round decides."""

QUESTION = "What is 12 + 7?"

WITHOUT_TIMES = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode())
    texts.currentNode.data = texts.currentNode.data.replace(/( · )?[\\d.]+ m?s\\b/, "");
}"""


def main() -> None:
    """Write ``rounds-light.png``, ``rounds-dark.png`` and ``page.png`` next to this file."""
    names = {"smollm": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-0.5B"}
    fetch([member for member in MEMBERS if member.name in names], convert=False)
    files = real_files()
    members = [{"path": files[each], "name": name} for each, name in names.items()]
    with AdaFuseEngine.from_pretrained(members) as engine, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        picture_report(engine, browser)
        picture_page(engine, browser)
        browser.close()


def picture_report(engine: AdaFuseEngine, browser: Browser) -> None:
    """Make the pictures of the HTML report, light and dark."""
    passages = Retriever(read_documents([handbook_path()])).search(READ_QUESTION, k=3)
    generation = engine.generate(messages=question_messages(READ_QUESTION, passages))
    shown = next(each.index for each in generation.rounds if WORD in each.text)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(f'<meta charset="utf-8">{generation._repr_html_()}', encoding="utf-8")
        for scheme in ("light", "dark"):
            size = {"width": 880, "height": 640}
            tab = browser.new_page(color_scheme=scheme, viewport=size, device_scale_factor=2)
            tab.goto(page.as_uri())
            tab.add_style_tag(content=".adafuse .charts { visibility: hidden }")
            tab.locator(".span").nth(shown).focus()
            tab.evaluate(WITHOUT_TIMES)
            tab.screenshot(path=HERE / f"rounds-{scheme}.png")


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
