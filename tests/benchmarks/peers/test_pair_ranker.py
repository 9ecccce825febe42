"""PairRanker: a tiny model of the published one's architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model, DebertaV2Tokenizer
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2PreTrainedModel

from benchmarks.peers import PairRanker

MARKERS = ("<|source|>", "<|candidate1|>", "<|candidate2|>")


class Published(DebertaV2PreTrainedModel):
    """Body and head under the names that the published weights have, one pair at a time."""

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.pretrained_model = DebertaV2Model(config)
        self.head_layer = torch.nn.Sequential(
            torch.nn.Dropout(0.1),
            torch.nn.Linear(2 * size, size),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(size, config.n_tasks),
        )
        self.post_init()

    def logit(self, tokenizer, question, first, second):
        ids = [
            token
            for marker, text in zip(MARKERS, (question, first, second), strict=True)
            for token in tokenizer.encode(marker + text)
        ]
        with torch.no_grad():
            states = self.pretrained_model(torch.tensor([ids])).last_hidden_state[0]
            asked, left, right = (
                states[ids.index(each)] for each in tokenizer.convert_tokens_to_ids(list(MARKERS))
            )
            left, right = (self.head_layer(torch.cat([asked, each])) for each in (left, right))
        return float((left - right).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranker")
    special = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0), ("[MASK]", 0.0)]
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyzT?.", "\u2581the", "ing", "\u2581no"]
    tokenizer = DebertaV2Tokenizer(vocab=[*special, *((piece, -2.0) for piece in pieces)])
    tokenizer.add_tokens([*MARKERS, "<|candidate|>"])
    ids = tokenizer.convert_tokens_to_ids(list(MARKERS))
    torch.manual_seed(5)
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        initializer_range=0.5,
        n_tasks=2,
        drop_out=0.1,
        **dict(zip(("source_prefix_id", "cand1_prefix_id", "cand2_prefix_id"), ids, strict=True)),
    )
    Published(config).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_logits_are_those_of_one_pair_at_a_time(folder):
    model, tokenizer = (
        Published.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    answers = ["no", "the mill is red", "nothing. nothing at all"]
    matrix = PairRanker(folder).compare("who is the miller?", answers)
    for i, first in enumerate(answers):
        for j, second in enumerate(answers):
            expected = 0 if i == j else model.logit(tokenizer, "who is the miller?", first, second)
            assert matrix[i][j] == pytest.approx(expected, abs=1e-5)
    assert len({round(logit, 4) for row in matrix for logit in row}) == 7
    assert PairRanker(folder).compare("x", ["no"]) == [[0.0]]
