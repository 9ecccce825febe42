"""Training: a pack is equivalent to single prompts, and an interrupted run has the same result."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.batches import assemble
from training.optimizer import orthogonalize
from training.packing import Packer
from training.recipes import RECIPES, Recipe
from training.schedule import learning_rate_factor
from training.stages import Stage, stage_at
from training.tokenizers import build_tokenizer, copy_tokenizer
from training.train import main, plan_lanes
from training.trainer import Trainer
from training.world import LONG_TASKS, SKILLS, Names


def tiny(name: str) -> Recipe:
    return replace(RECIPES[name], layers=1, width=32, inner=48, heads=2, kv_heads=2)


def trainer(folder: Path, name: str = "wren", steps: int = 5) -> Trainer:
    return Trainer(
        tiny(name), folder, steps=steps, seed=5, tokens_per_step=512, tokenizer_scenes=60
    )


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    for _ in range(4):
        whole.train_step()
    first = trainer(tmp_path / "parts")
    for _ in range(2):
        first.train_step()
    first.save()
    second = trainer(tmp_path / "parts")
    assert second.resume()
    assert second.step == 2
    for _ in range(2):
        second.train_step()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=0, atol=1e-6)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.save()
    with pytest.raises(SystemExit, match="Choose another --work folder"):
        trainer(tmp_path, steps=9).resume()


def test_a_fresh_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    assert not trainer(tmp_path).resume()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_training_from_the_same_seed_is_repeatable(tmp_path: Path, name: str) -> None:
    losses = [trainer(tmp_path / run, name).train_step() for run in ("a", "b")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_tokenizer_files_depend_on_the_seed_only(tmp_path: Path, name: str) -> None:
    files = []
    for run in ("a", "b"):
        build_tokenizer(RECIPES[name], tmp_path / run, seed=5, n_scenes=60)
        files.append({path.name: path.read_bytes() for path in (tmp_path / run).iterdir()})
    assert files[0] == files[1]
    assert not any(str(tmp_path).encode() in content for content in files[0].values())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_branch_of_a_pack_is_predicted_like_a_prompt_of_its_own(
    tmp_path: Path, name: str
) -> None:
    run = trainer(tmp_path, name)
    stage = Stage(768, (2,), (2, 4), 4)
    pack = run.packer.draw_reading(Names(random.Random(4), "train"), stage)
    batch = assemble([[pack]], len(pack), random.Random(0), context_weight=0.1)
    with torch.no_grad():
        packed = run.model(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions
        ).logits[0]
        for branch, (_, first, last, skill) in zip(pack.branches, batch.spans, strict=True):
            alone = run.model(input_ids=torch.tensor([pack.prefix + branch.ids])).logits[0]
            expected = alone[-branch.n_answer - 1 : -1]
            torch.testing.assert_close(packed[first:last], expected, rtol=1e-4, atol=1e-4)
            assert batch.labels[0, first:last].tolist() == branch.ids[-branch.n_answer :]
            assert skill == branch.skill


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_pack_has_the_tokens_of_the_whole_text(tmp_path: Path, name: str) -> None:
    run = trainer(tmp_path, name)
    names = Names(random.Random(8), "train")
    packs = [run.packer.draw_reading(names, Stage(640, (1, 3), (2, 6), 4)) for _ in range(15)]
    packs += [run.packer.draw_problem(names) for _ in range(15)]
    packs += [run.long_packer.draw_long(names, Stage(1024, (1, 3), (2, 6), 4)) for _ in range(15)]
    for pack in packs:
        for branch in pack.branches:
            ids = pack.prefix + branch.ids
            again = run.tokenizer.encode(run.tokenizer.decode(ids), add_special_tokens=False)
            assert again == ids


@pytest.mark.quick
def test_every_member_sees_every_skill_with_its_own_emphasis() -> None:
    for recipe in RECIPES.values():
        assert set(recipe.long.long_tasks) == {*LONG_TASKS}
        for emphasis in filter(None, (recipe.emphasis, recipe.finish, recipe.long)):
            assert sum(emphasis.mix.values()) == pytest.approx(1.0)
            assert min(emphasis.mix.values()) >= 0.05
            assert emphasis.arithmetic >= 0.05
    mixes = [recipe.emphasis for recipe in RECIPES.values()]
    best = [max(mixes, key=lambda e: e.mix[skill]) for skill in ("people", "numbers", "not_stated")]
    assert best == mixes
    assert max(mixes, key=lambda e: e.arithmetic) is RECIPES["finch"].emphasis


@pytest.mark.quick
def test_the_learning_rate_falls_to_zero_twice() -> None:
    rates = [learning_rate_factor(step, 200, 300) for step in range(300)]
    assert max(rates) == 1.0
    assert rates[199] < 0.02
    assert 0.4 < max(rates[200:]) < 0.7
    assert rates[299] < 0.02
    assert min(rates) > 0


def test_the_last_part_of_training_has_its_own_stage_and_emphasis(tmp_path: Path) -> None:
    run = trainer(tmp_path, "finch", steps=30)
    run.step = run.main
    run.train_step()
    assert run.step == run.main + 1
    stages = [stage_at(1.0, random.Random(seed)) for seed in range(50)]
    assert {stage.length for stage in stages} == {512, 640, 1536}
    assert all(stage.same_kind >= 0.5 for stage in stages)


def test_a_third_part_has_its_own_learning_rate_and_half_of_it_are_agents(tmp_path: Path) -> None:
    run = Trainer(
        tiny("wren"),
        tmp_path,
        steps=11,
        agent_steps=6,
        seed=5,
        tokens_per_step=3072,
        tokenizer_scenes=60,
    )
    assert (run.tools_start, run.last) == (9, 15)
    rates = [learning_rate_factor(step, 9, 9, 15, 15) for step in range(9, 15)]
    assert 0 < min(rates) <= max(rates) < 0.6
    assert {span[3] for batch in run._batches() for span in batch.spans} <= {*SKILLS}
    run.step = run.tools_start
    read, agents = run._batches()
    assert {span[3] for span in read.spans} <= {*SKILLS}
    assert {span[3] for span in agents.spans} == {"tools"}
    assert agents.ids.shape == (2, 640)
    assert agents.mask.shape == (2, 1, 640, len(agents.prompt) + 640)
    run.step = run.last - 1
    _, later = run._batches()
    assert later.ids.shape == (3, 640)
    assert len(later.prompt) > len(agents.prompt)
    run.step = run.tools_start
    run.train_step()
    assert run.step == 10


def test_the_last_part_has_long_answers_beside_what_was_learned_before(tmp_path: Path) -> None:
    run = Trainer(
        tiny("finch"),
        tmp_path,
        steps=11,
        agent_steps=2,
        long_steps=6,
        seed=5,
        tokenizer_scenes=60,
    )
    assert (run.tools_start, run.long_start, run.last) == (11, 13, 19)
    rates = [learning_rate_factor(step, 9, 11, 13, 19) for step in range(13, 19)]
    assert 0 < min(rates) <= max(rates) < 0.6
    run.step = run.long_start
    read, agents, long = ({span[3] for span in batch.spans} for batch in run._batches())
    assert read <= {*SKILLS}
    assert agents == {"tools"}
    assert long <= {*LONG_TASKS}
    assert "reasoning" in long
    assert len(long) > 1
    run.train_step()
    assert run.step == 14


def test_the_last_part_can_start_from_trained_members(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first")
    first.train_step()
    first.export(tmp_path / "out")
    copy_tokenizer(tmp_path / "out" / "wren", tmp_path / "second" / "wren")
    second = trainer(tmp_path / "second")
    second.start_from(tmp_path / "out" / "wren")
    assert second.step == second.long_start
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 24, 8), (2, 8, 24), (1, 16, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=generator)))
        assert values.min() > 0.3
        assert values.max() < 1.4


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_member_is_trained_to_the_end(workers: int) -> None:
    lanes = plan_lanes(["a", "b", "c"], 100, workers)
    assert len(lanes) == min(workers, 3)
    until: dict[str, int] = {}
    for lane in lanes:
        for member, step in lane:
            until[member] = max(until.get(member, 0), step)
    assert until == {"a": 100, "b": 100, "c": 100}


def test_two_workers_share_three_members_evenly() -> None:
    assert plan_lanes(["a", "b", "c"], 100, 2) == [
        [("c", 50), ("a", 100)],
        [("b", 100), ("c", 100)],
    ]
    assert plan_lanes(["a", "b", "c"], 140, 2, first=100)[0] == [("c", 120), ("a", 140)]


@pytest.mark.quick
def test_help_and_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "--resume" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_the_packer_draws_only_what_its_stage_allows(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    assert isinstance(run.packer, Packer)
    pack = run.packer.draw_reading(Names(random.Random(1), "train"), Stage(256, (1,), (2, 3), 3))
    assert 1 <= len(pack.branches) <= 4
