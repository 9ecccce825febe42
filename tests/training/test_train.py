"""Training: a pack is equivalent to single prompts, and an interrupted run has the same result."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.embedded.tools import REACT_HEADER, TOOLS, calculate, look_up
from training.batches import assemble
from training.dialogues import FORMS, turns_of
from training.recipes import RECIPES
from training.schedule import Stage
from training.train import main
from training.trainer import Trainer
from training.world.agent_cases import AgentCase, ToolUse
from training.world.names import Names

CASE = AgentCase(
    "How much do 3 tickets for the Silesse Mill cost?",
    "59.64 crowns",
    "both",
    (
        ToolUse("look_up", "Silesse Mill", "[1] Visitors of the Silesse Mill pay 19.88 crowns."),
        ToolUse("calculate", "3 * 19.88", "59.64"),
    ),
)


def trainer(folder: Path, name: str = "wren", **options: Any) -> Trainer:
    steps = {"steps": 11, "agent_steps": 2, "long_steps": 6, **options}
    return Trainer(RECIPES[name], folder, seed=5, tokens_per_step=512, **steps)


def check_packed(run: Trainer, batch: Any, prompts: Iterable[list[int]], tolerance: float) -> None:
    """Compare the logits of each answer of a pack with those of its prompt alone."""
    with torch.inference_mode():
        packed = run.model.lm_head(run.hidden(batch))[0]
        for ids, (_, first, last, _) in zip(prompts, batch.spans, strict=True):
            alone = run.model(input_ids=torch.tensor([ids])).logits[0, first - last - 1 : -1]
            torch.testing.assert_close(packed[first:last], alone, rtol=tolerance, atol=tolerance)
            assert batch.labels[0, first:last].tolist() == ids[first - last :]


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, first = trainer(tmp_path / "whole"), trainer(tmp_path / "parts")
    assert not first.resume()
    assert [whole.train_step() for _ in range(3)][:2] == [first.train_step() for _ in range(2)]
    first.save()
    second = trainer(tmp_path / "parts")
    assert second.resume()
    second.train_step()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=0, atol=1e-6)
    with pytest.raises(SystemExit, match="Choose another --work folder"):
        trainer(tmp_path / "parts", steps=22).resume()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_branch_of_a_pack_is_like_a_prompt_of_its_own(tmp_path: Path, name: str) -> None:
    run = trainer(tmp_path, name)
    names = Names(random.Random(4), "train")
    packs = [run.packer.draw_reading(names, Stage(768, (2,), (2, 4), 4)) for _ in range(4)]
    packs += [run.packer.draw_problem(names) for _ in range(4)]
    packs += [run.long_packer.draw_long(names, Stage(1024, (1, 3), (2, 6), 4)) for _ in range(4)]
    for pack in packs:
        batch = assemble([[pack]], len(pack), random.Random(0), context_weight=0.1)
        prompts = [pack.prefix + branch.ids for branch in pack.branches]
        for ids in prompts:
            text = run.tokenizer.decode(ids)
            assert run.tokenizer.encode(text, add_special_tokens=False) == ids
        assert [last - first for _, first, last, _ in batch.spans] == [
            branch.n_answer for branch in pack.branches
        ]
        check_packed(run, batch, prompts, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_turn_of_an_agent_in_a_pack_is_like_a_prompt_of_its_own(
    tmp_path: Path, name: str
) -> None:
    run = trainer(tmp_path, name)
    after = AgentCase("Thanks!", "You are welcome.", "none", (), (CASE,))
    for form in FORMS:
        dialogues = [turns_of(case, form, TOOLS, earlier=True) for case in (CASE, after)]
        shared = run.packer.agent_prefix(form, TOOLS, "")
        packs = [run.packer.dialogue(turns, shared) for turns in dialogues]
        length, prompt = sum(map(len, packs)), run.packer.encode(shared)
        batch = assemble([packs], length, random.Random(0), context_weight=0.1, prompt=prompt)
        prompts = []
        for messages, reply in (turn for turns in dialogues for turn in turns):
            text = run.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            text += reply + run.tokenizer.eos_token
            prompts.append(run.tokenizer.encode(text, add_special_tokens=False))
        check_packed(run, batch, prompts, 1e-3)


def test_react_turns_are_those_of_llama_index() -> None:
    react = pytest.importorskip("llama_index.core.agent.react")
    types = pytest.importorskip("llama_index.core.agent.react.types")
    llms = pytest.importorskip("llama_index.core.llms")
    function_tool = pytest.importorskip("llama_index.core.tools").FunctionTool
    functions = [
        function_tool.from_defaults(each, description=each.__doc__) for each in (look_up, calculate)
    ]
    formatter = react.ReActChatFormatter.from_defaults(system_header=REACT_HEADER)
    described = [
        type(tool)(tool.name, tool.description, function.metadata.get_parameters_dict())
        for tool, function in zip(TOOLS, functions, strict=True)
    ]
    steps: list[object] = []
    question = [llms.ChatMessage(role="user", content=CASE.question)]
    turns = turns_of(CASE, "ReAct", described)
    for use, (messages, text) in zip((*CASE.uses, None), turns, strict=True):
        formatted = formatter.format(functions, question, steps)
        assert messages == [{"role": m.role.value, "content": m.content} for m in formatted]
        steps.append(react.ReActOutputParser().parse(text))
        if use is not None:
            steps.append(types.ObservationReasoningStep(observation=use.result))


@pytest.mark.slow
def test_a_smoke_run_makes_members_that_an_ensemble_can_use(tmp_path: Path) -> None:
    out = tmp_path / "members"
    assert main(["--smoke", "--work", str(tmp_path), "--out", str(out)]) == 0
    with AdaFuseEngine.from_pretrained([str(out / name) for name in RECIPES]) as engine:
        assert engine.generate("Question: Who?\nAnswer:", max_new_tokens=4).rounds
