"""Generations to look at: HTML that holds the text, the rounds and nothing from elsewhere."""

import html
import io
import re

import pytest
from rich.console import Console

from adafuse_llm import AdaFuseEngine, Candidate, Generation
from adafuse_llm.backends import FakeBackend
from adafuse_llm.report.page import fragment
from adafuse_llm.report.terminal import Display
from adafuse_llm.summary import Summary, record

pytestmark = pytest.mark.quick

NASTY = '<b>bold</b> & "quotes"\n\n  <script>alert(1)</script> 中文 🙂 \x1b[31m'


def writes(name: str, text: str, *, sure: float = 0.9) -> FakeBackend:
    """A member that writes `text`, character by character, after whatever prompt ends in ``>``."""

    def after(whole: str) -> dict[str, float]:
        written = whole[whole.index(">") + 1 :]
        right = text[len(written)] if text.startswith(written) and written != text else "<end>"
        return {right: sure, "<end>" if right != "<end>" else "x": 1 - sure}

    return FakeBackend(name, after)


@pytest.fixture(scope="module")
def generation() -> Generation:
    engine = AdaFuseEngine([writes("one", NASTY), writes("two & co", NASTY, sure=0.7)])
    return engine.generate(">", max_words=2)


def printed(renderable: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def shown_text(page_: str) -> str:
    answer = re.search(r'<div class="answer".*?>(.*)</div>\s*<div class="quiet">', page_, re.DOTALL)
    assert answer
    spans = re.findall(
        r'<div class="span".*?>(.*?)<div class="card"',
        answer[1].replace("\n<strong", "<strong"),
        re.DOTALL,
    )
    return html.unescape("".join(spans))


def test_the_text_is_in_the_html_and_harmless_and_nothing_comes_from_elsewhere(generation):
    made = fragment(generation)
    assert generation.text.strip() == NASTY.strip()
    assert shown_text(made) == generation.text
    for tag in ("<script", "<b>"):
        assert tag not in made
    assert not re.search(r"https?:|src=|@import|url\(|<link", made)
    for decided in generation.rounds:
        assert f"Round {decided.index}</strong>" in made
        for candidate in decided.candidates:
            assert all(f">{max(0, value):.3f}</td>" in made for value in candidate.nll.values())


def test_what_a_stop_sequence_cut_off_is_not_shown_and_what_a_limit_cut_is_marked():
    engine = AdaFuseEngine([writes("one", "a b c d")])
    stopped, limited = engine.generate(">", stop=" c"), engine.generate(">", max_new_tokens=4)
    assert stopped.text == shown_text(fragment(stopped)) == "a b"
    assert limited.text == "a b "
    assert '"a b c" (cut)' in printed(limited)


def test_fragments_of_different_generations_fit_into_one_page(generation):
    other = AdaFuseEngine([writes("one", "a b")]).generate(">")
    ids = [set(re.findall(r'id="(\w+-\d+)"', fragment(each))) for each in (generation, other)]
    assert all(ids)
    assert not ids[0] & ids[1]
    assert generation._repr_html_() == fragment(generation)


def test_a_terminal_shows_text_rounds_and_cost(generation):
    shown = printed(generation)
    assert "● one" in shown
    assert "\x1b[31m" not in shown
    assert "\ufffd[31m" in shown
    assert f"{len(generation.rounds)} rounds" in shown


def test_explanations_follow_the_strategy_that_ran():
    rule = lambda text: {" yes": 0.9, "<end>": 0.1} if text.count("yes") < 3 else {"<end>": 1.0}  # noqa: E731
    members = [FakeBackend(name, rule, [" yes"]) for name in ("large", "small")]
    with AdaFuseEngine(members, strategy="mixture") as engine:
        mixed = engine.generate(">", weights=(3, 1))
        fused = engine.with_strategy("adafuse").generate(">", weights=(3, 1))
    summary = Summary.of(map(record, mixed.rounds))
    assert (summary.agreement, summary.asked) == (None, {"large": len(mixed.rounds)})
    for generation, strategy in ((mixed, "mixture"), (fused, "adafuse")):
        shown, made = printed(generation), html.unescape(fragment(generation))
        for each in (shown, made):
            assert f"strategy {strategy}" in each
            assert ("not asked" in each) == (strategy == "mixture")
            assert ("mean of the members' probabilities" in each) == (strategy == "mixture")
        assert ("all agreed in" in shown) == ('scope="col">F<' in made) == (strategy == "adafuse")
        assert ("all agree ·" in made) == (strategy == "adafuse")


def test_all_responses_are_shown_with_their_seeds():
    engine = AdaFuseEngine([writes("one", "a b c", sure=0.6), writes("two", "a b c", sure=0.6)])
    drawn = engine.generate(">", max_words=1, temperature=1, seed=5, n=3, top_logprobs=2)
    made = fragment(drawn)
    responses = (drawn, *drawn.alternatives)
    ids = re.findall(r'\bid="([^"]+)"', made)
    assert len(ids) == len(set(ids)) == sum(len(each.rounds) for each in responses)
    assert made.count("<style>") == 1
    shown = printed(drawn)
    for number, each in enumerate(responses, start=1):
        assert f"<h2>Response {number} of 3 · seed {each.seed}</h2>" in made
        assert f"Response {number} of 3 · seed {each.seed}\n{each.text}" in shown
    assert shown.count("forward passes: ") == 3
    for decided in drawn.rounds:
        assert record(decided)["logprobs"] == decided.model_dump(mode="json")["logprobs"]


@pytest.mark.parametrize("prefix", ["", "<think>\n"])
def test_reasoning_is_shown_apart_from_the_answer(prefix):
    text = f"{'' if prefix else '<think>'}so & so</think>\n\nyes"
    engine = AdaFuseEngine([writes("one", text)])
    generation = engine.generate(">", max_words=2).model_copy(update={"reply_prefix": prefix})
    assert (generation.reasoning, generation.answer) == ("so & so", "yes")
    made = fragment(generation)
    quiet = "".join(re.findall('<i class="quiet">(.*?)</i>', made, re.DOTALL))
    assert html.unescape(quiet) == text.removesuffix("yes")
    assert "Reasoning is in italics" in made
    assert "Reasoning\nso & so\n\nAnswer\nyes\n" in printed(generation)


def test_candidates_are_sorted_by_score(generation):
    texts = (("worst", 3.0), ("unscored", None), ("best", 1.0), ("middle", 2.0))
    candidates = tuple(
        Candidate(text=text, ends=False, nll={}, score=score, proposers=("one",))
        for text, score in texts
    )
    changed = generation.rounds[0].model_copy(update={"candidates": candidates, "winner": 2})
    trace = printed(Display(("one", "two & co"), Console()).trace(changed))
    made = fragment(generation.model_copy(update={"rounds": (changed,)}))
    for shown in (made[made.index('class="answer"') :], trace):
        places = [shown.index(word) for word in ("best", "middle", "worst", "unscored")]
        assert places == sorted(places)


def test_a_browser_opens_it_and_shows_candidates_on_focus(new_tab, generation, tmp_path):
    path = tmp_path / "report.html"
    head = (
        '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    path.write_text(head + fragment(generation), encoding="utf-8")
    tab = new_tab(color_scheme="dark", viewport={"width": 390, "height": 800})
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(path.as_uri())
    assert tab.locator(".answer").inner_text() == generation.text
    assert not tab.locator(".card:visible").count()
    tab.keyboard.press("Tab")
    card = tab.locator(".card:visible")
    assert card.locator("tr").count() == 1 + len(generation.rounds[0].candidates)
    box = card.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    overflow = tab.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not overflow, "the page is wider than the screen"
    tab.locator(".span").nth(1).focus()
    assert "Round 1" in tab.locator(".card:visible").inner_text()
    assert problems == []
