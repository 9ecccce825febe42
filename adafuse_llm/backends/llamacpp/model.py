"""A GGUF model that llama.cpp has loaded."""

from __future__ import annotations

from pathlib import Path

from adafuse_llm.backends.llamacpp.library import LoadedFile, load_library
from adafuse_llm.errors import UnsupportedModelError


class Model(LoadedFile):
    """A loaded GGUF model.

    Args:
        path: the GGUF file, or the first file of a split model.
        label: text that names the member in errors.
        gpu_layers: number of layers on GPUs; None for all if llama.cpp was built for a GPU.
        reorder: whether llama.cpp may store weights in the order that its fastest kernels need.
            Some of these kernels round in other ways for one token than for several.

    Attributes:
        label: the argument of the same name.
        vocabulary: number of logits.
        on_gpu: whether layers run on a GPU.

    Raises:
        LoadError: llama.cpp cannot load the file.
        UnsupportedModelError: the model cannot be a member.
    """

    def __init__(
        self, path: Path, label: str, *, gpu_layers: int | None, reorder: bool = True
    ) -> None:
        library = load_library()
        params = library.llama_model_default_params()
        params.n_gpu_layers = -1 if gpu_layers is None else gpu_layers
        params.use_extra_bufts = reorder
        super().__init__(path, params, label)
        self.label = label
        self.on_gpu = bool(library.llama_supports_gpu_offload()) and params.n_gpu_layers != 0
        self.vocabulary = int(
            library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.pointer))
        )
        self._check_kind()

    def _check_kind(self) -> None:
        library, model = load_library(), self.pointer
        reason = None
        if library.llama_model_has_encoder(model):
            reason = "is an encoder or an encoder-decoder model"
        elif library.llama_model_is_diffusion(model):
            reason = "is a diffusion model"
        elif library.llama_model_is_recurrent(model) or library.llama_model_is_hybrid(model):
            reason = "has recurrent layers, whose state llama.cpp cannot cut back"
        if reason is not None:
            raise UnsupportedModelError(
                f"{self.label} {reason}. GGUF members must be causal language models with "
                "attention in all layers. Use the transformers model instead, if it is causal."
            )
