"""The beginning of a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.tree import is_allowed

pytestmark = pytest.mark.quick


def test_the_spaces_of_the_prompt_are_no_part_of_the_response() -> None:
    opening = Opening(spaces=4)
    assert opening.shown("      x") == "  x"
    assert opening.shown("  ") == ""
    assert opening.key("  ") != opening.key("   ")
    assert opening.after("   ") == Opening(spaces=1)
    assert opening.after("     x") == Opening()


def test_whitespace_before_a_reply_is_no_part_of_it() -> None:
    opening = Opening(is_reply=True)
    assert opening.shown("\n\t x ") == opening.key(" x ") == "x "
    assert opening.after("\n ") == opening
    assert opening.after("\n x").shown(" y") == " y"


@given(texts=st.lists(st.text("  a\n", max_size=4), min_size=1, max_size=8))
def test_masks_permit_the_tokens_that_lead_to_all_spaces(texts: list[str]) -> None:
    tokens = SpaceTokens(texts, excluded={0})
    usable = {t: text for t, text in enumerate(texts) if t and text}

    def leads(token: int, spaces: int) -> bool:
        text = usable[token]
        if text.startswith(" " * spaces):
            return True
        return set(text) == {" "} and any(leads(after, spaces - len(text)) for after in usable)

    for spaces in range(1, 9):
        expected = [token for token in usable if leads(token, spaces)]
        assert tokens.can_write(spaces) == bool(expected)
        permitted = [t for t in range(64) if is_allowed(tokens.mask(spaces), t)]
        assert permitted == expected
