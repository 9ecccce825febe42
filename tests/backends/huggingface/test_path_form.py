"""The path form: saved states."""

from __future__ import annotations

import pytest
import torch

from adafuse_llm.backends.huggingface.path_form import PathForm
from adafuse_llm.tree import TokenTree
from tests.support.models import Recipe, backend


@pytest.mark.quick
def test_a_path_member_recomputes_a_state_it_gave_away():
    """Children of a node whose state moved on to another child are still right."""
    member = backend(Recipe("llama"), "path")
    prompt = member.codec.encode_prompt("The ferry to Orrin")
    tree = TokenTree(prompt)
    form = PathForm(member._decoder, tree)
    with torch.inference_mode():
        form.extend([tree.root])
        chain = tree.path(tree.grow([5, 6, 7]))
        form.extend(chain)
        late = tree.child(chain[0], 9)
        logits, _ = form.extend([late])
        plain = member._decoder.plain([*prompt, *tree.tokens(late)])
        assert torch.allclose(logits, plain, atol=1e-10)
        tree.commit(chain[0])
        form.reroot()
        again = tree.child(tree.root, 11)
        expected = member._decoder.plain([*tree.ids, 11])
        assert torch.allclose(form.extend([again])[0], expected, atol=1e-10)
