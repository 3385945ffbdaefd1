"""The blocks of `runtimes/decoder.py` as OpenVINO graph nodes.

Activations are float32 in the graph; the plugin keeps them in the inference precision. Matrix products with bf16 weights are
typed bf16: with a conversion of the weights in front of the product the plugin would unpack them to float32.
"""

import math

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from paceline.errors import BackendUnavailableError
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.models.config import Activation, ModelConfig, RopeConfig, WeightType
from paceline.runtimes.openvino.attention import ATTENTION_INPUTS, paged_attention
from paceline.runtimes.openvino.weights import OV_TYPE, GraphWeights

F32 = ov.Type.f32
ROTARY_INPUTS = (("cos", "sin"), ("local_cos", "local_sin"))
"""Graph inputs of each of `ModelConfig.ropes`: tables' rows [T, 1, R / 2]."""


def _ints(*values: int) -> ov.Output:
    return ops.constant(np.array(values, np.int64)).output(0)


_ROWS = np.int64(0)  # axis


class OpenVINOBlocks:
    """Adds nodes to one graph; `parameters` holds its inputs by name, in the order they were made."""

    def __init__(self, config: ModelConfig, weights: GraphWeights) -> None:
        self._config = config
        self._weights = weights
        self.parameters: dict[str, ov.Node] = {}
        if config.attention_soft_cap is not None:
            raise BackendUnavailableError(
                f"{config.family} caps attention scores at {config.attention_soft_cap}, which OpenVINO's PagedAttention cannot do: "
                "use another backend"
            )
        self._rotations = {rope: self._rotation(names, rope) for names, rope in zip(ROTARY_INPUTS, config.ropes, strict=False)}
        self._logits_rows = self.parameter("logits_rows", ov.Type.i32, [-1])
        self._attention_inputs = {name: self.parameter(name, kind, [-1] * rank) for name, (kind, rank) in ATTENTION_INPUTS.items()}

    def _rotation(self, names: tuple[str, str], rope: RopeConfig) -> tuple[ov.Output, ov.Output]:
        num_pairs = rope.rotary_size(self._config.head_size) // 2
        cos, sin = (self.parameter(name, F32, [-1, 1, num_pairs]) for name in names)
        return cos, sin

    def parameter(self, name: str, element_type: ov.Type, shape: list[int]) -> ov.Output:
        """A new graph input."""
        node = ops.parameter(ov.PartialShape(shape), element_type)
        node.set_friendly_name(name)
        node.output(0).get_tensor().set_names({name})
        self.parameters[name] = node
        return node.output(0)

    def embedding(self, name: str) -> ov.Output:
        """The rows come in ready: the runtime reads them from the mapped file, so no copy of the table is ever made."""
        return self.parameter("embedded", F32, [-1, self._config.hidden_size])

    def linear(self, x: ov.Output, *names: str) -> tuple[ov.Output, ...]:
        matrices = [self._weights.matrix(name + ".weight") for name in names]
        typed = self._typed(x)
        products = [self._product(typed if matrix.get_element_type() == ov.Type.bf16 else x, matrix) for matrix in matrices]
        return tuple(self._biased(product, name) for product, name in zip(products, names, strict=True))

    def rms_norm(self, x: ov.Output, name: str) -> ov.Output:
        mean = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2.0))), _ints(-1), True)
        scale = ops.divide(ops.constant(np.float32(1.0)), ops.sqrt(ops.add(mean, ops.constant(np.float32(self._config.norm_eps)))))
        weight = self._weights.vector(name + ".weight", exact=self._config.norm_offset)
        return ops.multiply(ops.multiply(x, scale), weight).output(0)

    def head_norm(self, x: ov.Output, name: str, num_heads: int) -> ov.Output:
        return self._rows(self.rms_norm(self._heads(x, num_heads), name), num_heads)

    def rope(self, x: ov.Output, num_heads: int, layer: int) -> ov.Output:
        rope = self._config.rope_of(layer)
        cos, sin = self._rotations[rope]
        num_pairs = rope.rotary_size(self._config.head_size) // 2
        num_passed = self._config.head_size - 2 * num_pairs
        lengths = _ints(num_pairs, num_pairs, *([num_passed] if num_passed else []))
        parts = ops.variadic_split(self._heads(x, num_heads), ops.constant(np.int64(-1)), lengths).outputs()
        first, second = parts[:2]
        rotated = [
            ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin)),
            ops.add(ops.multiply(second, cos), ops.multiply(first, sin)),
        ]
        return self._rows(ops.concat([*rotated, *parts[2:]], -1).output(0), num_heads)

    def attention(self, q: ov.Output, k: ov.Output, v: ov.Output, layer: int) -> ov.Output:
        config = self._config
        cache_type = OV_TYPE[self._weights.weight_type]
        shape = [-1, config.num_kv_heads, BLOCK_SIZE, config.head_size]
        caches = (self.parameter(f"keys.{layer}", cache_type, shape), self.parameter(f"values.{layer}", cache_type, shape))
        axis = ops.constant(_ROWS)
        inputs = self._attention_inputs
        repeated = tuple(ops.gather(part, inputs["attention_rows"], axis).output(0) for part in (q, k, v))
        attended = paged_attention(repeated, caches, inputs, config.num_kv_heads, config.head_size, config.attention_scale)
        return ops.gather(attended, inputs["row_of_attention"], axis).output(0)

    def gated_mlp(self, gate: ov.Output, up: ov.Output) -> ov.Output:
        if self._weights.weight_type is WeightType.F32:
            # A product with a fused activation leaves the kernel whose rows do not depend on how many there are.
            return ops.multiply(ops.multiply(gate, up), ops.sigmoid(self._sigmoid_argument(gate))).output(0)
        if self._config.activation is Activation.SILU:
            return ops.multiply(ops.swish(gate), up).output(0)
        return ops.multiply(ops.gelu(gate, "tanh"), up).output(0)

    def _sigmoid_argument(self, gate: ov.Output) -> ov.Output:
        """What makes gate * sigmoid(argument) the activation: (1 + tanh(z)) / 2 is sigmoid(2 z)."""
        if self._config.activation is Activation.SILU:
            return gate
        slope = 2 * math.sqrt(2 / math.pi)
        curve = ops.multiply(ops.multiply(gate, gate), ops.constant(np.float32(0.044715 * slope)))
        return ops.multiply(gate, ops.add(curve, ops.constant(np.float32(slope)))).output(0)

    def add(self, x: ov.Output, y: ov.Output) -> ov.Output:
        return ops.add(x, y).output(0)

    def logits_rows(self, x: ov.Output) -> ov.Output:
        return ops.gather(x, self._logits_rows, ops.constant(_ROWS)).output(0)

    def lm_head(self, x: ov.Output, name: str) -> ov.Output:
        return self.linear(x, name)[0]

    def soft_cap(self, x: ov.Output, cap: float) -> ov.Output:
        limit = ops.constant(np.float32(cap))
        return ops.multiply(ops.tanh(ops.divide(x, limit)), limit).output(0)

    def _typed(self, x: ov.Output) -> ov.Output:
        return ops.convert(x, ov.Type.bf16).output(0) if self._weights.weight_type is WeightType.BF16 else x

    def _product(self, x: ov.Output, matrix: ov.Output) -> ov.Output:
        product = ops.matmul(x, matrix, False, True)
        return ops.convert(product, F32).output(0) if matrix.get_element_type() == ov.Type.bf16 else product.output(0)

    def _biased(self, x: ov.Output, name: str) -> ov.Output:
        bias = name + ".bias"
        return ops.add(x, self._weights.vector(bias)).output(0) if self._weights.has(bias) else x

    def _heads(self, x: ov.Output, num_heads: int) -> ov.Output:
        return ops.reshape(x, _ints(-1, num_heads, self._config.head_size), False).output(0)

    def _rows(self, x: ov.Output, num_heads: int) -> ov.Output:
        return ops.reshape(x, _ints(-1, num_heads * self._config.head_size), False).output(0)
