"""The reference engine of `tercet parity`: transformers on the same checkpoint.

The one module of the product that knows transformers, which is imported when a reference is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_executor.errors import CheckpointBroken, ToolMisused
from model_executor.tools.observe import LOGITS, Observer


class TransformersReference:
    """A model as transformers runs it, without a cache and with plain attention.

    Args:
        folder: of a model whose blocks all run.
        names: of the blocks, as places.
        dtype: of weights and activations.

    Attributes:
        title: engine and version.

    Raises:
        ToolMisused: transformers is not installed.
        CheckpointBroken: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, names: Sequence[str], dtype: torch.dtype) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ToolMisused("--reference transformers: the package transformers is not installed") from error
        transformers.utils.logging.disable_progress_bar()
        self.title = f"transformers {transformers.__version__}"
        try:
            # float32 holds every weight of a checkpoint exactly; buffers stay in it, as transformers has them.
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                attn_implementation="eager",
                experts_implementation="eager",
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointBroken(folder, f"transformers cannot load it: {error}") from error
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)
        self._names = names

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int, vocab: int) -> list[int]:
        """The `count` likeliest tokens below `vocab` after the prompt; tokens that end a sequence are not heeded."""
        tokens: list[int] = []
        for _ in range(count):
            logits = self._model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1, :vocab]
            tokens.append(int(logits.float().argmax()))
        return tokens

    @torch.inference_mode()
    def forced(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """Residual stream and logits of a known sequence, [T, width] by place."""
        # Of a model that takes images too, the part for text.
        inner = getattr(self._model.model, "language_model", self._model.model)
        with Observer(list(inner.layers), inner.norm, self._names) as seen:
            logits: Tensor = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
            return {**seen.take(), LOGITS: logits.detach().clone()}
