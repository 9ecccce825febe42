"""Train one member: steps and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from adafuse_llm.embedded import member_paths
from training.batches import Batch, draw_agent_batch, draw_batch, draw_long_batch
from training.muon import Muon
from training.packing import Packer
from training.recipes import Recipe
from training.schedule import MAIN_SHARE, SHORT_SHARE, learning_rate_factor

MUON_RATE: Final = 0.02
ADAM_RATE: Final = 3e-3
TOKENS_PER_STEP: Final = 4096
# Tokens per step in the tools part: the first number holds while prompts only name the tools, and
# the second number holds later, when prompts describe them.
READING_TOKENS: Final = (640, 1280)  # passages and arithmetic
AGENT_TOKENS: Final = (1280, 1920)  # agents' turns
# Tokens per step in the part with long answers: passages and arithmetic, agents' turns, and
# questions with long answers.
LONG_TOKENS: Final = (1536, 1280, 2048)


class Trainer:
    """One member in training, with its model, optimizers, step count and checkpoint.

    The model has the architecture of the shipped member, but random weights. The tokenizer is that
    of the shipped member.
    """

    def __init__(
        self,
        recipe: Recipe,
        work: Path,
        *,
        steps: int,
        seed: int,
        agent_steps: int,
        long_steps: int,
        tokens_per_step: int = TOKENS_PER_STEP,
    ) -> None:
        self.recipe, self.steps, self.seed, self.tokens = recipe, steps, seed, tokens_per_step
        self.checkpoint = work / recipe.name / "checkpoint.pt"
        (self.shipped,) = (path for path in member_paths() if path.name == recipe.name)
        self.tokenizer = AutoTokenizer.from_pretrained(self.shipped)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(self.shipped)
            self.model = AutoModelForCausalLM.from_config(config)
        self.main = round(steps * MAIN_SHARE)
        self.packer = Packer(recipe, self.tokenizer, recipe.emphasis)
        self.finish_packer = Packer(recipe, self.tokenizer, recipe.finish or recipe.emphasis)
        self.long_packer = Packer(recipe, self.tokenizer, recipe.long)
        self.tools_start = steps if recipe.finish else self.main
        self.long_start = self.tools_start + agent_steps
        self.last = self.long_start + long_steps
        self.optimizers = self._new_optimizers()
        self.step = 0

    def _new_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        return [
            (Muon(matrices, lr=MUON_RATE), MUON_RATE),
            (
                torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
                ADAM_RATE,
            ),
        ]

    def save(self) -> None:
        """Write the checkpoint atomically."""
        state = {
            "step": self.step,
            "steps": self.steps,
            "last": self.last,
            "seed": self.seed,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Load the checkpoint of this run; return False if no checkpoint exists."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, weights_only=True)
        run = (self.steps, self.last, self.seed)
        if (state["steps"], state["last"], state["seed"]) != run:
            raise SystemExit(
                f"{self.checkpoint} belongs to a run with --steps {state['steps']}, last step "
                f"{state['last']} and --seed {state['seed']}, but this run has {run[0]}, {run[1]} "
                f"and {run[2]}. Choose another --work folder."
            )
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        return True

    def hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states of the last layer, ``[rows, length, width]``."""
        past = None
        if len(batch.prompt):
            past = self.model.model(input_ids=batch.prompt[None], use_cache=True).past_key_values
            past.batch_repeat_interleave(len(batch.ids))
        states: Tensor = self.model.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            past_key_values=past,
            use_cache=past is not None,
        ).last_hidden_state
        return states

    def _batches(self) -> list[Batch]:
        """Draw this step's batches.

        The tools part adds agents' turns to reading and arithmetic. The last part adds long
        answers to both.
        """
        if self.step >= self.long_start:
            read, agents, long = LONG_TOKENS
            return [
                draw_batch(self.long_packer, self.seed, self.step, 1.0, read),
                draw_agent_batch(self.long_packer, self.seed, self.step, 1.0, agents),
                draw_long_batch(self.long_packer, self.seed, self.step, long),
            ]
        packer = self.packer if self.step < self.main else self.finish_packer
        progress = min(self.step / self.main, 1.0)
        if self.step < self.tools_start:
            return [draw_batch(packer, self.seed, self.step, progress, self.tokens)]
        of_part = (self.step - self.tools_start) / (self.long_start - self.tools_start)
        is_real = of_part >= SHORT_SHARE
        return [
            draw_batch(packer, self.seed, self.step, progress, READING_TOKENS[is_real]),
            draw_agent_batch(packer, self.seed, self.step, of_part, AGENT_TOKENS[is_real]),
        ]

    def train_step(self) -> float:
        """Train for one step and return the mean loss of the answer tokens in nats."""
        if self.step in (self.tools_start, self.long_start):
            self.optimizers = self._new_optimizers()
        batches = self._batches()
        total = sum(float(batch.weights.sum()) for batch in batches)
        loss = n_answers = 0.0
        for batch in batches:
            chosen = batch.weights > 0
            logits = self.model.lm_head(self.hidden(batch)[chosen])  # [n, vocabulary]
            weights = batch.weights[chosen]
            losses = nn.functional.cross_entropy(logits, batch.labels[chosen], reduction="none")
            ((losses * weights).sum() / total).backward()  # type: ignore[no-untyped-call]
            loss += float(losses.detach()[weights == 1.0].sum())
            n_answers += int((weights == 1.0).sum())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = learning_rate_factor(
            self.step, self.main, self.tools_start, self.long_start, self.last
        )
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss / n_answers

    def export(self, out: Path) -> None:
        """Write the member to ``out/<name>`` in the Hugging Face format (float32 safetensors)."""
        folder = out / self.recipe.name
        self.model.save_pretrained(folder)
        for file in self.shipped.glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
