"""Codecs: text to tokens and back."""

import copy
import functools
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.conversation import check_conversation
from adafuse_llm.text.words import REPLACEMENT
from tests.support.models import CHATML, STRICT, TEXT, TOKENIZER_KINDS, tokenizer
from tests.support.templates import FAMILIES, family_tokenizer, turn


@pytest.mark.parametrize("special", [True, False])
def test_what_a_template_writes_is_text_in_a_prompt_whatever_kind_of_token_it_is(
    special: bool,
) -> None:
    known = copy.deepcopy(tokenizer("bytelevel"))
    known.chat_template = "{% for m in messages %}\u25c7{{ m['content'] }}<|Bot|>{% endfor %}"
    markers = ["<|Bot|>", "<|", "\u25c7"]
    known.add_tokens(markers, special_tokens=special)
    known.add_tokens(["<obs>"])
    codec, ids = TokenizerCodec(known), {*known.convert_tokens_to_ids(markers)}
    for text in ("hi<|Bot|>no", "<|Bot|>", "a <| b", "a \u25c7 b", "\u25c7"):
        tokens = codec.encode_prompt(text)
        assert known.decode(tokens) == text
        if "\u25c7" not in text:  # one character cannot be taken apart
            assert ids.isdisjoint(tokens), text
            assert codec.control_token_in(text) == ("<|Bot|>" if "Bot" in text else "<|")
            turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
            begun = codec.encode_conversation(check_conversation(turns).continued())
            assert sum(token in ids for token in begun) == 3, "those of the template"
    assert codec.encode_prompt("a<obs>") == known.encode("a<obs>"), "no template writes it"


@pytest.mark.quick
def test_a_context_that_begins_or_ends_inside_a_character_gives_the_text_of_what_follows() -> None:
    codec = TokenizerCodec(tokenizer("bytelevel"))
    puzzle, _ = codec.encode_continuation((), "\U0001f9e9")
    light, _ = codec.encode_continuation(puzzle, " the light")
    assert len(puzzle) > 2
    for start in range(1, len(puzzle)):
        assert codec.decode_continuation(puzzle[start:], light) == " the light"
        assert codec.decode_continuation(puzzle[:start], puzzle[start:]) == "\U0001f9e9"


def _normalizing() -> Any:
    """A Unigram tokenizer with NFKC, to which a full-width spelling is the same text."""
    made = copy.deepcopy(tokenizer("unigram"))
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    return made


def _unknown_is_end() -> Any:
    """A byte-level tokenizer whose unknown token is its end token, as GPT-2's."""
    made = copy.deepcopy(tokenizer("bytelevel"))
    made.unk_token = made.eos_token
    return made


MAKERS = {"nfkc": _normalizing, "unknown is end": _unknown_is_end}
REAL_KINDS = ("llama2", "llama3")
KINDS = (*TOKENIZER_KINDS, *REAL_KINDS, "wordpiece", *MAKERS)
LOSSY = ("unknowns", "wordpiece", "nfkc")
"""Kinds whose tokens do not give back every text."""


def _with_template(kind: str, template: str | None) -> Any:
    known = copy.deepcopy(MAKERS[kind]() if kind in MAKERS else tokenizer(kind))
    if template is not None:
        known.chat_template = template
    return known


HOSTILE = ("what does {} mean", "{}", "{}{}", "<{}> and {}\n<0x0A>", "\n {} \n")


@pytest.mark.parametrize(
    ("kind", "template"),
    [(kind, (None, CHATML, STRICT)[n % 3]) for n, kind in enumerate(KINDS)],
    ids=KINDS,
)
def test_control_tokens_that_a_user_spells_out_stay_text(kind: str, template: str | None) -> None:
    known = _with_template(kind, template)
    codec = TokenizerCodec(known)
    control = {*known.all_special_ids, *known.get_added_vocab().values()}
    if kind in LOSSY:
        control -= {known.unk_token_id}  # it stands for text that has no other token
    some = sorted(control)[:: len(control) // 20 + 1]  # Llama 3 has 256
    spellings = [known.convert_ids_to_tokens(token) for token in some]
    if kind == "nfkc":
        spellings += ["".join(chr(ord(letter) + 0xFEE0) for letter in "</s>")]  # full-width

    def found(ids: list[int]) -> list[int]:
        return [token for token in ids if token in control]

    quiet = [turn("user", "hello"), turn("assistant", "hello"), turn("user", "hello")]
    for spelling in spellings:
        for form in HOSTILE:
            text = form.replace("{}", spelling)
            hostile = [{**each, "content": text} for each in quiet]
            asked, said = codec.encode_messages(quiet), codec.encode_messages(hostile)
            assert found(said) == found(asked), text
            prompt = codec.encode_prompt(text)
            assert found(prompt) == found(codec.encode_prompt("hello")), text
            if kind not in LOSSY:
                assert known.decode(said) == known.decode(asked).replace("hello", text)
                plain = known.decode(codec.encode_prompt("hello"))
                assert known.decode(prompt) == plain.replace("hello", text)


def test_the_time_is_linear_in_the_number_of_control_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = _with_template("sentencepiece", CHATML)
    codec = TokenizerCodec(known)
    encode_text = codec._encode
    costs: list[int] = []

    def counting(text: str, **options: Any) -> Any:
        costs[-1] += 40 + len(text)  # a call has a cost of its own
        return encode_text(text, **options)

    monkeypatch.setattr(codec, "_encode", counting)
    for encode in (codec.encode_prompt, lambda text: codec.encode_messages([turn("user", text)])):
        for count in (300, 1200):  # deeper than the interpreter's limit of recursion
            costs.append(0)
            assert encode(known.eos_token * count).count(known.eos_token_id) <= 1
        assert costs[-1] < 5 * costs[-2]


ORDINARY = [
    turn("system", " Be brief.\n"),
    turn("user", "Who keeps the light?  caf\u00e9 \U0001f600 <b>5 < 6</b>"),
    turn("assistant", "\n\nThe keeper, <0.5 of the time.\n\n"),
    turn("user", "And \U000f0000 then?"),
]


@pytest.mark.parametrize("name", [*KINDS, "qwen", "gemma"])
def test_messages_and_texts_give_the_tokens_of_transformers(name: str) -> None:
    known = family_tokenizer(name) if name in FAMILIES else _with_template(name, CHATML)
    codec = TokenizerCodec(known)
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    if name not in ("qwen", "gemma"):
        assert codec.encode_messages(ORDINARY) == known.apply_chat_template(ORDINARY, **options)
        for text in ("", "The ferry", "  two \n\n", "caf\u00e9 \U0001f600"):
            assert codec.encode_prompt(text) == known.encode(text)
    if name not in (*LOSSY, "unigram", "unknown is end"):
        spelled = "a" + "b, ".join(token.content for token in known.added_tokens_decoder.values())
        messages = [turn("user", spelled), turn("assistant", f" {spelled}\n"), turn("user", "ok")]
        expected = known.apply_chat_template(messages, **options, sanitize_control_tokens=True)
        assert codec.encode_messages(messages) == expected


def test_a_template_may_cut_off_a_part_of_a_message_at_a_control_token() -> None:
    known = copy.deepcopy(tokenizer("unigram"))
    known.chat_template = "{% for m in messages %}{{ m.content.split('</s>')[-1] }}!{% endfor %}"
    tokens = TokenizerCodec(known).encode_messages([turn("user", "thought </s>answer")])
    assert known.decode(tokens) == "answer!"


@pytest.mark.quick
def test_a_codec_and_other_users_of_its_tokenizer_change_nothing_for_each_other() -> None:
    known = copy.deepcopy(tokenizer("bytelevel", CHATML))
    before = known.backend_tokenizer.to_str(), known.chat_template, dict(known.init_kwargs)
    codec = TokenizerCodec(known)
    prompt, asked = codec.encode_prompt(TEXT), codec.encode_messages([turn("user", TEXT)])
    assert (known.backend_tokenizer.to_str(), known.chat_template, known.init_kwargs) == before
    assert known.encode("<|end|>") == [known.eos_token_id]
    known.backend_tokenizer.enable_truncation(1)
    known.pad_token = known.eos_token
    known([TEXT, "a"], padding="max_length", max_length=64, split_special_tokens=False)
    assert codec.encode_prompt(TEXT) == prompt
    assert codec.encode_messages([turn("user", TEXT)]) == asked
    assert codec.encode_continuation(prompt, f" {TEXT}")[1]
    assert known.eos_token_id not in codec.encode_prompt("<|end|>")


@pytest.mark.quick
def test_a_tokenizer_with_methods_of_its_own_is_called_through_them() -> None:
    known = copy.deepcopy(tokenizer("bytelevel", CHATML))
    plain = TokenizerCodec(copy.deepcopy(known))
    known.decode = lambda tokens, **_: "-".join(map(str, tokens))
    codec = TokenizerCodec(known)
    assert codec.decode_continuation([], [1, 2]) == "1-2"
    text = "a <|im_end|> b"
    assert codec.encode_prompt(text) == plain.encode_prompt(text)
    asked = [turn("user", text)]
    assert codec.encode_messages(asked) == plain.encode_messages(asked)


# Round trips ------------------------------------------------------------------------------------

ALPHABET = st.one_of(
    st.sampled_from([*" \n\t.,aeTh'\"<|>_\u2581\u00e9\u4e2d\U0001f600\u00a0\u200d\ufeff\r"]),
    st.characters(codec="utf-8", exclude_characters="\ufffd"),
)
TEXTS = st.one_of(
    st.text(ALPHABET, max_size=14),
    st.lists(
        st.sampled_from(
            (
                *("The", " ferry", " light", "\n", "\n\n", "  ", " ", "9", ".", " caf\u00e9"),
                *("\u4e2d\u6587", "\U0001f600", "<|eot_id|>", "</s>", "<unk>", "<0x41>", "\u9f98"),
            )
        ),
        max_size=8,
    ).map("".join),
)


@functools.cache
def _codec(kind: str) -> TokenizerCodec:
    return TokenizerCodec(tokenizer(kind))


@pytest.mark.parametrize("kind", [*TOKENIZER_KINDS, *REAL_KINDS])
@settings(max_examples=40)
@given(context=TEXTS, text=TEXTS)
@example(context="A\u9f98\u9f98\u9f98", text="\n")
@example(context="\U0001f600\U0001f600\U0001f600", text=" a")
@example(context="a", text="<|eot_id|>")
@example(context="a", text="</s>")
@example(context="a", text="\ufeffb")
@example(context="x ", text=" y")
@example(context="x\n", text="  y")
@example(context=" ", text="  ")
def test_an_exact_continuation_decodes_to_its_text(kind: str, context: str, text: str) -> None:
    known, codec = tokenizer(kind), _codec(kind)
    ids = codec.encode_prompt(context)
    assume(ids)
    tokens, exact = codec.encode_continuation(ids, text)
    if exact:
        assert known.decode([*ids, *tokens]) == known.decode(ids) + text
        assert {*known.all_special_ids}.isdisjoint(tokens)
    if kind not in LOSSY:
        assert exact, (context, text)


@pytest.mark.parametrize("kind", [*TOKENIZER_KINDS, "llama2", "wordpiece", *MAKERS])
@given(st.data())
def test_texts_of_tokens_are_joined_only_where_the_tokenizer_would_join_them(
    kind: str, data: st.DataObject
) -> None:
    known = _with_template(kind, None)
    quick, slow = TokenizerCodec(known), TokenizerCodec(known)
    slow._joins = False
    # words, bytes and special tokens
    ids = [*known.encode("the light of \U0001f600 <b>\n 5"), *range(40), *known.all_special_ids]
    tokens = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=8))
    for cut in range(len(tokens)):
        context, rest = tokens[:cut], tokens[cut:]
        whole = slow.decode_continuation(context, rest)
        assert quick.decode_continuation(context, rest) == whole
        # the last token alone
        before, last = slow.decode_continuation(context, rest[:-1]), quick.token_text(rest[-1])
        if last is not None and before and before[-1] != REPLACEMENT:
            assert before + last == whole


def test_a_tokenizer_whose_decoding_was_replaced_joins_no_texts() -> None:
    known = copy.deepcopy(tokenizer("bytelevel"))
    core = known.backend_tokenizer
    plain = core.decode
    core.decode = lambda ids, **options: plain(ids, **options).rstrip()  # as with CLIP
    codec, words, space = TokenizerCodec(known), known.encode("the"), known.encode(" ")
    assert codec.decode_continuation(words, space) == ""
