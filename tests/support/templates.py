"""Chat templates in the manner of well-known families of models, with tokenizers to match.

What is kept of each family is what messages meet there: which roles it takes, whether turns have
to alternate, whether it trims, where it puts the system message, which tokens are control tokens.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from adafuse_llm.text.conversation import Message
from tests.support.models import tokenizer


@dataclass(frozen=True)
class Family:
    """A chat template and its tokens.

    Attributes:
        control: other tokens that are not text.
        adds_bos: whether the tokenizer adds `bos` to plain text, too.
        parts: whether it takes content as a list of parts only, and nothing of text.
        tool_use: a second template, for conversations with tools.
    """

    template: str
    eos: str
    bos: str | None = None
    control: tuple[str, ...] = ()
    adds_bos: bool = False
    parts: bool = False
    tool_use: str | None = None


ALTERNATING = (
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('user and assistant have to take turns') }}{% endif %}"
)
"""For loops over messages `m` without a system message."""

LEADING_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}"
    "{% set turns = messages %}{% endif %}"
)
"""Sets `system` and `turns`."""

CHATML_TURN = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
OPENS_REPLY = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
LLAMA_TURN = (
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{- m.content | trim + '<|eot_id|>' }}"
)
LLAMA_OPENS_REPLY = (
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

FAMILIES: dict[str, Family] = {
    "qwen": Family(
        "{%- if messages[0].role != 'system' %}"
        "{{- '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}"
        "{%- for m in messages %}" + CHATML_TURN + "{% endfor %}" + OPENS_REPLY,
        eos="<|im_end|>",
        control=("<|im_start|>", "<|endoftext|>"),
    ),
    "llama3": Family(
        "{{- bos_token }}"
        "{%- for m in messages %}" + LLAMA_TURN + "{% endfor %}" + LLAMA_OPENS_REPLY,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        control=("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
        adds_bos=True,
    ),
    "mistral-3": Family(
        LEADING_SYSTEM + "{{- bos_token }}{%- for m in turns %}" + ALTERNATING + ""
        "{%- if m.role == 'user' %}"
        "{%- set opening = system + '\n\n' if loop.last and system else '' %}"
        "{{- '[INST]' + opening + m.content + '[/INST]' }}"
        "{%- elif m.role == 'assistant' %}{{- m.content | trim }}{{- eos_token }}"
        "{%- else %}{{- raise_exception('only user, assistant and one system message') }}"
        "{%- endif %}{% endfor %}",
        bos="<s>",
        eos="</s>",
        control=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        adds_bos=True,
    ),
    "gemma": Family(
        "{{- bos_token }}{%- if messages[0].role == 'system' %}"
        "{{- raise_exception('there is no system role') }}{% endif %}"
        "{%- for m in messages %}" + ALTERNATING + ""
        "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{{- m.content | trim }}{{- '<end_of_turn>\n' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}",
        bos="<bos>",
        eos="<eos>",
        control=("<start_of_turn>", "<end_of_turn>"),
        adds_bos=True,
    ),
    "idefics": Family(
        "{{- bos_token }}{%- for m in messages %}{{- m.role.capitalize() + ': ' }}"
        "{%- for part in m.content %}{%- if part.type == 'text' %}{{- part.text }}{% endif %}"
        "{%- endfor %}{{- '<end_of_utterance>\n' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}",
        bos="<s>",
        eos="<end_of_utterance>",
        parts=True,
    ),
}


LAST_IS_TOOL = (
    "{%- set follows = loop.index0 > 0 and turns[loop.index0 - 1].role == 'tool' %}"
    "{%- set is_followed = not loop.last and turns[loop.index0 + 1].role == 'tool' %}"
)
"""Sets `follows` and `is_followed`: whether a result comes before or after a message of `turns`."""

CHATML_CALL = (
    "{%- if call.function is defined %}{% set call = call.function %}{% endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\n' }}"
)
"""The end of a loop over calls, in the format that Qwen 3 and Hermes share."""

TOOL_FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        LEADING_SYSTEM + "{{- '<|im_start|>system\n' + (system or 'You are a helper.') }}"
        "{%- if tools %}"
        "{{- '\n\n# Tools\n\nFunctions, within <tools></tools>:\n<tools>' }}"
        "{%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}"
        "{{- '\n</tools>\n\nReturn calls as\n<tool_call>\n{\"name\": <function-name>, ' }}"
        "{{- '\"arguments\": <args-json-object>}\n</tool_call>' }}{% endif %}"
        "{{- '<|im_end|>\n' }}{%- for m in turns %}" + LAST_IS_TOOL + ""
        "{%- if m.role == 'tool' %}"
        "{%- if not follows %}{{- '<|im_start|>user' }}{% endif %}"
        "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{%- if not is_followed %}{{- '<|im_end|>\n' }}{% endif %}"
        "{%- elif m.role == 'assistant' %}"
        "{%- set said = m.content if m.content is string else '' %}"
        "{%- if '</think>' in said %}{% set said = said.split('</think>')[-1].lstrip('\n') %}"
        "{%- endif %}{{- '<|im_start|>assistant\n' + said }}"
        "{%- for call in m.tool_calls or [] %}"
        "{%- if said or not loop.first %}{{- '\n' }}{% endif %}" + CHATML_CALL + ""
        "{%- else %}" + CHATML_TURN + "{%- endif %}{% endfor %}" + OPENS_REPLY,
        eos="<|im_end|>",
        control=("<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "</think>"),
    ),
    "hermes": Family(
        "{%- for m in messages %}" + CHATML_TURN + "{%- endfor %}" + OPENS_REPLY,
        tool_use=LEADING_SYSTEM
        + "{{- '<|im_start|>system\nYou call functions within <tool_call></tool_call>. ' }}"
        "{{- 'Functions, within <tools></tools>: <tools> ' }}"
        "{%- for tool in tools %}{{- tool.function | tojson + '\n' }}{% endfor %}"
        "{{- '</tools>' }}{%- if system %}{{- '\n' + system }}{% endif %}{{- '<|im_end|>\n' }}"
        "{%- for m in turns %}" + LAST_IS_TOOL + ""
        "{%- if m.role == 'tool' %}"
        "{%- if not follows %}{{- '<|im_start|>tool' }}{% endif %}"
        '{{- \'\n<tool_response>\n{"name": "\' + m.name + \'", "content": \' }}'
        "{{- m.content | tojson + '}\n</tool_response>' }}"
        "{%- if not is_followed %}{{- '<|im_end|>\n' }}{% endif %}"
        "{%- elif m.role == 'assistant' and m.tool_calls is defined %}"
        "{{- '<|im_start|>assistant' }}{%- for call in m.tool_calls %}{{- '\n' }}"
        + CHATML_CALL
        + "{%- else %}"
        + CHATML_TURN
        + "{%- endif %}{% endfor %}"
        + OPENS_REPLY,
        eos="<|im_end|>",
        control=("<|im_start|>",),
    ),
    "llama3.1": Family(
        LEADING_SYSTEM + "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}"
        "{%- if tools %}{{- 'Environment: ipython\n' }}{% endif %}"
        "{{- system | trim + '<|eot_id|>' }}"
        "{%- if tools %}{%- if not turns %}"
        "{{- raise_exception('tools belong to the first message of a user') }}{% endif %}"
        "{{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with JSON for a call, ' }}"
        '{{- \'as {"name": function name, "parameters": its arguments}.\n\n\' }}'
        "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{% endfor %}"
        "{{- turns[0].content | trim + '<|eot_id|>' }}{% set turns = turns[1:] %}{% endif %}"
        "{%- for m in turns %}"
        "{%- if m.role in ('tool', 'ipython') %}"
        "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
        "{{- (m.content | tojson if m.content is iterable else m.content) + '<|eot_id|>' }}"
        "{%- elif 'tool_calls' in m %}{%- if m.tool_calls | length != 1 %}"
        "{{- raise_exception('a message has one call') }}{% endif %}"
        "{%- set call = m.tool_calls[0].function %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{%- if builtin_tools is defined and call.name in builtin_tools %}"
        "{{- '<|python_tag|>' + call.name + '.call(' }}{{- call.arguments | tojson }}{{- ')' }}"
        '{%- else %}{{- \'{"name": "\' + call.name + \'", "parameters": \' }}'
        "{{- call.arguments | tojson }}{{- '}' }}{% endif %}{{- '<|eot_id|>' }}"
        "{%- else %}" + LLAMA_TURN + "{% endif %}{% endfor %}" + LLAMA_OPENS_REPLY,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        control=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"),
        adds_bos=True,
    ),
    "mistral-3-tools": Family(
        LEADING_SYSTEM + "{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}"
        "{{- bos_token }}{%- set ns = namespace(at=0) %}"
        "{%- for m in turns %}"
        "{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
        "{%- if (m.role == 'user') != (ns.at % 2 == 0) %}"
        "{{- raise_exception('user and assistant have to take turns') }}{% endif %}"
        "{%- set ns.at = ns.at + 1 %}{% endif %}{% endfor %}"
        "{%- for m in turns %}{%- if m.role == 'user' %}"
        "{%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS] [' }}"
        "{%- for tool in tools %}"
        "{{- tool | tojson + ('' if loop.last else ', ') }}"
        "{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}{% endif %}"
        "{{- '[INST] ' + (system + '\n\n' if loop.last and system else '') }}"
        "{{- m.content + '[/INST]' }}"
        "{%- elif m.tool_calls is defined and m.tool_calls is not none %}"
        "{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
        "{%- if call.id is not defined or call.id | length != 9 %}"
        "{{- raise_exception('ids have nine letters and digits') }}{% endif %}"
        "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
        "{{- '' if loop.last else ', ' }}{% endfor %}{{- ']' + eos_token }}"
        "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}"
        "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}"
        "{{- raise_exception('ids have nine letters and digits') }}{% endif %}"
        '{{- \'[TOOL_RESULTS] {"content": \' + m.content | string + \', "call_id": "\' }}'
        "{{- m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
        "{%- else %}{{- raise_exception('only user, assistant and one system message') }}"
        "{%- endif %}{% endfor %}",
        bos="<s>",
        eos="</s>",
        control=(
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        adds_bos=True,
    ),
    "deepseek-3": Family(
        LEADING_SYSTEM + "{{- bos_token + system }}"
        "{%- for tool in tools or [] %}{{- '\n### ' + tool.function.name + '\n' }}"
        "{{- tool.function.description + '\n' + tool.function.parameters | tojson }}{% endfor %}"
        "{%- for m in turns %}"
        "{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}"
        "{%- elif m.role == 'assistant' and m.tool_calls is defined %}"
        "{{- '<｜Assistant｜>' + m.content }}{%- for call in m.tool_calls %}"
        "{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}"
        "{{- '\n' + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}"
        "{{- eos_token }}"
        "{%- elif m.role == 'assistant' %}"
        "{{- '<｜Assistant｜>' + m.content + eos_token }}"
        "{%- elif m.role == 'tool' %}"
        "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        control=(
            *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        adds_bos=True,
    ),
}
"""Families whose templates take tools (``tools=``), calls and results. They differ in how."""


@functools.cache
def family_tokenizer(name: str) -> Any:
    """A byte-level tokenizer with the control tokens and the template of a family."""
    family = FAMILIES.get(name) or TOOL_FAMILIES[name]
    made = copy.deepcopy(tokenizer("bytelevel"))
    control = dict.fromkeys([family.eos, *family.control, *([family.bos] if family.bos else [])])
    made.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in control], special_tokens=True
    )
    made.eos_token = family.eos
    if family.bos:
        made.bos_token = family.bos
    if family.adds_bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{family.bos}:0 $A:0",
            pair=f"{family.bos}:0 $A:0 $B:0",
            special_tokens=[(family.bos, made.convert_tokens_to_ids(family.bos))],
        )
    made.chat_template = family.template
    if family.tool_use:
        made.chat_template = {"default": family.template, "tool_use": family.tool_use}
    return made


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
