"""The `Ops` of `runtimes/decoder.py` that record a network as a list of operations, which kernels/program.c runs."""

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass

import numpy as np

from paceline.errors import ConfigError
from paceline.models.adapters.network_adapter import LM_HEAD
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import (
    XIELU_PARAMETERS,
    Activation,
    AttentionConfig,
    BlockConvolution,
    ClampedSwiGLU,
    ExpertMLP,
    ExpertRouting,
    GatedDeltaConfig,
    Mamba2Config,
    Recurrent,
    RouterScoring,
    ShortConvConfig,
)
from paceline.models.rope_config import RopeConfig
from paceline.models.state_layout import StateLayout
from paceline.runtimes.decoder import PER_LAYER_EMBEDDINGS, TOKEN_IDS
from paceline.runtimes.logits_summary import SummaryOptions
from paceline.runtimes.native.library import BLOCK_COLUMNS, LANES, kernels
from paceline.runtimes.native.packed_weights import NARROW_KINDS, TABLE_KINDS
from paceline.runtimes.native.records import (
    CHECKPOINT_INTERVAL,
    PANEL_KINDS,
    AddOperation,
    AttentionOperation,
    BlockConvolutionOperation,
    ColumnsOperation,
    CombineOperation,
    ConcatOperation,
    ConvolutionOperation,
    ExpertsOperation,
    GatedOperation,
    GatherOperation,
    GaussianTopKOperation,
    HeadsOperation,
    LinearOperation,
    MatchRmsOperation,
    Matrix,
    MatrixKind,
    MixOperation,
    NormOperation,
    Operation,
    Packing,
    RopeOperation,
    RouteOperation,
    RowSelection,
    ScaleOperation,
    SoftCapOperation,
    StateOperation,
    SummarizeOperation,
)
from paceline.runtimes.native.weights import NativeWeights

_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.SIGMOID: 3, Activation.NONE: 4, Activation.RELU: 5}
_CLAMPED_SWIGLU, _XIELU = 2, 6


@dataclass(frozen=True, slots=True)
class Value:
    """The result of a recorded operation, or an input of the network: rows of `width` floats."""

    index: int
    width: int
    rows: RowSelection = RowSelection.ALL


class NativeOps:
    """Records the operations of a network. `buffers.assign_buffers` then assigns buffers to their results."""

    def __init__(
        self, config: ModelConfig, weights: NativeWeights, cache_config: ModelConfig | None = None, *, supports_adapters: bool = False
    ) -> None:
        """Args:
        cache_config: config of the network whose cache is used; None = `config`.
        supports_adapters: whether rows may have LoRA adapters.
        """
        self._config, self._cache_config = config, cache_config or config
        self._weights = weights
        self._states = StateLayout.for_layers(self._cache_config.recurrent_layers)
        self.values: list[Value] = []
        self.inputs: dict[str, Value] = {}  # by name; the caller writes these values before each pass
        self.operations: list[Operation] = []
        self._supports_adapters = supports_adapters
        self.sites: list[tuple[str, ...]] = []  # matrix names of each adapter site, see `adapters.AdapterSiteNames`
        self._num_summaries = 0
        self._result_widths: dict[int, int] = {}  # by value number: width of the result, if rows also contain scratch memory

    def result_width(self, value: Value) -> int:
        """Return how many floats at the start of each row of the value are results. The others are scratch memory of the operation."""
        return self._result_widths.get(value.index, value.width)

    def new_value(self, width: int, rows: RowSelection = RowSelection.ALL) -> Value:
        self.values.append(Value(len(self.values), width, rows))
        return self.values[-1]

    def embedding(self, name: str) -> Value:
        """Return an input value; `NativeNetwork` looks up the embedding rows before the pass."""
        return self.input(TOKEN_IDS, self._config.hidden_size)

    def per_layer_embedding(self, name: str) -> Value:
        return self.input(PER_LAYER_EMBEDDINGS, self._config.num_layers * self._config.per_layer_input_size)

    def columns(self, x: Value, begin: int, width: int) -> Value:
        return self._append(ColumnsOperation(x=x.index, x_width=x.width, begin=begin, width=width), x, width)

    def input(self, name: str, width: int) -> Value:
        if name not in self.inputs:
            self.inputs[name] = self.new_value(width)
        return self.inputs[name]

    def concat(self, *values: Value) -> Value:
        joined = values[0]
        for value in values[1:]:
            width = joined.width + value.width
            joined = self._append(ConcatOperation(x=joined.index, y=value.index, x_width=joined.width, width=width), joined, width)
        return joined

    def summarize(self, logits: Value, options: SummaryOptions) -> Value:
        columns, ids = min(options.num_columns, logits.width), None
        if options.target_ids is not None:
            ids = (c_int32 * (columns + LANES))(*options.target_ids[:columns].tolist())
        operation = SummarizeOperation(
            x=logits.index, width=logits.width, summary_index=self._num_summaries, columns=columns, count=options.num_top_tokens,
            target_ids=ids,
        )  # fmt: skip
        self._num_summaries += 1
        out = self._append(operation, logits, kernels().paceline_summary_floats(columns, options.num_top_tokens))
        self._result_widths[out.index] = 2 + 2 * options.num_top_tokens
        return out

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        return self._record_products(x, names, names)

    def _record_products(self, x: Value, names: Sequence[str], adapter_names: Sequence[str]) -> tuple[Value, ...]:
        """Record products of x with the matrices `names`. adapter_names: names of the same matrices in LoRA adapters."""
        outs = []
        by_packing: dict[tuple[int, ...], list[tuple[Matrix, str]]] = {}
        for name, own in zip(names, adapter_names, strict=True):
            matrix = self._weights.matrix_record(name, len(self.values))
            outs.append(self.new_value(matrix.outputs, x.rows))
            by_packing.setdefault(self._packing_key(matrix), []).append((matrix, own))
        for (packing, *_), pairs in by_packing.items():
            array, site = (Matrix * len(pairs))(*(matrix for matrix, _ in pairs)), -1
            if self._supports_adapters:
                site = len(self.sites)
                self.sites.append(tuple(own for _, own in pairs))
            operation = LinearOperation(
                x=x.index, num_matrices=len(array), packing=packing, adapter_site=site, block_max=-1, matrices=array
            )
            self._append_to(operation, outs[0])
        return tuple(outs)

    def record_block_max(self, logits: Value) -> Value | None:
        """Make the product that computes `logits` also return the maximum of every BLOCK_COLUMNS; None if it is not one product."""
        for operation in self.operations:
            if isinstance(operation, LinearOperation) and operation.num_matrices == 1 and operation.matrices[0].out == logits.index:
                block_max = self.new_value(-(-logits.width // BLOCK_COLUMNS), logits.rows)
                operation.block_max = block_max.index
                return block_max
        return None

    def head_products(self, x: Value, name: str, num_heads: int, appended: Value | None = None) -> Value:
        matrices = self._weights.matrix_records([f"{name}.{head}" for head in range(num_heads)], len(self.values))
        keys = {self._packing_key(matrix) for matrix in matrices}
        (outputs,) = {matrix.outputs for matrix in matrices}
        packing = next(iter(keys))[0]
        if len(keys) > 1 or (packing is Packing.BYTES and outputs % LANES):
            raise ConfigError(
                f"the matrices {name}.* have different formats, or are quantised with {outputs} rows, which is no multiple of 16"
            )
        tail = 0 if appended is None else appended.width // num_heads
        operation = HeadsOperation(
            x=x.index, tails=-1 if appended is None else appended.index, heads=num_heads, tail_columns=tail, packing=packing,
            matrices=(Matrix * num_heads)(*matrices),
        )  # fmt: skip
        return self._append(operation, x, num_heads * (outputs + tail))

    def rms_norm(self, x: Value, name: str, epsilon: float | None = None) -> Value:
        return self._record_norm(x, name, 1, weighted_heads=1, epsilon=epsilon)

    def layer_norm(self, x: Value, name: str) -> Value:
        return self._record_norm(x, name, 1, weighted_heads=1, is_centered=True)

    def head_norm(self, x: Value, name: str | None, num_heads: int, *, epsilon: float | None = None) -> Value:
        return self._record_norm(x, name, num_heads, weighted_heads=1, epsilon=epsilon)

    def group_norm(self, x: Value, name: str, num_groups: int) -> Value:
        return self._record_norm(x, name, num_groups, weighted_heads=num_groups)

    def convolution(self, x: Value, mixer: Recurrent, layer: int) -> Value:
        layout, name = self._states.layers[layer], f"layers.{layer}.conv"
        bias = self._weights.vector_address(name + ".bias") if self._weights.has_tensor(name + ".bias") else None
        operation = ConvolutionOperation(
            x=x.index, channels=mixer.channels, kernel_size=mixer.kernel_size, is_activated=not isinstance(mixer, ShortConvConfig),
            conv_offset=layout.conv_offset, record_offset=layout.record_offset,
            weight=self._weights.transposed_address(name + ".weight"),
            bias=bias,
        )  # fmt: skip
        return self._append(operation, x)

    def block_convolution(self, x: Value, kernel_deltas: Value, convolution: BlockConvolution, name: str, kernel_index: int) -> Value:
        size = convolution.kernel_size
        operation = BlockConvolutionOperation(
            x=x.index, added=kernel_deltas.index, width=x.width, added_width=kernel_deltas.width, kernel_size=size,
            added_offset=kernel_index * (kernel_deltas.width // 2),
            group=convolution.group_size, base=self._weights.vector_address(name + ".weight") + 4 * kernel_index * size * x.width,
        )  # fmt: skip
        return self._append(operation, x)

    def delta_rule(self, x: Value, b: Value, a: Value, mixer: GatedDeltaConfig, layer: int) -> Value:
        return self._record_state_operation(x, a, b, mixer, layer)

    def mamba2(self, x: Value, dt: Value, mixer: Mamba2Config, layer: int) -> Value:
        return self._record_state_operation(x, dt, None, mixer, layer)

    def rope(self, x: Value, num_heads: int, rope: RopeConfig) -> Value:
        head_size = x.width // num_heads
        half, table = rope.rotary_size(head_size) // 2, self._config.rope_variants.index((rope, head_size))
        return self._append(RopeOperation(x=x.index, heads=num_heads, head_size=head_size, rotary_half=half, angle_table=table), x)

    def attention(self, q: Value, kv: tuple[Value, Value] | None, attention: AttentionConfig, layer: int) -> Value:
        width = attention.num_heads * attention.latent_size if attention.latent is not None else q.width
        return self._append(self._attention(q.index, kv, attention, layer), q, width)

    def store_kv(self, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        return self._append(self._attention(-1, (k, v), attention, layer), k, 1)

    def _attention(self, q: int, kv: tuple[Value, Value] | None, attention: AttentionConfig, layer: int) -> Operation:
        k, v = (-1, -1) if kv is None else (kv[0].index, kv[1].index)
        kv_source_layer = layer if attention.kv_source_layer is None else attention.kv_source_layer
        return AttentionOperation(
            q=q, k=k, v=v, heads=attention.num_heads, kv_heads=attention.num_kv_heads, head_size=attention.head_size,
            layer=kv_source_layer, block_table_set=self._cache_config.block_table_index(kv_source_layer), window=attention.window or 0,
            is_causal=attention.is_causal, latent_size=attention.latent_size, scale=attention.scale, soft_cap=attention.soft_cap or 0.0,
            sinks=self._weights.vector_address(f"layers.{layer}.attention.sinks", exact=True) if attention.has_sinks else None,
        )  # fmt: skip

    def gated(self, gate: Value, up: Value, activation: Activation | ClampedSwiGLU) -> Value:
        if isinstance(activation, ClampedSwiGLU):
            return self._record_gate(gate, up, _CLAMPED_SWIGLU, slope=activation.sigmoid_slope, limit=activation.limit)
        return self._record_gate(gate, up, _ACTIVATIONS[activation])

    def activated(self, x: Value, activation: Activation) -> Value:
        return self._record_gate(x, None, _ACTIVATIONS[activation])

    def xielu(self, x: Value, name: str) -> Value:
        alpha_p, alpha_n, beta, eps = (self._weights.scalar(f"{name}.{part}") for part in XIELU_PARAMETERS)
        positive, negative = (float(np.logaddexp(0.0, alpha)) for alpha in (alpha_p, alpha_n))  # softplus
        return self._record_gate(x, None, _XIELU, alpha_p=positive, alpha_n=beta + negative, beta=beta, eps=eps)

    def experts(self, x: Value, logits: Value, mlp: ExpertMLP, prefix: str) -> Value:
        routing = mlp.routing
        routes = self._record_routing(logits, routing, prefix)
        *inputs, output = [f"{prefix}experts.{{}}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        *gates, up = self._expert_products(x, routes, routing, *inputs[not mlp.expert.has_gate :], is_per_pair=False)
        active = self.gated(gates[0] if gates else up, up, mlp.expert.activation)
        (down,) = self._expert_products(active, routes, routing, output, is_per_pair=True)
        width = down.width // routing.num_experts_per_token
        return self._append(
            CombineOperation(x=down.index, routes=routes.index, experts_per_row=routing.num_experts_per_token, width=width), x, width
        )

    def add(self, x: Value, y: Value) -> Value:
        return self._append(AddOperation(x=x.index, y=y.index, width=x.width), x)

    def scale(self, x: Value, factor: float) -> Value:
        return self._append(ScaleOperation(x=x.index, width=x.width, factor=factor), x)

    def scale_by(self, x: Value, name: str) -> Value:
        return self.scale(x, self._weights.scalar(name + ".weight"))

    def scale_columns(self, x: Value, name: str) -> Value:
        return self._record_gate(x, None, _ACTIVATIONS[Activation.NONE], weight=self._weights.vector_address(name + ".weight"))

    def mix_streams(self, y: Value, x: Value, weights: Value | None, num_streams: int, *, offset: float = 0.0, first: int = 0) -> Value:
        width = y.width // num_streams
        operation = MixOperation(
            x=x.index, y=y.index, weights=-1 if weights is None else weights.index, width=width, inputs=x.width // width,
            outputs=num_streams, first_mixed=first, offset=offset,
        )  # fmt: skip
        return self._append(operation, y)

    def gaussian_top_k(self, x: Value, factor: float) -> Value:
        return self._append(GaussianTopKOperation(x=x.index, width=x.width, factor=factor), x)

    def match_rms(self, x: Value, like: Value) -> Value:
        return self._append(MatchRmsOperation(x=x.index, y=like.index, width=x.width), x)

    def logits_rows(self, x: Value) -> Value:
        return self._append_to(GatherOperation(x=x.index, width=x.width), self.new_value(x.width, RowSelection.LOGITS))

    def lm_head(self, x: Value, name: str) -> Value:
        return self._record_products(x, (name,), (LM_HEAD,))[0]

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._append(SoftCapOperation(x=x.index, width=x.width, cap=cap), x)

    def _record_gate(self, gate: Value, up: Value | None, activation: int, *, weight: int | None = None, **parameters: float) -> Value:
        """Record activation(gate) * up. If `up` is None, record activation(gate), multiplied by the vector at address `weight` if given."""
        parameters, like = {**dict.fromkeys(("slope", "limit", *XIELU_PARAMETERS), 0.0), **parameters}, up or gate
        operation = GatedOperation(
            x=gate.index, up=-1 if up is None else up.index, width=like.width, activation=activation, group=like.width // gate.width,
            weight=weight, **parameters,
        )  # fmt: skip
        return self._append(operation, like)

    def _record_norm(
        self, x: Value, name: str | None, num_heads: int, *, weighted_heads: int, epsilon: float | None = None, is_centered: bool = False
    ) -> Value:
        config = self._config
        weight = None if name is None else self._weights.vector_address(name + ".weight", exact=config.has_norm_offset)
        has_bias = name is not None and self._weights.has_tensor(name + ".bias")
        operation = NormOperation(
            x=x.index,
            heads=num_heads,
            head_size=x.width // num_heads,
            epsilon=config.norm_eps if epsilon is None else epsilon,
            weighted_heads=weighted_heads,
            is_centered=is_centered,
            weight=weight,
            bias=self._weights.vector_address(f"{name}.bias") if has_bias else None,
        )
        return self._append(operation, x)

    def _record_state_operation(self, x: Value, a: Value, b: Value | None, mixer: GatedDeltaConfig | Mamba2Config, layer: int) -> Value:
        state, layout, prefix, vector = mixer.state_shape, self._states.layers[layer], f"layers.{layer}.", self._weights.vector_address
        prepared = self.new_value(
            4 * state.key_width + state.value_width + 2 * (state.num_heads + CHECKPOINT_INTERVAL * state.num_key_heads)
        )
        min_step, max_step = mixer.dt_limits if isinstance(mixer, Mamba2Config) else (0.0, float("inf"))
        operation = StateOperation(
            x=x.index, a=a.index, b=-1 if b is None else b.index, prepared=prepared.index, channels=mixer.channels, heads=state.num_heads,
            key_heads=state.num_key_heads, rows_of_state=state.rows, columns=state.columns, block_columns=layout.block_columns,
            is_delta=isinstance(mixer, GatedDeltaConfig), matrices_offset=layout.matrices_offset,
            keys_offset=layout.record_offset + mixer.channels, prepared_floats=prepared.width, min_step=min_step, max_step=max_step,
            beta_scale=mixer.beta_scale if isinstance(mixer, GatedDeltaConfig) else 1.0,
            decay=vector(prefix + "decay.weight", exact=True), bias=vector(prefix + "decay.bias", exact=True),
            skip=vector(prefix + "skip.weight", exact=True) if isinstance(mixer, Mamba2Config) else None,
        )  # fmt: skip
        return self._append(operation, x, state.value_width)

    def _record_routing(self, logits: Value, routing: ExpertRouting, prefix: str) -> Value:
        """Record the router's choice of experts for each row. The result is `Routes` of kernels/native.h."""
        correction, scales = (
            self._weights.vector_address(f"{prefix}router.{name}", exact=True) if exists else None
            for name, exists in (("correction", routing.has_correction_bias), ("scales", routing.has_expert_scales))
        )
        operation = RouteOperation(
            x=logits.index, num_experts=routing.num_experts, experts_per_row=routing.num_experts_per_token,
            scoring=(RouterScoring.SOFTMAX, RouterScoring.SIGMOID).index(routing.scoring),
            groups=routing.num_expert_groups, chosen_groups=routing.num_selected_groups, scores_per_group=routing.top_scores_per_group,
            is_normalized=routing.has_normalized_weights, epsilon=routing.weight_sum_epsilon, factor=routing.routed_scaling_factor,
            correction=correction, scales=scales,
        )  # fmt: skip
        return self._append(operation, logits, 8 * routing.num_experts_per_token + 1)

    def _expert_products(self, x: Value, routes: Value, routing: ExpertRouting, *names: str, is_per_pair: bool) -> tuple[Value, ...]:
        """Record the products of each row with matrices of its experts. Results have a row for each pair of a row and an expert.

        Args:
            is_per_pair: whether x has a row for each pair of a row and an expert, or one for each row of the pass.
            names: names of the matrices, with `{}` for the index of the expert.
        """
        outs: list[Value] = []
        by_packing: dict[tuple[int, ...], list[tuple[str, list[Matrix]]]] = {}
        for name in names:
            matrices = self._weights.matrix_records([name.format(expert) for expert in range(routing.num_experts)], len(self.values))
            packings = {self._packing_key(matrix) for matrix in matrices}
            if len(packings) > 1:
                raise ConfigError(f"the experts' matrices {name.format('*')} have different formats: quantise all of them the same way")
            outs.append(self.new_value(matrices[0].outputs * routing.num_experts_per_token, x.rows))
            by_packing.setdefault(packings.pop(), []).append((name, matrices))
        for (packing, *_), own in by_packing.items():
            array, site = (Matrix * (len(own) * routing.num_experts))(*(matrix for _, matrices in own for matrix in matrices)), -1
            if self._supports_adapters:
                site = len(self.sites)
                self.sites += [tuple(name.format(expert) for name, _ in own) for expert in range(routing.num_experts)]
            operation = ExpertsOperation(
                x=x.index, routes=routes.index, experts_per_row=routing.num_experts_per_token, num_experts=routing.num_experts,
                num_matrices=len(own), packing=packing, is_per_pair=is_per_pair, adapter_site=site, matrices=array,
            )  # fmt: skip
            self._append_to(operation, outs[0])
        return tuple(outs)

    def _packing_key(self, matrix: Matrix) -> tuple[int, ...]:
        """Return a key that identifies how input rows are packed for a matrix. Matrices with equal keys use the same packed rows.

        Rows are rounded to 8 bits for matrices in panels, and to bfloat16 for bfloat16 matrices if that is the compute type.
        """
        if matrix.kind in PANEL_KINDS:
            return Packing.BYTES, matrix.group, matrix.zero_point, matrix.kind in NARROW_KINDS, matrix.kind in TABLE_KINDS
        return (Packing.BF16 if self._weights.compute_type is WeightType.BF16 and matrix.kind == MatrixKind.BF16 else Packing.FLOATS,)

    def _append(self, operation: Operation, like: Value, width: int | None = None) -> Value:
        """Append an operation whose result has the rows of `like`, and its width unless `width` is given. Return the result."""
        return self._append_to(operation, self.new_value(like.width if width is None else width, like.rows))

    def _append_to(self, operation: Operation, out: Value) -> Value:
        """Append an operation whose result is `out`, and return `out`."""
        operation.out, operation.rows = out.index, out.rows
        self.operations.append(operation)
        return out


def matrices_of(operation: Operation) -> list[Matrix]:
    """Return the matrices with which an operation multiplies; empty for operations that are not products."""
    count = operation.heads if isinstance(operation, HeadsOperation) else 0
    if isinstance(operation, LinearOperation | ExpertsOperation):
        count = operation.num_matrices * (operation.num_experts if isinstance(operation, ExpertsOperation) else 1)
    return operation.matrices[:count] if count else []
