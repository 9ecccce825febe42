"""Packs: one prompt and many questions that branch off it, as tokens of one member."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any, Literal

from adafuse_llm.documents import Passage
from adafuse_llm.text.conversation import Tool
from training.dialogues import Form, turns_of
from training.layouts import SYSTEMS, Layout, draw_layout, plain_layout
from training.recipes import Emphasis, Recipe
from training.schedule import Stage
from training.world.agent_cases import AgentCase
from training.world.cases import Case, LongTask, Skill
from training.world.long_cases import ask_parts, ask_summary, draw_long_problem, draw_long_scene
from training.world.names import Names
from training.world.problems import draw_problem, draw_sum, draw_sum_list
from training.world.scenes import draw_scene

LearnedSkill = Skill | LongTask | Literal["tools"]


@dataclass(frozen=True)
class Branch:
    """Tokens of a question and its answer; the member learns the last ``n_answer`` of them.

    If ``parent`` is 0, the branch continues the prompt. Otherwise it continues the branch with that
    number; the first branch has the number 1.
    """

    ids: list[int]
    n_answer: int
    skill: LearnedSkill
    parent: int = 0


@dataclass(frozen=True)
class Pack:
    """Tokens of a prompt, and the branches that continue it."""

    prefix: list[int]
    branches: list[Branch]

    def __len__(self) -> int:
        return len(self.prefix) + sum(len(branch.ids) for branch in self.branches)


class Packer:
    """A source of packs for one member. It draws their texts and layouts, and encodes them."""

    def __init__(self, recipe: Recipe, tokenizer: Any, emphasis: Emphasis) -> None:
        self.recipe = recipe
        self.emphasis = emphasis
        self._tokenizer = tokenizer
        self._encoder = tokenizer.backend_tokenizer
        self._end = tokenizer.eos_token_id
        self._text_end = tokenizer.convert_tokens_to_ids(recipe.text_end)
        self._bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._newline = len(self.encode("\n"))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_after_newline(self, text: str) -> list[int]:
        """Return the tokens that ``text`` has after a line break."""
        return self.encode("\n" + text)[self._newline :]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _chat(self, layout: Layout, content: str, example: Case | None) -> str:
        messages = [{"role": "system", "content": layout.system}] if layout.system else []
        if layout.history and example:
            earlier = layout.before + layout.ask(example.question)
            messages += [
                {"role": "user", "content": earlier},
                {"role": "assistant", "content": example.answer},
            ]
        messages.append({"role": "user", "content": content})
        return self._render(messages)

    def pack(self, layout: Layout, cases: Sequence[Case]) -> Pack:
        """Encode cases about the same passages as one pack, in the given layout."""
        example: Case | None = None
        before, pattern = layout.before, layout.pattern
        if layout.history:
            example, cases = cases[0], cases[1:]
            before, pattern = "", "Question: {q}"
        content = before + pattern
        frame = content if layout.plain else self._chat(layout, content, example)
        # The shared part ends with the last line break before the question.
        cut = frame.rfind("\n", 0, frame.rindex("{q}")) + 1
        shared, rest = frame[:cut], frame[cut:]
        prefix = self.encode(shared)
        if layout.plain:
            prefix = self._bos + prefix
        branches = []
        for case in cases:
            question = self._branch_ids(rest.replace("{q}", case.question), bool(shared))
            if layout.plain:
                answer = [*self._encode_after_letter(" " + case.answer), self._text_end]
            else:
                answer = [*self._encode_after_newline(case.answer), self._end]
            branches.append(Branch(question + answer, len(answer), case.skill))
        return Pack(prefix, branches)

    def _branch_ids(self, text: str, continues: bool) -> list[int]:
        return self._encode_after_newline(text) if continues else self.encode(text)

    def _encode_after_letter(self, text: str) -> list[int]:
        return self.encode(":" + text)[len(self.encode(":")) :]

    def draw_reading(self, names: Names, stage: Stage) -> Pack:
        """Draw passages and questions about them, with the member's mix of skills."""
        rng = names.rng
        scene = draw_scene(names, rng.choice(stage.passages), stage.facts, stage.same_kind)
        layout = self._layout(rng, scene.passages)
        skills, weights = zip(*self.emphasis.mix.items(), strict=True)
        wanted = 2 if not layout.before and not layout.system else stage.questions
        cases: list[Case] = []
        drawn: set[tuple[str, str]] = set()
        for skill in rng.choices(skills, weights, k=4 * wanted):
            case = scene.ask(rng, skill)
            if case is None or (case.question, case.answer) in drawn:
                continue
            drawn.add((case.question, case.answer))
            cases.append(case)
            if len(cases) == wanted + bool(layout.history):
                break
        return self.pack(layout, cases)

    def _layout(self, rng: random.Random, passages: Sequence[Passage]) -> Layout:
        if self.emphasis.plain and rng.random() < self.emphasis.plain:
            return plain_layout(passages)
        return draw_layout(rng, passages)

    def draw_long(self, names: Names, stage: Stage) -> Pack:
        """Draw questions with long answers, with the member's mix of tasks."""
        rng = names.rng
        tasks, weights = zip(*self.emphasis.long_tasks.items(), strict=True)
        (task,) = rng.choices(tasks, weights)
        if task == "reasoning":
            return self.pack(self._problem_layout(rng), [draw_long_problem(names)])
        scene = draw_long_scene(names, rng.choice(stage.passages), stage.facts, stage.same_kind)
        layout = self._layout(rng, scene.passages)
        wanted = 1 if not layout.before and not layout.system else stage.questions
        wanted += bool(layout.history)
        cases: list[Case] = []
        for _ in range(3 * wanted):
            (task,) = rng.choices(tasks, weights)
            if task == "summary":
                case = ask_summary(rng, scene)
            else:
                emphasis = self.emphasis
                case = ask_parts(names, scene, emphasis.mix, emphasis.calculations)
            if case is None or any(case.question == other.question for other in cases):
                continue
            cases.append(case)
            if len(cases) == wanted:
                break
        if len(cases) <= bool(layout.history):
            return self.draw_long(names, stage)
        return self.pack(layout, cases)

    def draw_drill(self, names: Names) -> Pack:
        """Draw a list of names and values that the member has to repeat unchanged."""
        names.forget()
        rng = names.rng
        kinds = (names.person, names.place, names.institution, names.product, names.address)
        values = (names.year, names.count, names.price, names.date, names.time)
        n_items = rng.randint(3, 9)
        items = [rng.choice(kinds if rng.random() < 0.8 else values)() for _ in range(n_items)]
        text = rng.choice((", ", "; ", "\n")).join(items)
        return self.pack(Layout("", "Repeat: {q}"), [Case(text, text, "people")])

    def draw_problem(self, names: Names) -> Pack:
        """Draw one arithmetic problem, usually in the standard layout."""
        rng = names.rng
        layout = self._problem_layout(rng)
        if self.emphasis.sum_lists and rng.random() < self.emphasis.sum_lists:
            case = draw_sum_list(names)
        else:
            case = draw_sum(names) if rng.random() < 0.35 else draw_problem(names)
        return self.pack(layout, [case])

    def _problem_layout(self, rng: random.Random) -> Layout:
        if self.emphasis.plain and rng.random() < self.emphasis.plain:
            return plain_layout(())
        chance = rng.random()
        if chance < 0.75:
            layout = Layout("", "Question: {q}")
        elif chance < 0.85:
            layout = Layout("", "{q}")
        elif chance < 0.95:
            layout = Layout("", "Question: {q}", system=rng.choice(SYSTEMS[1:3]))
        else:
            layout = Layout("", "Question: {q}\nAnswer:", plain=True)
        return layout

    def agent_prefix(self, form: Form, tools: Sequence[Tool], system: str) -> str:
        """Return the beginning that all prompts of an agent with these tools share."""
        prompts = [
            self._render(turns_of(AgentCase(question, "", "none"), form, tools, system)[0][0])
            for question in ("A", "B")
        ]
        return prompts[0][: _shared_lines(prompts)]

    def dialogue(
        self, turns: Sequence[tuple[Sequence[Mapping[str, Any]], str]], prefix: str
    ) -> Pack:
        """Encode an agent's turns as branches that continue ``prefix``.

        A turn consists of the messages before it and its text. If the next prompt repeats a turn
        unchanged, the next branch continues the turn's branch. Otherwise it continues a branch that
        holds only the lines that both prompts share.
        """
        branches: list[Branch] = []
        at, parent, after_line = len(prefix), 0, True

        def add(text: str, answer: list[int]) -> int:
            ids = self._branch_ids(text, after_line) + answer
            branches.append(Branch(ids, len(answer), "tools", parent))
            return len(branches)

        prompts = [self._render(messages) for messages, _ in turns]
        replies = [text for _, text in turns]
        for prompt, text, follows in zip_longest(prompts, replies, prompts[1:], fillvalue=""):
            answer = [*self._encode_after_newline(text), self._end]
            whole = f"{prompt}{text}{self._tokenizer.eos_token}"
            if follows and not follows.startswith(whole):
                cut = _shared_lines([prompt, follows])
                parent, after_line = add(prompt[at:cut], []), True
                add(prompt[cut:], answer)
                at = cut
            else:
                parent, after_line = add(prompt[at:], answer), False
                at = len(whole)
        return Pack([], branches)


def _shared_lines(texts: Sequence[str]) -> int:
    """Count the characters of the first lines that all texts share.

    The last line of a text never counts.
    """
    lines = [text.splitlines(keepends=True)[:-1] for text in texts]
    shared = takewhile(lambda line: len(set(line)) == 1, zip(*lines, strict=False))
    return sum(len(line[0]) for line in shared)
