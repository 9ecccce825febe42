"""Generations in a terminal and in a notebook: text, rounds and cost."""

import io

import pytest
from rich.console import Console

from adafuse_llm import AdaFuseEngine, Generation
from adafuse_llm.backends import FakeBackend
from adafuse_llm.summary import Summary, record

pytestmark = pytest.mark.quick

NASTY = '<b>bold</b> & "quotes"\n\n  <script>alert(1)</script> 中文 🙂 \x1b[31m'


def writes(name: str, text: str, *, sure: float = 0.9) -> FakeBackend:
    """A member that writes `text`, character by character, after any prompt that ends in ``>``."""

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


def test_what_a_stop_sequence_cut_off_is_not_shown_and_what_a_limit_cut_is_marked():
    engine = AdaFuseEngine([writes("one", "a b c d")])
    stopped, limited = engine.generate(">", stop=" c"), engine.generate(">", max_new_tokens=4)
    assert printed(stopped).splitlines()[2].strip() == "a b"
    assert limited.text == "a b "
    assert '"a b c" (cut)' in printed(limited)


def test_a_terminal_shows_text_rounds_and_cost(generation):
    shown = printed(generation)
    assert "● one" in shown
    assert "\x1b[31m" not in shown
    assert "\ufffd[31m" in shown
    assert f"{len(generation.rounds)} rounds" in shown


def test_a_notebook_shows_the_same_and_its_text_is_harmless(generation):
    bundle = generation._repr_mimebundle_(include=None, exclude=None)
    made = bundle["text/html"]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in made
    for tag in ("<script", "<b>", "\x1b"):
        assert tag not in made
    assert f"{len(generation.rounds)} rounds" in made


def test_explanations_follow_the_strategy_that_ran():
    rule = lambda text: {" yes": 0.9, "<end>": 0.1} if text.count("yes") < 3 else {"<end>": 1.0}  # noqa: E731
    members = [FakeBackend(name, rule, [" yes"]) for name in ("large", "small")]
    with AdaFuseEngine(members, strategy="mixture") as engine:
        mixed = engine.generate(">", weights=(3, 1))
        fused = engine.with_strategy("adafuse").generate(">", weights=(3, 1))
    summary = Summary.of(map(record, mixed.rounds))
    assert (summary.agreement, summary.asked) == (None, {"large": len(mixed.rounds)})
    for generation, strategy in ((mixed, "mixture"), (fused, "adafuse")):
        shown = " ".join(printed(generation).split())
        assert f"strategy {strategy}" in shown
        assert ("not asked" in shown) == (strategy == "mixture")
        assert ("mean of the members' probabilities" in shown) == (strategy == "mixture")
        assert ("all agreed in" in shown) == (strategy == "adafuse")


def test_all_responses_are_shown_with_their_seeds():
    engine = AdaFuseEngine([writes("one", "a b c", sure=0.6), writes("two", "a b c", sure=0.6)])
    drawn = engine.generate(">", max_words=1, temperature=1, seed=5, n=3, top_logprobs=2)
    shown = printed(drawn)
    for number, each in enumerate((drawn, *drawn.alternatives), start=1):
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
    assert "Reasoning\nso & so\n\nAnswer\nyes\n" in printed(generation)
