"""Answers with formatting: no HTML of a model runs, and every text keeps the mark of its member."""

import re

from tests.support.chat_page import HOSTILE, IMAGE, generated, mark_of

ANSWER = ".answer[role=group]"


def element_texts(tab, selector: str) -> list[str]:
    return tab.page.locator(f"{ANSWER} {selector}").all_text_contents()


def test_answers_have_formatting(visit) -> None:
    tab = visit()
    tab.say("markdown")
    for name, texts in {
        "h3": ["Title"],
        "em": ["slanted"],
        "strong": ["bold"],
        "s": ["gone"],
        ":not(pre) > code": ["x = 1"],
        "pre": ["if a < b:\n    print(a)"],
        "ol > li": ["one", "twoinner"],
        "ol ul": ["inner"],
        "th": ["left", "right"],
    }.items():
        assert element_texts(tab, name) == texts
    assert element_texts(tab, "p")[0] == "Some slanted, bold and gone x = 1 text\nover two lines."
    assert element_texts(tab, "p")[-1] == "A link and Image: a cat © *no*."
    assert "python" in element_texts(tab, ".code")[0]
    style = "cells => cells.map(cell => getComputedStyle(cell).textAlign)"
    assert tab.page.locator("td").evaluate_all(style) == ["left", "right"]
    links = "e => e.map(e => [e.href, e.rel, e.target])"
    assert tab.page.locator(f"{ANSWER} a").evaluate_all(links) == [
        ["https://example.org/a_(b)", "noopener noreferrer", "_blank"],
        ["http://example.org/cat.png", "noopener noreferrer", "_blank"],
    ]


def test_no_html_of_a_model_runs(visit, engine) -> None:
    tab = visit()
    tab.say("hostile")
    assert generated(engine, "hostile").text == HOSTILE
    made = tab.page.locator(f"{ANSWER} *").evaluate_all("e => [...new Set(e.map(e => e.tagName))]")
    assert set(made) <= {"P", "SPAN", "A", "DIV", "PRE", "CODE", "BUTTON"}
    attributes = tab.page.locator(f"{ANSWER} *").evaluate_all(
        "e => [...new Set(e.flatMap(e => e.getAttributeNames()))]"
    )
    assert set(attributes) <= {
        *("class", "data-mark", "data-round", "dir", "href", "rel", "role", "style", "tabindex"),
        *("target", "title", "type"),
    }
    styles = tab.page.locator(f"{ANSWER} [style]").evaluate_all(
        "e => [...new Set(e.flatMap(e => [...e.style]))]"
    )
    assert set(styles) <= {"--member", "--stroke"}
    hrefs = tab.page.locator(f"{ANSWER} a").evaluate_all("e => e.map(e => e.href)")
    assert hrefs
    assert all(re.match(r"https?://example\.org/|mailto:a@x", each) for each in hrefs)
    assert {"https://example.org/auto", "mailto:a@x.org", "http://example.org/pixel.gif"} <= {
        *hrefs
    }
    text = tab.page.locator(ANSWER).inner_text()
    for shown in ("<script>", "<style>body", "<svg onload", "](javascript:", "](vbscript:x)"):
        assert shown in text
    assert IMAGE in tab.page.locator("#members").inner_text()  # the name of a member
    tab.spans.nth(3).click()
    assert tab.round.is_visible()
    tab.page.reload()
    tab.page.locator(f"{ANSWER} .code").wait_for()
    assert tab.page.title() == "adafuse"
    assert not tab.page.locator("img, iframe, svg, main style, main script").count()


def test_texts_with_formatting_keep_the_marks_of_their_members(visit, engine) -> None:
    tab = visit()
    tab.say("bold")
    rounds = generated(engine, "bold").rounds
    marks = {place: mark_of(each) for place, each in enumerate(rounds) if each.text}
    assert len(set(marks.values())) > 1, "the members agree everywhere"
    pieces = tab.page.locator(f"{ANSWER} .span").evaluate_all(
        "e => e.map(e => [Number(e.dataset.round), e.textContent, e.dataset.mark])"
    )
    shown: set[int] = set()
    for place, text, mark in pieces:
        if text != "&":  # an entity
            assert text.strip() in rounds[place].text
        assert mark == ("" if place in shown else marks[place])
        shown.add(place)
    assert [place for place, *_ in pieces] == sorted(place for place, *_ in pieces)
    hidden = {rounds[place].text for place in marks.keys() - shown}
    address = "(https://example.org/85)"
    assert not [each for each in hidden if re.search(r"\w", each) and each not in address]
    assert element_texts(tab, "strong")[0].startswith("sum is 85")
    assert element_texts(tab, "blockquote")[0].startswith("it is\n85 & so")
    tab.page.locator("strong .span").last.click()
    place = int(tab.page.locator("strong .span").last.get_attribute("data-round") or -1)
    assert tab.page.get_by_role("dialog", name=f"Round {place}").is_visible()
    assert not tab.page.locator("a .span[role], a .span[tabindex]").count(), "a link is a link"
