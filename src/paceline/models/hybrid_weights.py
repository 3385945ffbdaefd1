"""Checkpoints with recurrent layers: products that lie in one matrix, and vectors stored otherwise than they are computed with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig, WeightType
from paceline.models.containers.module import Stored
from paceline.models.families import FAMILIES
from paceline.models.layers import AttentionConfig, DenseMLP, ExpertMLP, GatedDeltaConfig, Mamba2Config, Recurrent, ShortConvConfig
from paceline.models.packed import PackedMatrix
from paceline.models.packed_weights import PackedWeights
from paceline.models.safetensors_file import StoredTensor
from paceline.models.stored_model import open_stored
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import MadeWeights, Tensor, TensorFacts, Weights, as_float32, check_shape, open_tensor

Rows = slice | NDArray[np.int64]


class HybridWeights(MadeWeights):
    """The weights of a checkpoint directory; what is not stored as it is used is made when it is first asked for.

    Raises:
        CheckpointError: as `Weights.open`.
    """

    def __init__(self, directory: Path, config: ModelConfig, *, num_threads: int = 1) -> None:
        opened = open_stored(directory, config)
        parts = _Parts(directory, opened.tensors, opened.files, config)
        for index, layer in enumerate(config.layers):
            parts.of_mixer(index, layer.mixer)
            parts.of_mlp(index, layer.mlp)
        self._parts = parts.found
        plain = Weights.of_stored(directory, opened.tensors, opened.files, config, elsewhere=(*self._parts, *parts.packed))
        plain.describe(opened)
        plain.packed = {**plain.packed, **parts.packed}
        self._plain = plain = PackedWeights(plain, config, num_threads=num_threads)
        super().__init__(tensor_shapes(config), lambda name: self._parts[name].make() if name in self._parts else plain[name])
        self.own_head, self.has_encoders, self.packed = opened.own_head, opened.has_encoders, plain.packed
        self.container, self.notices = plain.container, plain.notices

    def facts(self, name: str) -> TensorFacts:
        return self._parts[name].facts if name in self._parts else self._plain.facts(name)

    def stored(self, name: str) -> tuple[NDArray[Any], ...]:
        return self._parts[name].arrays if name in self._parts else self._plain.stored(name)

    def forget(self, name: str) -> None:
        super().forget(name)
        self._plain.forget(name)


@dataclass(frozen=True, slots=True)
class _Made:
    """What is known of a tensor, the arrays of the file that it is made of, and how."""

    facts: TensorFacts
    arrays: tuple[NDArray[Any], ...]
    make: Callable[[], Tensor]


class _Parts:
    """Tensors made of others, which leave `stored` as they are read.

    Attributes:
        found: by our names.
        packed: quantised ones, likewise.
    """

    def __init__(self, directory: Path, stored: dict[str, Stored], files: Mapping[Path, NDArray[np.uint8]], config: ModelConfig) -> None:
        self._directory, self._stored, self._files = directory, stored, files
        self._hidden, self._family = config.hidden_size, FAMILIES[config.family]
        self.found: dict[str, _Made] = {}
        self.packed: dict[str, PackedMatrix] = {}

    def of_mixer(self, index: int, mixer: AttentionConfig | Recurrent | None) -> None:
        """Those of the mixer of layer `index`."""
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        if isinstance(mixer, AttentionConfig):
            if mixer.is_gated:
                heads = np.arange(2 * mixer.query_size).reshape(mixer.num_heads, 2, mixer.head_size)
                parts: dict[str, Rows] = {"q_proj": heads[:, 0].reshape(-1), "attention_gate": heads[:, 1].reshape(-1)}
                self._cut(ours, theirs + "self_attn.q_proj", 2 * mixer.query_size, parts, bias=mixer.bias)
        elif mixer is not None:
            self._of_recurrent(ours, theirs, mixer)

    def _of_recurrent(self, ours: str, theirs: str, mixer: Recurrent) -> None:
        prefix = f"{theirs}{self._family.recurrent_part}."
        self._convolution(ours, prefix + ("conv" if isinstance(mixer, ShortConvConfig) else "conv1d"), mixer)
        if mixer.state is not None:
            self._decay(ours, prefix + "A_log", mixer.state.heads)
        if isinstance(mixer, GatedDeltaConfig):
            if prefix + "in_proj_qkvz.weight" in self._stored:
                self._by_key_head(ours, prefix, mixer)
        elif isinstance(mixer, Mamba2Config):
            sizes = {"z_proj": mixer.state.value_width, "conv_proj": mixer.channels, "dt_proj": mixer.state.heads}
            self._cut(ours, prefix + "in_proj", sum(sizes.values()), _ranges(sizes), bias=mixer.bias)
        else:
            sizes = dict.fromkeys(("b_proj", "c_proj", "conv_proj"), mixer.channels)
            self._cut(ours, prefix + "in_proj", 3 * mixer.channels, _ranges(sizes), bias=mixer.bias)

    def of_mlp(self, index: int, mlp: DenseMLP | ExpertMLP | None) -> None:
        """Those of the MLP that every row runs through, where one matrix holds gate and up."""
        names, dense = self._family.part_names, mlp.shared if isinstance(mlp, ExpertMLP) else mlp
        if dense is not None and "gate_proj" in names and names["gate_proj"] == names["up_proj"]:
            ours = f"layers.{index}." if dense is mlp else f"layers.{index}.shared_expert."
            sizes = dict.fromkeys(("gate_proj", "up_proj"), dense.intermediate_size)
            self._cut(ours, f"model.layers.{index}.{names['gate_proj']}", 2 * dense.intermediate_size, _ranges(sizes), bias=dense.bias)

    def _by_key_head(self, ours: str, prefix: str, mixer: GatedDeltaConfig) -> None:
        """Products whose rows come for one key head after the other: its query, key, values and gates; its b and a."""
        count, group = mixer.num_key_heads, mixer.num_value_heads // mixer.num_key_heads
        values = group * mixer.value_size
        heads = np.arange(2 * mixer.state.key_width + 2 * mixer.state.value_width).reshape(count, -1)
        q, k, v, z = np.split(heads, np.cumsum([mixer.key_size, mixer.key_size, values]), axis=1)
        parts: dict[str, Rows] = {"conv_proj": np.concatenate([part.reshape(-1) for part in (q, k, v)]), "z_proj": z.reshape(-1)}
        self._cut(ours, prefix + "in_proj_qkvz", heads.size, parts)
        b, a = np.split(np.arange(2 * mixer.num_value_heads).reshape(count, -1), 2, axis=1)
        parts = {"b_proj": b.reshape(-1), "a_proj": a.reshape(-1)}
        self._cut(ours, prefix + "in_proj_ba", 2 * mixer.num_value_heads, parts)

    def _cut(self, ours: str, source: str, num_rows: int, parts: Mapping[str, Rows], *, bias: bool = False) -> None:
        """Tensors that are rows of a matrix, and those of its bias."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (num_rows, self._hidden), **({"bias": (num_rows,)} if bias else {})}
        for kind, shape in shapes.items():
            stored = self._stored.get(f"{source}.{kind}")
            if isinstance(stored, PackedMatrix):
                del self._stored[f"{source}.{kind}"]
                check_shape(f"{source}.{kind}", stored, shape)
                self.packed |= {f"{ours}{name}.{kind}": stored.rows(rows) for name, rows in parts.items()}
                continue
            whole = self._taken(f"{source}.{kind}", shape)
            for name, rows in parts.items():
                self.found[f"{ours}{name}.{kind}"] = _rows_of(whole, rows)

    def _convolution(self, ours: str, source: str, mixer: Recurrent) -> None:
        whole = self._taken(source + ".weight", (mixer.channels, 1, mixer.kernel_size))
        array = whole.array[:, 0]
        self.found[ours + "conv.weight"] = _made(whole.array, array.shape, whole.weight_type, lambda: array)

    def _decay(self, ours: str, source: str, heads: int) -> None:
        whole = self._taken(source, (heads,))
        self.found[ours + "decay.weight"] = _made(whole.array, (heads,), WeightType.F32, lambda: _decays(whole))

    def _taken(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._stored.pop(name, None)
        if not isinstance(stored, StoredTensor):
            raise CheckpointError(f"{self._directory} lacks {name} that its config.json calls for; is config.json another model's?")
        return open_tensor(name, stored, shape, self._files)


def _decays(logarithms: Tensor) -> NDArray[np.float32]:
    """What is too large becomes infinite: all is forgotten at once."""
    with np.errstate(over="ignore"):
        return -np.exp(as_float32(logarithms))


def _ranges(sizes: Mapping[str, int]) -> dict[str, Rows]:
    """Consecutive rows."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def _rows_of(whole: Tensor, rows: Rows) -> _Made:
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    array = whole.array[rows] if isinstance(rows, slice) else whole.array
    return _made(array, (count, *whole.shape[1:]), whole.weight_type, lambda: whole.array[rows])


def _made(stored: NDArray[Any], shape: tuple[int, ...], weight_type: WeightType, make: Callable[[], NDArray[Any]]) -> _Made:
    item_bytes = 4 if weight_type is WeightType.F32 else 2
    facts = TensorFacts(shape, weight_type, None, int(np.prod(shape)) * item_bytes)
    return _Made(facts, (stored,), lambda: Tensor(make(), weight_type, shape))
