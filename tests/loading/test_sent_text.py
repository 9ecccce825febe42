"""The text side of a member, sent from the machine with its files to the engine's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm import LoadError, MemberSpec
from adafuse_llm.backends.gguf.header import read_facts, read_header, read_tokens
from adafuse_llm.backends.remote import MemberText
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading import gguf
from adafuse_llm.loading.plans import Plan, load_text, plan_members
from adafuse_llm.loading.sent_text import received_text, sent_text
from tests.support.gguf_files import embedded_gguf

DEFAULTS = {"dtype": "auto", "device_map": None, "trust_remote_code": False, "revision": None}
TEXT = "Ada  Brook built\n\tthe mill in 1874. 🙂 café 你好"
TURNS = [{"role": "user", "content": TEXT}]


def planned(path: Path) -> Plan:
    return plan_members([MemberSpec(str(path))], ["m"], DEFAULTS)[0]


def arrived(sent: Any) -> MemberText:
    """Return the text side on the engine's machine, where the member's path does not exist."""
    return received_text(MemberSpec("/elsewhere/m", ray={}), "m", DEFAULTS, sent)


def encodings(text: MemberText) -> Any:
    codec = text.codec
    return codec.encode_prompt(TEXT), codec.encode_messages(TURNS), text.token_texts


@pytest.mark.parametrize("path", member_paths(), ids=lambda path: path.name)
def test_the_text_side_encodes_as_where_it_comes_from(path: Path) -> None:
    plan = planned(path)
    assert encodings(arrived(sent_text(plan))) == encodings(load_text(plan))


def test_only_files_of_the_tokenizer_are_sent(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(member_paths()[0], folder)
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("code.py", "notes.md"):
        (folder / name).write_text("")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "brief.jinja").write_text("{{ messages }}")
    names = set(sent_text(planned(folder))["files"])
    assert {"config.json", "tokenizer.json", "additional_chat_templates/brief.jinja"} <= names
    assert not {"model.safetensors", "model.safetensors.index.json", "code.py", "notes.md"} & names


@pytest.mark.quick
@pytest.mark.parametrize("name", ["../outside.json", "/etc/adafuse.json", "a/../../outside.json"])
def test_a_file_outside_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(LoadError, match="member 'm' cannot be loaded: its machine sent") as caught:
        arrived({"files": {name: (b"{}", 2)}, "gguf": None})
    assert name in str(caught.value)


def test_the_header_of_a_gguf_file_is_enough(tmp_path: Path) -> None:
    path = embedded_gguf("finch", "q8_0")
    header, size = read_header(path)
    assert len(header) < size == path.stat().st_size
    hollow = tmp_path / path.name
    with hollow.open("wb") as file:
        file.write(header)
        file.truncate(size)
    assert read_tokens(hollow) == read_tokens(path)
    found, expected = vars(read_facts(hollow)), vars(read_facts(path))
    assert found.pop("files") == (hollow,)
    assert expected.pop("files") == (path,)
    assert found == expected


def test_a_gguf_file_is_sent_with_the_tokenizer_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu = SimpleNamespace(llama_supports_gpu_offload=lambda: False)
    monkeypatch.setattr(gguf, "load_library", lambda: no_gpu)  # reading files does not need it
    shutil.copy(embedded_gguf("wren", "q8_0"), tmp_path / "wren.gguf")
    for each in member_paths()[0].glob("*token*"):
        shutil.copy(each, tmp_path)
    plan = planned(tmp_path / "wren.gguf")
    sent = sent_text(plan)
    assert sent["gguf"] == "wren.gguf"
    assert len(sent["files"]["wren.gguf"][0]) < sent["files"]["wren.gguf"][1]
    assert encodings(arrived(sent)) == encodings(load_text(plan))
