"""The reference engine of `tercet parity`: transformers on the same checkpoint, the other blocks removed in memory.

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
        folder: of the model.
        sources: blocks that stay, ascending; each keeps what its source index says of it.
        names: of the blocks, as places.
        dtype: of weights and activations.

    Attributes:
        title: engine and version.

    Raises:
        ToolMisused: transformers is not installed.
        CheckpointBroken: transformers cannot load the folder.
    """

    def __init__(self, folder: Path, sources: Sequence[int], names: Sequence[str], dtype: torch.dtype) -> None:
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
        _keep(self._model, sources)
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
        inner = self._model.model
        with Observer(list(inner.layers), inner.norm, self._names) as seen:
            logits: Tensor = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
            return {**seen.take(), LOGITS: logits.detach().clone()}


def _keep(model: Any, sources: Sequence[int]) -> None:  # noqa: ANN401 - transformers is not typed
    """Remove the other blocks; what transformers looks up by index moves with the blocks."""
    inner, config = model.model, model.config
    if len(inner.layers) == len(sources):
        return
    inner.layers = torch.nn.ModuleList([inner.layers[source] for source in sources])
    for index, layer in enumerate(inner.layers):
        layer.self_attn.layer_idx = index
    config.num_hidden_layers = len(sources)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[source] for source in sources]
