"""The limit of letters in words of scripts without spaces, on members that write such scripts."""

from collections.abc import Sequence

import pytest

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END

REPLY = "我们今天去公园看花。カメラを持って行きます。วันนี้เราไป the park 公园"
PIECES = (
    ["我们", "今天", "公园", "カメラ", "ます。", "วันนี้", " the", " park"],
    ["我们今天", "って", " p"],
)


def writer(name: str, pieces: Sequence[str]) -> FakeBackend:
    """A member that writes the reply in pieces of its own, or letter by letter."""

    def rule(text: str) -> dict[str, float]:
        rest = REPLY[len(text.removeprefix("Go:")) :]
        likely = max((each for each in pieces if rest.startswith(each)), key=len, default=rest[:1])
        return {likely or END: 0.8, "?": 0.1}

    return FakeBackend(name, rule, pieces)


@pytest.mark.quick
@pytest.mark.parametrize("count", [1, 2])
def test_the_limit_of_letters_divides_a_text_and_does_not_change_it(count: int) -> None:
    members = [writer(f"m{number}", PIECES[number]) for number in range(count)]
    rounds = []
    with AdaFuseEngine(members, strategy="fixed-1") as engine:
        for letters in (1, 4, 256):
            found = engine.generate("Go:", max_word_letters=letters, max_new_tokens=100)
            assert (found.text, found.finish_reason) == (REPLY, "stop")
            rounds.append(len(found.rounds))
    assert rounds[0] > rounds[1] > rounds[2]
