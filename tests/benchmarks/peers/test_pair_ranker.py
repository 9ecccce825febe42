"""PairRanker: a tiny model with the published one's names of weights."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import DebertaV2Config, DebertaV2Model, DebertaV2Tokenizer

from benchmarks.peers import PairRanker

MARKERS = ["<|source|>", "<|candidate1|>", "<|candidate2|>"]
SIZE, SCORES = 16, 2


@pytest.fixture
def published(tmp_path):
    """The folder of a model, and a function from a question and two answers to its logit."""
    special = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0), ("[MASK]", 0.0)]
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyzT?.", "\u2581the", "ing", "\u2581no"]
    tokenizer = DebertaV2Tokenizer(vocab=[*special, *((piece, -2.0) for piece in pieces)])
    tokenizer.add_tokens([*MARKERS, "<|candidate|>"])
    ids = tokenizer.convert_tokens_to_ids(MARKERS)
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=SIZE,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        n_tasks=SCORES,
        **dict(zip(("source_prefix_id", "cand1_prefix_id", "cand2_prefix_id"), ids, strict=True)),
    )
    torch.manual_seed(5)
    body = DebertaV2Model(config).eval()
    layers = torch.nn.Linear(2 * SIZE, SIZE), torch.nn.Linear(SIZE, SCORES)
    weights = {f"pretrained_model.{name}": each for name, each in body.state_dict().items()}
    for number, layer in zip((1, 4), layers, strict=True):
        weights |= {f"head_layer.{number}.{n}": each for n, each in layer.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    @torch.no_grad()
    def logit(*texts):
        pairs = zip(MARKERS, texts, strict=True)
        tokens = [token for marker, text in pairs for token in tokenizer.encode(marker + text)]
        states = body(torch.tensor([tokens])).last_hidden_state[0]
        asked, *answers = (states[tokens.index(each)] for each in ids)
        left, right = (layers[1](layers[0](torch.cat([asked, a])).tanh()) for a in answers)
        return float((left - right).mean())

    return tmp_path, logit


def test_logits_are_those_of_one_pair_at_a_time(published):
    folder, logit = published
    answers = ["no", "the mill is red", "nothing. nothing at all"]
    matrix = PairRanker(folder).compare("who is the miller?", answers)
    for i, first in enumerate(answers):
        for j, second in enumerate(answers):
            expected = 0 if i == j else logit("who is the miller?", first, second)
            assert matrix[i][j] == pytest.approx(expected, abs=1e-5)
    assert len({round(logit, 4) for row in matrix for logit in row}) == 7
    assert PairRanker(folder).compare("x", ["no"]) == [[0.0]]
