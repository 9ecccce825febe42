"""Chat templates in the manner of models that reason, and members with them."""

from collections.abc import Sequence
from typing import Any

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, Request
from adafuse_llm.decoding.member import MemberState
from adafuse_llm.text.codec import TokenizerCodec
from tests.support.models import CHATML, TokenizerKind, tokenizer
from tests.support.scripted import Script, scripted

QWEN = (
    "{%- set ns = namespace(asked=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.last or (thought and loop.index0 > ns.asked) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{- said + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""As Qwen 3: the member opens its reasoning itself, and a variable switches it off."""

DEEPSEEK = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|A|>' + m.content.split('</think>')[-1].strip() + '<|end|>' }}"
    "{%- else %}{{- '<|U|>' + m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|A|><think>\n' }}{% endif %}"
)
"""As DeepSeek R1: the template opens the reasoning, and nothing switches it off."""

SMOL = (
    "{%- set enable_thinking = enable_thinking | default(true) %}"
    "{%- if messages[0].role == 'system' and '/no_think' in messages[0].content %}"
    "{%- set enable_thinking = false %}{% endif %}"
    "{{- '<|im_start|>system\nMode: ' + ('/think' if enable_thinking else '/no_think') }}"
    "{{- '<|im_end|>\n' }}{%- for m in messages %}{%- generation %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""As SmolLM 3: also the system message switches reasoning off; with a block ``generation``."""

GRANITE = (
    "{%- if thinking %}{{- '<|sys|>Reason in <think></think>.<|end|>' }}{% endif %}"
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
"""As Granite 3: reasoning is off unless a variable switches it on."""

TEMPLATES: dict[str, str | None] = {
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "smol": SMOL,
    "granite": GRANITE,
    "chatml": CHATML,
    "plain": None,
}


def codec(name: str, kind: str = "bytelevel") -> TokenizerCodec:
    return TokenizerCodec(tokenizer(kind, TEMPLATES[name]))


def decoded(codec: Any, tokens: list[int]) -> str:
    return str(codec.decode_continuation([], tokens))


def thinkers(*names: str, script: Script = lambda _: "Orrin.", **config: Any) -> AdaFuseEngine:
    """An engine of scripted members with these `TEMPLATES`, named after them.

    A number after a hyphen tells members with the same template apart.
    """
    members = [
        scripted(script, name=name, template=TEMPLATES[name.split("-")[0]]) for name in names
    ]
    return AdaFuseEngine(members, AdaFuseConfig(**config))


def members_of(engine: AdaFuseEngine, messages: Any, **options: Any) -> Sequence[MemberState]:
    (job,) = engine._jobs(Request(messages=messages, options=options))
    return job.members


def prompts(engine: AdaFuseEngine, messages: Any, **options: Any) -> tuple[dict[str, str], str]:
    """The prompts that members read, by name, and the prefix of the reply."""
    members = members_of(engine, messages, **options)
    texts = {each.name: decoded(each.codec, list(each.tree.ids)) for each in members}
    return texts, members[0].reply_prefix


def continuing(*kinds: TokenizerKind) -> AdaFuseEngine:
    """Members that write one sentence; the templates of two of them differ."""
    sentence = "The keeper of the light is Anna."
    templates: list[Any] = [CHATML, None, DEEPSEEK.replace("<think>\n", "")]
    members = [
        scripted(lambda _: sentence, kind, name=f"m{n}", template=template)
        for n, (kind, template) in enumerate(zip(kinds, templates, strict=False))
    ]
    return AdaFuseEngine(members, AdaFuseConfig(continue_final_message=True))
