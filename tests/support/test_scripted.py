"""The scripted members of these tests write what they are told, wherever they are run."""

from __future__ import annotations

import pytest

from adafuse_llm import AdaFuseEngine
from tests.support.models import CHATML, STRICT
from tests.support.scripted import save_scripted, scripted, scripted_engine, scripted_model

REPLY = (
    'Two lines,\nthen a call: <tool_call>\n{"name": "add", "arguments": {"a": [1, 2], "b": "é"}}\n'
    "</tool_call>\n\n\U0001f600\U0001f469\u200d\U0001f680 中文没有空格。  `x = {}`\tAnswer: done"
)


def ask(text):
    return [{"role": "user", "content": text}]


def reply(prompt):
    return REPLY if "everything" in prompt else "I do not know."


@pytest.mark.parametrize("form", ["auto", "path"])
def test_members_with_different_tokenizers_write_the_reply_of_the_script(form):
    with scripted_engine(reply, form=form, max_new_tokens=400) as engine:
        done = engine.generate(messages=ask("Say everything"))
        assert (done.text, done.finish_reason) == (REPLY, "stop")
        turns = [*ask("Say everything"), {"role": "assistant", "content": REPLY}, *ask("Again?")]
        assert engine.generate(messages=turns).text == REPLY
        assert engine.generate(messages=ask("Again?")).text == "I do not know."
        assert {getattr(b, "form", None) for b in engine.backends} == {
            "tree" if form == "auto" else "path"
        }


def test_plain_prompts():
    with scripted_engine(reply, max_new_tokens=400) as engine:
        assert engine.generate("Question: everything?\nAnswer:").text == " " + REPLY
        assert engine.generate("Question: everything?\nAnswer: ").text == REPLY
        assert engine.generate("Question: everything?\nAnswer:\n").text == REPLY
        assert engine.generate("A: few\nQ: shots\nA:").text == " I do not know."
        assert engine.generate("A plain\nprompt").text == "\nI do not know."
        assert engine.generate("A plain\nprompt of everything").text == "\n" + REPLY


@pytest.mark.quick
def test_members_that_disagree():
    with scripted_engine(lambda _: "yes, I do", lambda _: "no, never") as engine:
        done = engine.generate(messages=ask("Well?"))
        assert {c.text.split(",")[0] for c in done.rounds[0].candidates} >= {"yes", "no"}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("kind", "template"), [("bytelevel", CHATML), ("sentencepiece", STRICT)])
def test_plain_generation_of_transformers(kind, template, use_cache):
    model, known = scripted_model(reply, kind, template)
    prompt = known.apply_chat_template(
        ask("Say everything"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    done = model.generate(**prompt, max_new_tokens=400, do_sample=False, use_cache=use_cache)
    assert known.decode(done[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) == REPLY


@pytest.mark.quick
def test_padded_batches():
    model, known = scripted_model(reply)
    known.pad_token, known.padding_side = known.eos_token, "left"
    prompts = ["Question: everything?\nAnswer:", "A: 1\nA:"]
    batch = known(prompts, return_tensors="pt", padding=True)
    done = model.generate(**batch, max_new_tokens=400, do_sample=False)
    texts = known.batch_decode(done[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert texts == [" " + REPLY, " I do not know."]


def test_members_without_a_template_are_prompted_plainly():
    with AdaFuseEngine([scripted(reply, "unigram", template=None)]) as engine:
        assert engine.generate(messages=ask("Say everything"), max_new_tokens=400).text == REPLY


def test_saved_members_load_by_path(tmp_path):
    paths = [
        save_scripted(tmp_path / "ink", reply),
        save_scripted(tmp_path / "quill", reply, "sentencepiece", STRICT),
    ]
    with AdaFuseEngine.from_pretrained(paths) as engine:
        assert engine.generate(messages=ask("Say everything"), max_new_tokens=400).text == REPLY
