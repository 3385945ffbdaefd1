"""Record the blocks of `runtimes/decoder.py` as a list of operations over buffers, which kernels/program.c runs."""

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.models.adapters.network_adapter import LM_HEAD
from paceline.models.config import ModelConfig
from paceline.models.layers import (
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
    LinearOperation,
    Matrix,
    MatrixKind,
    NormOperation,
    Operation,
    Packing,
    RankOperation,
    RopeOperation,
    RouteOperation,
    Rows,
    ScaleOperation,
    SigmoidGateOperation,
    SiluResidualOperation,
    SoftCapOperation,
    StateOperation,
)
from paceline.runtimes.native.weights import NativeWeights
from paceline.runtimes.ranking import Ranking

_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.SIGMOID: 3, Activation.NONE: 4, Activation.RELU: 5}


@dataclass(frozen=True, slots=True)
class Value:
    """The result of one operation: rows of `width` floats."""

    index: int
    width: int
    rows: Rows = Rows.ALL


class NativeBlocks:
    """Records operations on numbered values. `buffers.assign_buffers` then maps values to buffers."""

    def __init__(
        self, config: ModelConfig, weights: NativeWeights, cache_config: ModelConfig | None = None, *, supports_adapters: bool = False
    ) -> None:
        """Start with no operations.

        Args:
            cache_config: of the network that owns the cache; None = `config`.
            takes_adapters: whether rows may have adapters.
        """
        self._config, self._cache_config = config, cache_config or config
        self._weights = weights
        self._states = StateLayout.for_layers(self._cache_config.recurrent_layers)
        self.values: list[Value] = []
        self.inputs: dict[str, Value] = {}  # written before the pass
        self.operations: list[Operation] = []
        self._takes_adapters = supports_adapters
        self.sites: list[tuple[str, ...]] = []  # per operation, names of the matrices that adapters can change; of experts one name each
        self._num_rankings = 0
        self._result_widths: dict[int, int] = {}  # result width of values whose rows also hold scratch memory

    def result_width(self, value: Value) -> int:
        """Return the number of floats of a row that hold the result; the others are scratch memory of its operation."""
        return self._result_widths.get(value.index, value.width)

    def value(self, width: int, rows: Rows = Rows.ALL) -> Value:
        self.values.append(Value(len(self.values), width, rows))
        return self.values[-1]

    def embedding(self, name: str) -> Value:
        """Return an input; the runtime looks up the rows before the pass."""
        return self.input(TOKEN_IDS, self._config.hidden_size)

    def per_layer_embedding(self, name: str) -> Value:
        return self.input(PER_LAYER_EMBEDDINGS, self._config.num_layers * self._config.per_layer_input_size)

    def columns(self, x: Value, begin: int, width: int) -> Value:
        return self._append(ColumnsOperation(x=x.index, x_width=x.width, begin=begin, width=width), x, width)

    def input(self, name: str, width: int) -> Value:
        if name not in self.inputs:
            self.inputs[name] = self.value(width)
        return self.inputs[name]

    def concat(self, *values: Value) -> Value:
        joined = values[0]
        for value in values[1:]:
            operation = ConcatOperation(x=joined.index, y=value.index, x_width=joined.width, y_width=value.width)
            joined = self._append(operation, joined, joined.width + value.width)
        return joined

    def silu_residual(self, x: Value, y: Value) -> Value:
        return self._append(SiluResidualOperation(x=x.index, y=y.index, width=x.width), x)

    def rank(self, logits: Value, ranking: Ranking) -> Value:
        columns, ids = min(ranking.columns, logits.width), None
        if ranking.target_ids is not None:
            ids = (c_int32 * (columns + LANES))(*ranking.target_ids[:columns].tolist())
        operation = RankOperation(
            x=logits.index, width=logits.width, number=self._num_rankings, columns=columns, count=ranking.count, target_ids=ids
        )
        self._num_rankings += 1
        out = self._append(operation, logits, kernels().paceline_ranking_floats(columns, ranking.count))
        self._result_widths[out.index] = 2 + 2 * ranking.count
        return out

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        return self._record_products(x, names, names)

    def _record_products(self, x: Value, names: Sequence[str], adapted: Sequence[str]) -> tuple[Value, ...]:
        """Record products with the matrices `names`, whose names in adapters are `adapted`."""
        outs = []
        by_packing: dict[tuple[int, ...], list[tuple[Matrix, str]]] = {}
        for name, own in zip(names, adapted, strict=True):
            matrix = self._weights.matrix(name, len(self.values))
            outs.append(self.value(matrix.outputs, x.rows))
            by_packing.setdefault(self._packing_key(matrix), []).append((matrix, own))
        for (packing, *_), pairs in by_packing.items():
            array, site = (Matrix * len(pairs))(*(matrix for matrix, _ in pairs)), -1
            if self._takes_adapters:
                site = len(self.sites)
                self.sites.append(tuple(own for _, own in pairs))
            operation = LinearOperation(x=x.index, num_matrices=len(array), packing=packing, site=site, block_max=-1, matrices=array)
            self._append_to(operation, outs[0])
        return tuple(outs)

    def append_block_max(self, logits: Value) -> Value | None:
        """Return the maximum of each BLOCK_COLUMNS logits of a row, [R, ceil(V / BLOCK_COLUMNS)]; None if several products made them."""
        for operation in self.operations:
            if isinstance(operation, LinearOperation) and operation.num_matrices == 1 and operation.matrices[0].out == logits.index:
                block_max = self.value(-(-logits.width // BLOCK_COLUMNS), logits.rows)
                operation.block_max = block_max.index
                return block_max
        return None

    def rms_norm(self, x: Value, name: str) -> Value:
        return self.head_norm(x, name, 1)

    def head_norm(self, x: Value, name: str | None, num_heads: int) -> Value:
        return self._record_norm(x, name, num_heads, weighted_heads=1)

    def group_norm(self, x: Value, name: str, num_groups: int) -> Value:
        return self._record_norm(x, name, num_groups, weighted_heads=num_groups)

    def convolution(self, x: Value, mixer: Recurrent, layer: int) -> Value:
        place, name = self._states.layers[layer], f"layers.{layer}.conv"
        bias = self._weights.vector(name + ".bias") if self._weights.has(name + ".bias") else None
        operation = ConvolutionOperation(
            x=x.index, channels=mixer.channels, kernel_size=mixer.kernel_size, is_activated=not isinstance(mixer, ShortConvConfig),
            conv_at=place.conv_offset, record_at=place.record_offset, weight=self._weights.transposed(name + ".weight"), bias=bias,
        )  # fmt: skip
        return self._append(operation, x)

    def block_convolution(self, x: Value, added: Value, convolution: BlockConvolution, name: str, side: int) -> Value:
        size = convolution.kernel_size
        operation = BlockConvolutionOperation(
            x=x.index, added=added.index, width=x.width, added_width=added.width, added_at=side * (added.width // 2), kernel_size=size,
            group=convolution.group_size, base=self._weights.vector(name + ".weight") + 4 * side * size * x.width,
        )  # fmt: skip
        return self._append(operation, x)

    def delta_rule(self, x: Value, b: Value, a: Value, mixer: GatedDeltaConfig, layer: int) -> Value:
        return self._record_state_operation(x, a, b, mixer, layer)

    def mamba2(self, x: Value, dt: Value, mixer: Mamba2Config, layer: int) -> Value:
        return self._record_state_operation(x, dt, None, mixer, layer)

    def rope(self, x: Value, num_heads: int, rope: RopeConfig) -> Value:
        head_size = x.width // num_heads
        half, table = rope.rotary_size(head_size) // 2, self._config.rope_variants.index((rope, head_size))
        return self._append(RopeOperation(x=x.index, heads=num_heads, head_size=head_size, rotary_half=half, table=table), x)

    def attention(self, q: Value, kv: tuple[Value, Value] | None, attention: AttentionConfig, layer: int) -> Value:
        return self._append(self._attention(q.index, kv, attention, layer), q)

    def store_kv(self, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        return self._append(self._attention(-1, (k, v), attention, layer), k, 1)

    def _attention(self, q: int, kv: tuple[Value, Value] | None, attention: AttentionConfig, layer: int) -> AttentionOperation:
        k, v = (-1, -1) if kv is None else (kv[0].index, kv[1].index)
        owner = layer if attention.kv_layer is None else attention.kv_layer
        return AttentionOperation(
            q=q, k=k, v=v, heads=attention.num_heads, kv_heads=attention.num_kv_heads, head_size=attention.head_size,
            layer=owner, tables=self._cache_config.block_table_index(owner), window=attention.window or 0,
            is_causal=attention.is_causal, scale=attention.scale, soft_cap=attention.soft_cap or 0.0,
            sinks=self._weights.vector(f"layers.{layer}.attention.sinks", exact=True) if attention.has_sinks else None,
        )  # fmt: skip

    def gated(self, gate: Value, up: Value, activation: Activation | ClampedSwiGLU) -> Value:
        number, slope, limit = 2, 0.0, 0.0
        if isinstance(activation, ClampedSwiGLU):
            slope, limit = activation.slope, activation.limit
        else:
            number = _ACTIVATIONS[activation]
        operation = GatedOperation(x=gate.index, up=up.index, width=gate.width, activation=number, slope=slope, limit=limit)
        return self._append(operation, gate)

    def experts(self, x: Value, logits: Value, mlp: ExpertMLP, prefix: str) -> Value:
        routing = mlp.routing
        routes = self._record_routing(logits, routing, prefix)
        *front, back = [f"{prefix}experts.{{}}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        *gates, up = self._expert_products(x, routes, routing, *front[not mlp.expert.has_gate :], of_pairs=False)
        active = self.gated(gates[0] if gates else up, up, mlp.expert.activation)
        (down,) = self._expert_products(active, routes, routing, back, of_pairs=True)
        width = down.width // routing.num_experts_per_token
        return self._append(
            CombineOperation(x=down.index, routes=routes.index, chosen=routing.num_experts_per_token, width=width), x, width
        )

    def sigmoid_gate(self, x: Value, y: Value) -> Value:
        return self._append(SigmoidGateOperation(x=x.index, y=y.index, width=x.width), x)

    def add(self, x: Value, y: Value) -> Value:
        return self._append(AddOperation(x=x.index, y=y.index, width=x.width), x)

    def scale(self, x: Value, factor: float) -> Value:
        return self._append(ScaleOperation(x=x.index, width=x.width, factor=factor), x)

    def scale_by(self, x: Value, name: str) -> Value:
        return self.scale(x, self._weights.scalar(name + ".weight"))

    def logits_rows(self, x: Value) -> Value:
        return self._append_to(GatherOperation(x=x.index, width=x.width), self.value(x.width, Rows.LOGITS))

    def lm_head(self, x: Value, name: str) -> Value:
        return self._record_products(x, (name,), (LM_HEAD,))[0]

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._append(SoftCapOperation(x=x.index, width=x.width, cap=cap), x)

    def _record_norm(self, x: Value, name: str | None, num_heads: int, *, weighted_heads: int) -> Value:
        config = self._config
        weight = None if name is None else self._weights.vector(name + ".weight", exact=config.has_norm_offset)
        operation = NormOperation(
            x=x.index,
            heads=num_heads,
            head_size=x.width // num_heads,
            epsilon=config.norm_eps,
            weighted_heads=weighted_heads,
            weight=weight,
        )
        return self._append(operation, x)

    def _record_state_operation(self, x: Value, a: Value, b: Value | None, mixer: GatedDeltaConfig | Mamba2Config, layer: int) -> Value:
        state, place, prefix = mixer.state_shape, self._states.layers[layer], f"layers.{layer}."
        work = self.value(4 * state.key_width + state.value_width + 2 * state.heads + 2 * CHECKPOINT_INTERVAL * state.key_heads)
        min_step, max_step = mixer.dt_limits if isinstance(mixer, Mamba2Config) else (0.0, float("inf"))
        operation = StateOperation(
            x=x.index, a=a.index, b=-1 if b is None else b.index, work=work.index, channels=mixer.channels, heads=state.heads,
            key_heads=state.key_heads, rows_of_state=state.rows, columns=state.columns, block=place.block,
            is_delta=isinstance(mixer, GatedDeltaConfig), matrices_at=place.matrices_offset, keys_at=place.record_offset + mixer.channels,
            work_floats=work.width, min_step=min_step, max_step=max_step,
            decay=self._weights.vector(prefix + "decay.weight", exact=True), bias=self._weights.vector(prefix + "decay.bias", exact=True),
            skip=self._weights.vector(prefix + "skip.weight", exact=True) if isinstance(mixer, Mamba2Config) else None,
        )  # fmt: skip
        return self._append(operation, x, state.value_width)

    def _record_routing(self, logits: Value, routing: ExpertRouting, prefix: str) -> Value:
        """Record the routing of rows to experts: 8 numbers per pair of row and expert, and one for all (`Routes` in kernels/native.h)."""
        correction, scales = (
            self._weights.vector(f"{prefix}router.{name}", exact=True) if exists else None
            for name, exists in (("correction", routing.has_correction_bias), ("scales", routing.has_scales))
        )
        operation = RouteOperation(
            x=logits.index, experts=routing.num_experts, chosen=routing.num_experts_per_token,
            scoring=(RouterScoring.SOFTMAX, RouterScoring.SIGMOID).index(routing.scoring),
            groups=routing.num_groups, chosen_groups=routing.chosen_groups, is_normalized=routing.is_normalized, epsilon=routing.epsilon,
            factor=routing.factor, correction=correction, scales=scales,
        )  # fmt: skip
        return self._append(operation, logits, 8 * routing.num_experts_per_token + 1)

    def _expert_products(self, x: Value, routes: Value, routing: ExpertRouting, *names: str, of_pairs: bool) -> tuple[Value, ...]:
        """Record the products of a mixture of experts, one for each pair of a row and one of its experts; the pairs are in any order.

        Args:
            of_pairs: x has a row for each pair; otherwise one for each row of the pass.
            names: of the matrices, with a placeholder for the expert's number.
        """
        outs: list[Value] = []
        by_packing: dict[tuple[int, ...], list[tuple[str, list[Matrix]]]] = {}
        for name in names:
            matrices = self._weights.matrices([name.format(expert) for expert in range(routing.num_experts)], len(self.values))
            packings = {self._packing_key(matrix) for matrix in matrices}
            if len(packings) > 1:
                raise ConfigError(f"the experts' matrices {name.format('*')} have different formats: quantise all of them the same way")
            outs.append(self.value(matrices[0].outputs * routing.num_experts_per_token, x.rows))
            by_packing.setdefault(packings.pop(), []).append((name, matrices))
        for (packing, *_), own in by_packing.items():
            array, site = (Matrix * (len(own) * routing.num_experts))(*(matrix for _, matrices in own for matrix in matrices)), -1
            if self._takes_adapters:
                site = len(self.sites)
                self.sites += [tuple(name.format(expert) for name, _ in own) for expert in range(routing.num_experts)]
            operation = ExpertsOperation(
                x=x.index, routes=routes.index, chosen=routing.num_experts_per_token, experts=routing.num_experts,
                num_matrices=len(own), packing=packing, of_pairs=of_pairs, site=site, matrices=array,
            )  # fmt: skip
            self._append_to(operation, outs[0])
        return tuple(outs)

    def _packing_key(self, matrix: Matrix) -> tuple[int, ...]:
        """Return how input rows are packed for a matrix; matrices with equal results can share packed rows.

        Rows are rounded to 8 bits for panels, and to bfloat16 for bfloat16 weights if that is the compute type.
        """
        if matrix.kind in PANEL_KINDS:
            return Packing.BYTES, matrix.group, matrix.zero_point, matrix.kind in NARROW_KINDS, matrix.kind in TABLE_KINDS
        return (Packing.BF16 if self._weights.rounds_to_bf16 and matrix.kind == MatrixKind.BF16 else Packing.FLOATS,)

    def _append(self, operation: Operation, like: Value, width: int | None = None) -> Value:
        """Append an operation on the rows of `like` and return its result; its width is that of `like` by default."""
        return self._append_to(operation, self.value(like.width if width is None else width, like.rows))

    def _append_to(self, operation: Operation, out: Value) -> Value:
        """Append an operation that writes `out`."""
        operation.out, operation.rows = out.index, out.rows
        self.operations.append(operation)
        return out


@dataclass(frozen=True, slots=True)
class RecordedNetwork:
    """A network as operations.

    Attributes:
        operations: with buffer numbers, not value numbers.
        widths: floats of a row of each buffer.
        sites: the products of each operation that adapters can change; of experts one entry each.
    """

    operations: list[Operation]
    widths: list[int]
    sites: Sequence[tuple[str, ...]] = ()


def matrices_of(operation: Operation) -> list[Matrix]:
    """Return the matrices of a product; empty for other operations."""
    count = 0
    if isinstance(operation, LinearOperation | ExpertsOperation):
        count = operation.num_matrices * (operation.experts if isinstance(operation, ExpertsOperation) else 1)
    return operation.matrices[:count] if count else []
