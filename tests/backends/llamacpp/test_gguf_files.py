"""The GGUF files that tests write hold the weights of the models they are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from adafuse_llm.backends import Query, TokenTree
from adafuse_llm.backends.llamacpp import LlamaCppBackend
from adafuse_llm.backends.llamacpp.library import load_library
from adafuse_llm.embedded import member_paths
from tests.support.gguf_files import embedded_gguf

pytestmark = pytest.mark.gguf


def llama_cpp_logprobs(path: Path, ids: list[int], *, flash: bool = False) -> torch.Tensor:
    """The log-probabilities after each token, with a cache of 32-bit numbers."""
    library = load_library()
    loaded = library.llama_model_load_from_file(
        str(path).encode(), library.llama_model_default_params()
    )
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0
    options.flash_attn_type = int(flash)
    context = library.llama_init_from_model(loaded, options)
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for position, token in enumerate(ids):
        batch.token[position] = token
        batch.pos[position] = position
        batch.n_seq_id[position] = 1
        batch.seq_id[position][0] = 0
        batch.logits[position] = 1
    assert library.llama_decode(context, batch) == 0
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(loaded))
    rows: Any = np.ctypeslib.as_array(library.llama_get_logits(context), (len(ids), size)).copy()
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(loaded)
    return torch.tensor(rows).double().log_softmax(-1)


@pytest.mark.parametrize("flash", [False, True])
def test_a_member_can_have_the_numbers_of_either_attention(flash: bool) -> None:
    path, ids = embedded_gguf("wren", "q8_0"), list(range(10, 60))
    settings: dict[str, Any] = {"context": 256, "threads": 1, "cache_type": "f32"}
    member = LlamaCppBackend(path, "wren", flash_attention=flash, **settings)
    tree = TokenTree(ids)
    (result,) = member.evaluate([Query(tree, (tree.root,), (), 5)])
    tokens, logprobs = list(result.next[0].tokens), torch.tensor(result.next[0].logprobs)
    same, other = (llama_cpp_logprobs(path, ids, flash=f)[-1, tokens] for f in (flash, not flash))
    assert (logprobs - same).abs().max() < 1e-6 < (same - other).abs().max()
    member.release(tree)
    member.close()


def difference(folder: Path, path: Path) -> float:
    """The largest difference to transformers with 64-bit numbers."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.randint(7, reference.config.vocab_size, (50,), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0].log_softmax(-1)
    return float((llama_cpp_logprobs(path, ids.tolist()) - expected).abs().max())


@pytest.mark.parametrize("folder", member_paths(), ids=lambda path: path.name)
def test_an_embedded_member_has_the_same_log_probabilities(folder: Path) -> None:
    assert difference(folder, embedded_gguf(folder.name)) < 5e-5
    assert 0.01 < difference(folder, embedded_gguf(folder.name, "q8_0")) < 1
