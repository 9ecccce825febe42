"""The vocabulary of a GGUF file: text to tokens with llama.cpp, and back."""

import copy
import functools
import gc
import random
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from adafuse_llm.backends.huggingface.vocabulary import HuggingFaceVocabulary
from adafuse_llm.backends.llamacpp.vocabulary import LlamaVocabulary
from adafuse_llm.errors import EngineClosedError, UnsupportedModelError
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.conversation import Tool, check_conversation
from tests.backends import gguf_members
from tests.support.gguf_files import rewrite_gguf
from tests.support.gguf_vocabularies import read_vocabulary, write_pieces, write_vocabulary
from tests.support.models import CHATML, tokenizer
from tests.support.sizes import sized
from tests.support.templates import FAMILIES, TOOL_FAMILIES, family_tokenizer, turn

pytestmark = pytest.mark.gguf

PRE_TOKENIZERS = {"llama3": "llama-bpe", "wren": "qwen2"}
KINDS = ("bytelevel", "sentencepiece", "gemma", "legacy", "llama2", "llama3", *gguf_members.NAMES)
PARTS = (
    *("the", "light", "Orrin", "a", "Z", "9", "1234", "don't", "I'LL", "_", "{}", "!", "?!", "..."),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\x00"),
    *("\u00e9", "u\u0308", "\u4e2d\u6587", "\U0001f469\u200d\U0001f467", "\u0928\u092e"),
    *("<s>", "</s>", "<unk>", "<|end|>", "<|eot_id|>", "[|done|]", "<end>", "<0x0A>", "[INST]"),
    "def f(x):\n    return x",
)


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp())


@functools.cache
def hugging_face(kind: str) -> Any:
    return gguf_members.tokenizer(kind) if kind in gguf_members.NAMES else tokenizer(kind)


def llama(known: Any, **options: Any) -> LlamaVocabulary:
    """The vocabulary of a new GGUF file with the tokens of a Hugging Face tokenizer."""
    path = folder() / f"{len(list(folder().iterdir()))}.gguf"
    return read_vocabulary(write_vocabulary(path, known, **options))


@functools.cache
def llama_of(kind: str) -> LlamaVocabulary:
    return llama(hugging_face(kind), pre=PRE_TOKENIZERS.get(kind, "gpt-2"))


def random_texts(count: int, *, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PARTS, k=rng.randint(0, 14))) for _ in range(count)]


def encode(known: Any, text: str) -> list[int]:
    return list(known.encode(text, add_special_tokens=False, split_special_tokens=True))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "wren"])
def test_tokens_are_those_of_the_hugging_face_tokenizer(kind: str) -> None:
    # Unlike llama.cpp and sentencepiece, transformers adds no space to a text that begins with one.
    # It removes U+0000 from texts in SentencePiece vocabularies.
    drawn = random_texts(sized(1_000, 3_000))
    texts = [text for text in drawn if not text.startswith(" ") and "\0" not in text]
    known, vocabulary = hugging_face(kind), llama_of(kind).tokenizer
    assert len(vocabulary) == len(known)
    assert [encode(vocabulary, text) for text in texts] == [encode(known, text) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_continuations_are_exact_and_contain_no_control_token(kind: str) -> None:
    text = llama_of(kind)
    control = {i for i, token in text.tokenizer.added_tokens_decoder.items() if token.special}
    contexts, additions = random_texts(400, seed=1), random_texts(400, seed=2)
    for before, added in zip(contexts, additions, strict=True):
        context = text.codec.encode_prompt(before)
        tokens, exact = text.codec.encode_continuation(context, added)
        assert exact, added
        assert text.codec.decode_continuation(context, tokens) == added
        assert text.tokenizer.decode([*context, *tokens]) == text.tokenizer.decode(context) + added
        assert control.isdisjoint(tokens)
        assert text.tokenizer.decode(context).endswith(before)


CONVERSATION = [
    turn("system", " Be brief.\n"),
    turn("user", "Who keeps the light?  caf\u00e9 \U0001f600 <b>5 < 6</b> <|im_end|>"),
    turn("assistant", "\n\nThe keeper, <0.5 of the time.\n\n"),
    turn("user", "And </s> then?"),
]


CALL = {"id": "123456789", "name": "add", "arguments": {"a": 1, "b": "<|im_end|>"}}
CALLED = [
    turn("user", "add 1 and 2"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "123456789", "content": "3"},
]
ADD = Tool("add", "Add numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.mark.parametrize("name", [*FAMILIES, *TOOL_FAMILIES])
def test_templates_give_the_tokens_of_transformers(name: str) -> None:
    known = family_tokenizer(name)
    ours, theirs = llama(known).codec, TokenizerCodec(known)
    begun = [*CONVERSATION, turn("assistant", "The <|im_end|> kee")]
    for conversation in (
        check_conversation(CONVERSATION),
        check_conversation(CALLED, [ADD]),
        check_conversation(begun).continued(),
    ):
        assert ours.encode_conversation(conversation) == theirs.encode_conversation(conversation)
    assert ours.encode_prompt("Hello") == theirs.encode_prompt("Hello")  # with one beginning
    assert ours.template_facts == theirs.template_facts


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_a_conversation_begins_with_the_bos_token_that_the_header_asks_for(template: str) -> None:
    known = copy.deepcopy(tokenizer("gemma"))
    bos, end = known.bos_token_id, known.eos_token_id
    path = write_vocabulary(folder() / f"bos-{len(template)}.gguf", known, template=template)
    asking = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    text = read_vocabulary(rewrite_gguf(path, path.with_suffix(".bos.gguf"), entries=asking))
    whole = check_conversation(CONVERSATION)
    continued = check_conversation([*CONVERSATION, turn("assistant", "The kee")]).continued()
    for ids in (
        text.codec.encode_prompt("Hello"),
        text.codec.encode_conversation(whole),
        text.codec.encode_conversation(continued),
    ):
        assert (ids[0], ids.count(bos), ids[-1] == end) == (bos, 1, False)


def test_a_file_without_special_tokens_has_none() -> None:
    # llama.cpp assumes that token 11 begins and ends texts, and that <|im_end|> ends them
    letters = [*(chr(33 + number) for number in range(40)), "<|im_end|>"]
    types = [TokenType.CONTROL if number in (11, 40) else TokenType.NORMAL for number in range(41)]
    path = write_pieces(folder() / "plain.gguf", "gpt2", letters, types, tokenizer_pre="gpt-2")
    text = read_vocabulary(path)
    assert text.tokenizer.end_ids == frozenset()
    assert text.tokenizer.special_tokens_map == {}
    assert not text.codec.has_chat_template


@pytest.mark.parametrize("reply_ends", ["<|eot_id|>", "<|end|>", "\n", "word"])
def test_ends_are_those_of_the_file_and_of_its_template(reply_ends: str) -> None:
    known = copy.deepcopy(tokenizer("bytelevel"))
    ends = ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<reponame>", "</s>"]
    known.add_tokens(ends, special_tokens=True)  # llama.cpp takes all of them for ends
    template = "{% for m in messages %}{{ m.content }}\n" + reply_ends + "{% endfor %}"
    named = {known.eos_token, reply_ends} & set(known.get_vocab())
    assert llama(known, template=template).tokenizer.end_ids == set(
        known.convert_tokens_to_ids([*named])
    )
    for other in ("{{ raise_exception('no') }}", "{{ messages[0].content }}"):
        assert llama(known, template=other).tokenizer.end_ids == {known.eos_token_id}


@pytest.mark.parametrize("pre", ["gpt-2", "tekken", "default"])
def test_a_word_of_any_length_becomes_tokens(pre: str) -> None:
    # llama.cpp itself ends the process at the second of these texts
    vocabulary = llama(tokenizer("bytelevel", CHATML), pre=pre).tokenizer
    for text in ("ab" * 1_000, "ab" * 50_000, " " * 50_000, "-!" * 50_000, "\u4e2d" * 50_000):
        assert vocabulary.decode(encode(vocabulary, text)) == text
    (control,) = vocabulary.encode("<|im_end|>")
    for length in range(9_980, 10_010):  # the first cut is at 10,000 characters
        text = f"{'a-' * (length // 2)}<|im_end|>{'a' * 1_500}"
        assert vocabulary.encode(text).count(control) == 1
        assert control not in encode(vocabulary, text)


def test_a_text_of_ten_thousand_words_takes_less_than_two_seconds() -> None:
    codec = llama_of("wren").codec
    text = "The keeper said \u4e2d that the light is long. " * 1_100
    start = time.process_time()
    tokens, exact = codec.encode_continuation(codec.encode_prompt("Go."), text)
    assert time.process_time() - start < 2  # a tenth of it, if no time is lost
    assert exact
    assert len(tokens) > 10_000


@pytest.mark.parametrize("kind", ["bytelevel", "wren"])
def test_grammars_allow_the_tokens_that_they_allow_in_transformers(kind: str) -> None:
    import llguidance

    text, known = llama_of(kind), hugging_face(kind)
    assert text.follows_grammars
    size = len(text.tokenizer) + 3  # models often have logits that no token uses
    tokenizers = [
        each.grammar_tokenizer(size, text.tokenizer.end_ids)
        for each in (text, HuggingFaceVocabulary(known))
    ]
    for pattern in (r"[a-z ]+\.", r'\{"a": -?[0-9]+\}', "(\u4e2d|\U0001f600)+ end"):
        grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
        matchers = [llguidance.LLMatcher(each, grammar) for each in tokenizers]
        for _ in range(12):
            masks = [matcher.compute_bitmask() for matcher in matchers]
            assert masks[0] == masks[1]
            allowed = [i for i in range(size) if masks[0][i // 8] >> i % 8 & 1]
            assert allowed
            token = allowed[len(allowed) // 2]
            if token in text.tokenizer.end_ids:
                break
            assert all(matcher.consume_token(token) for matcher in matchers)


def test_closing_waits_for_calls_that_run_and_refuses_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = llama(tokenizer("bytelevel"))
    entered, leave = threading.Event(), threading.Event()
    inner = text.tokenizer._tokenize

    def held(piece: str, **options: Any) -> Any:
        entered.set()
        assert leave.wait(10)
        return inner(piece, **options)

    monkeypatch.setattr(text.tokenizer, "_tokenize", held)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(text.tokenizer.encode, "The light")
        assert entered.wait(10)
        closing = pool.submit(text.tokenizer.close)
        time.sleep(0.1)
        assert not closing.done()
        leave.set()
        assert text.tokenizer.decode(running.result(10)) == "The light"
        closing.result(10)
    text.tokenizer.close()
    with pytest.raises(EngineClosedError, match="is closed"):
        text.codec.encode_prompt("The light")


def test_a_file_is_freed_as_soon_as_nothing_uses_it() -> None:
    gc.disable()  # a cycle would keep the weights until it runs
    try:
        text = llama(tokenizer("bytelevel"))
        text.codec.decode_continuation(text.codec.encode_prompt("The light"), [70])
        model = weakref.ref(text.tokenizer._model)
        del text
        assert model() is None
    finally:
        gc.enable()


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def test_a_vocabulary_that_cannot_write_every_text_is_refused(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *BYTES[:-1], "a"]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 255, TokenType.NORMAL]
    for path, kind in (
        (write_pieces(tmp_path / "none.gguf", "no_vocab", [], [], vocab_size=3), "no_vocab"),
        (write_pieces(tmp_path / "bytes.gguf", "llama", pieces, types), "llama"),
        (write_pieces(tmp_path / "unigram.gguf", "t5", pieces, types), "t5"),
    ):
        with pytest.raises(UnsupportedModelError, match=rf"member '.*' .*\('{kind}'\)"):
            read_vocabulary(path)
