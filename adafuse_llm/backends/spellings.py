"""The spellings by which members recognize tokens that they share."""

from __future__ import annotations

from collections.abc import Mapping


def shared_spellings(vocabulary: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the token ids of a vocabulary by a spelling that is the same in every member.

    Tokenizers mark a space with U+0120 or with U+2581. In the result, all spellings use U+2581. If
    two tokens get the same spelling, it stands for the token with the lower id.

    Args:
        vocabulary: token ids, as the tokenizer spells them.
        size: number of tokens of the model. Tokens with other ids are left out.
    """
    return {
        spelling.replace("\u0120", "\u2581"): int(token)
        for spelling, token in sorted(vocabulary.items(), key=lambda item: -int(item[1]))
        if int(token) < size
    }
