"""What the executor keeps of the weights on a CPU, as its report of the start counts it, before any is read.

The kernels there compute in float32. They keep the weight of a product in panels of 32 columns, in the narrowest
numbers that hold it exactly, or in int8; a tied head has panels beside the embedding's table. All else is kept in
float32: the table, norms, experts, and the tables of the rotation. A bias lies beside its panels and is not counted.
Products whose gate is not among GATES are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

from model_executor.errors import NoKernel
from model_executor.models.spec import Dtype, ModelSpec
from model_executor.weights.layer_plan import LayerPlan
from model_executor.weights.parameters import HEAD, Parameter
from model_executor.weights.report import ITEM_BYTES

FLOAT: Final = ITEM_BYTES["float32"]
PANEL: Final = 32
# Of int8: inputs that are turned together, and the most that share where their sums begin.
TURNED: Final = 64
MAX_GROUP: Final = 256
GATES: Final = ("silu", "gelu_tanh")


class Footprint:
    """The bytes of a plan's weights.

    Args:
        spec: of the model.
        plan: the blocks that run.
        parameters: outside the blocks and of them.
        stored: dtype of a tensor in the checkpoint; None where it is not known to be narrow.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: LayerPlan,
        parameters: tuple[Parameter, ...],
        stored: Callable[[str], Dtype | None],
    ) -> None:
        self._spec = spec
        self._parameters = parameters
        self._stored = {source.name: stored(source.name) for each in parameters for source in each.sources}
        gates = [layer.mlp.activation for layer in plan.layers(spec)]
        left = [f"blocks.{runtime}.mlp." for runtime, gate in enumerate(gates) if gate not in GATES]
        self._left_to_torch = {
            f"{mlp}{part}gate_up.{kind}" for mlp in left for part in ("", "shared.") for kind in ("weight", "bias")
        }
        self._ropes = {layer.attention.rope for layer in plan.layers(spec)} - {None}

    def bytes(self, dtype: Dtype, *, int8: bool) -> int:
        """Weights and the tables of the rotation.

        A float32 checkpoint whose numbers are all exact in fewer bits takes less.

        Args:
            dtype: of `tercet serve`.
            int8: whether the products of the blocks are.

        Raises:
            NoKernel: int8 does not take a width of this model.
        """
        kept = sum(self._kept(parameter, dtype, int8=int8) for parameter in self._parameters)
        if self._spec.tie:
            table = self._parameters[0]
            kept += panel_bytes(self._spec.hidden_size, self._spec.vocab_size, self._item(table, dtype))
        # Cosine and sine of each pair of elements.
        return kept + sum(self._spec.max_model_len * rope.rotary_dim * FLOAT for rope in self._ropes if rope)

    def _kept(self, parameter: Parameter, dtype: Dtype, *, int8: bool) -> int:
        left = parameter.name in self._left_to_torch
        if not parameter.product or (left and not int8):
            return prod(parameter.shape) * FLOAT
        if not parameter.transposed:
            return 0
        inputs, outputs = parameter.shape
        if not int8 or parameter.name == HEAD:
            return panel_bytes(inputs, outputs, self._item(parameter, dtype))
        if inputs % TURNED:
            raise NoKernel("linear", f"{parameter.name} in int8", {"int8": [f"inputs {inputs}: multiples of {TURNED}"]})
        return outputs * (inputs + FLOAT) if left else int8_bytes(inputs, outputs)

    def _item(self, parameter: Parameter, dtype: Dtype) -> int:
        found = {self._stored[source.name] for source in parameter.sources}
        alike = found.pop() if len(found) == 1 else None
        return min(ITEM_BYTES[dtype], ITEM_BYTES[alike or "float32"])


def panel_bytes(inputs: int, outputs: int, item: int) -> int:
    """Of a weight in panels, in numbers of so many bytes."""
    return -(-outputs // PANEL) * PANEL * inputs * item


def int8_bytes(inputs: int, outputs: int) -> int:
    """Of a weight in int8: the numbers, where the sums of each group begin, and the scales."""
    group = next(size for size in range(MAX_GROUP, 0, -TURNED) if inputs % size == 0)
    return panel_bytes(inputs, outputs, 1) + panel_bytes(inputs // group + 1, outputs, FLOAT)
