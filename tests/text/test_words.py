"""Words, and the beginning of a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_llm.text.opening import Opening, SpaceTokens
from adafuse_llm.text.words import added, ends_before, is_closed, leading_space
from adafuse_llm.tree.tokens import is_allowed

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("", "abc", "abc"),
        ("ab", "abc", "c"),
        ("ab", "ab", ""),
        ("ab\ufffd", "ab\u00e9", "\u00e9"),
        ("ab\ufffd\ufffd", "ab\u20ac c", "\u20ac c"),
        ("ab\ufffd", "ab\ufffd\ufffd", "\ufffd"),
        ("ab\ufffd", "ab\ufffd c", " c"),
    ],
)
def test_added_text(before: str, after: str, new: str) -> None:
    assert added(before, after) == new


@pytest.mark.parametrize(
    ("word", "tokens", "closed"),
    [
        *((word, 1, True) for word in (".\n\n", "the ", "the\u00a0")),
        *((word, 1, False) for word in ("the", " the", " ", "\n\n", "", "\ufffd")),
        ("abc", 4, True),
        ("abc", 3, False),
        ("   ", 4, True),
        ("ab\ufffd", 6, False),  # three more tokens to complete a character
        ("ab\ufffd", 7, True),
    ],
)
def test_a_word_is_closed_by_whitespace_it_carries_and_by_its_length(
    word: str, tokens: int, closed: bool
) -> None:
    assert is_closed(word, tokens, 4) is closed


def test_whitespace_at_the_beginning() -> None:
    assert [leading_space(text) for text in (" \n a b", "a ", " \t")] == [" \n ", "", " \t"]


@pytest.mark.parametrize(
    ("word", "added", "letters", "ends"),
    [
        *(("the", more, 256, True) for more in (" light", "\n", "\u00a0x")),
        *((word, "re", 256, False) for word in ("the", "", " ")),
        ("the", "", 256, False),
        ("caf\ufffd", " ", 256, True),
        ("caf\ufffd", "\ufffd", 256, False),
        # scripts without spaces have a limit of letters
        ("\u4e2d", "\u6587", 256, False),
        ("\u4e2d", "\u6587", 1, True),
        ("\u4e2d", "\u6587", 2, False),
        ("\u4e2d", "\u6587\u5b57", 2, True),
        ("\u4e2d\u6587\u5b57", "\uff0c", 2, False),
        ("\u4e2d", "Python", 1, False),
        ("\u4e2dPython", "\u6587", 1, True),
        ("Python", "\u4e2d", 1, False),
        ("\u4e2d", "\U0001f600", 1, False),
        ("\u4e2d", "\ufffd", 1, True),
        ("\u0e01", "\u0e34", 1, False),
        ("\u0e01", "\u0e34\u0e01", 1, False),
        ("\u304b", "\u3099", 1, False),
        ("\u30ab", "\u30fc", 1, True),
        ("\ud55c", "\uad6d", 1, False),
        ("\u4e2d", " \u6587", 9, True),
        (" ", "\u4e2d", 1, False),
    ],
)
def test_a_word_ends_before_whitespace_and_after_its_limit_of_letters(
    word: str, added: str, letters: int, ends: bool
) -> None:
    assert ends_before(word, word + added, letters) is ends


def test_a_word_ends_nowhere_inside_a_character() -> None:
    assert not ends_before("caf\ufffd", "caf\u00e9", 256)
    assert not ends_before("\u4e2d\ufffd", "\u4e2d\u6587", 1)


# The beginning of a response --------------------------------------------------------------------


def test_the_spaces_of_the_prompt_are_no_part_of_the_response() -> None:
    opening = Opening(spaces=4)
    assert opening.visible("      x") == "  x"
    assert opening.visible("  ") == ""
    assert opening.advanced("   ") == Opening(spaces=1)
    assert opening.advanced("     x") == Opening()


def test_whitespace_before_a_reply_is_no_part_of_it() -> None:
    opening = Opening(is_reply=True)
    assert opening.visible("\n\t x ") == "x "
    assert opening.advanced("\n ") == opening
    assert opening.advanced("\n x").visible(" y") == " y"


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
