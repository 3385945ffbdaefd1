"""Read LoRA adapters in PEFT's format.

Source: PEFT 0.21, `LoraLayer` and `ParamWrapper`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError, CheckpointError, ConfigError, shortened
from paceline.models.adapters.adapter import Adapter, LowRank
from paceline.models.adapters.adapter_file import ModuleTensors, TensorRole, as_float32, read_adapter_file
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD, ExpertParameter, TargetModule
from paceline.models.adapters.settings import read_settings
from paceline.models.adapters.target import AdapterTargets, check_low_rank_biases, check_saved, check_targets
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.storage.fused_matrices import Rows
from paceline.models.weights import Weights

MAX_NAME_LEN = 200
_CHUNK_ROWS = 4096
_NUM_FLOAT32_COPIES = 2  # float32 copies of an adapter in memory: as read, and as the runtime stores it
Floats = NDArray[np.float32]


def read_adapter(
    directory: Path, *, name: str, config: ModelConfig, weights: Weights | None = None, memory_bytes: int | None = None
) -> Adapter:
    """Return the LoRA adapter in a directory, for the target of `config`.

    Args:
        name: by which requests select it.
        weights: the target's, to compute differences of biases; None = an adapter with biases is refused.
        memory_bytes: free memory. A larger adapter is refused before it is read. None = no limit.

    Raises:
        CapacityError: There is not enough memory.
        CheckpointError: It cannot be read, needs an unsupported computation, or was made for another model.
        ConfigError: The name is invalid, or the adapter has biases and `weights` is None.
        BackendUnavailableError: It is a PyTorch file, and torch is not installed.
    """
    check_name(name)
    settings = read_settings(directory)
    path, entries = read_adapter_file(directory, FAMILIES[config.family])
    targets = AdapterTargets(path, entries, settings, config)
    check_low_rank_biases(path, entries, settings)
    check_targets(path, entries, targets, settings, config)
    check_saved(path, entries, settings, config)
    if memory_bytes is not None:
        _check_memory(path, entries, memory_bytes)
    reader = _AdapterBuilder(path, targets, config, weights)
    for entry in entries:
        reader.read_module(entry)
    if settings.has_tied_head and config.tied_embeddings:
        reader.apply_to_tied_head()
    return reader.adapter(name)


def _check_memory(path: Path, entries: Sequence[ModuleTensors], memory_bytes: int) -> None:
    """Refuse an adapter that does not fit into memory: the system would kill the process."""
    size = _NUM_FLOAT32_COPIES * 4 * sum(math.prod(tensor.shape) for entry in entries for _, tensor in entry.tensors.values())
    if size > memory_bytes:
        raise CapacityError(
            f"{path} takes {size / 1e9:.3g} GB while it is read, {memory_bytes / 1e9:.3g} GB are free: use an adapter of a lower rank, "
            "remove others, or close programs"
        )


def check_name(name: object) -> None:
    """Check that a name can select an adapter in requests.

    Raises:
        ConfigError: The name is no printable text, or too long.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MAX_NAME_LEN:
        raise ConfigError(f"the adapter's name is {shortened(name)}: use 1 to {MAX_NAME_LEN} printable characters")


class _AdapterBuilder:
    """Builds an `Adapter` from the tensors of each module."""

    def __init__(self, path: Path, targets: AdapterTargets, config: ModelConfig, weights: Weights | None) -> None:
        self._path, self._targets, self._config, self._weights = path, targets, config, weights
        self._products: dict[str, LowRank] = {}
        self._biases: dict[str, Floats] = {}
        self._saved: dict[str, Floats] = {}

    def read_module(self, entry: ModuleTensors) -> None:
        """Read the tensors of one module.

        Raises:
            CheckpointError: A value is not finite, or a product is adapted twice.
        """
        target = self._targets.module_target(entry)
        if TensorRole.DOWN in entry.tensors:
            rank, scale = self._targets.rank_and_scale(entry)
            down, up = self._read_values(entry, TensorRole.DOWN), self._read_scaled(entry, TensorRole.UP, scale)
            if isinstance(target, ExpertParameter):
                self._read_expert_stack(target, down, up, rank)
                return
            for name, rows in target.parts.items():
                self._add_product(name, down, _select_rows(up, rows))
            if TensorRole.UP_BIAS in entry.tensors:
                self._add_biases(target, self._read_scaled(entry, TensorRole.UP_BIAS, scale))
        if isinstance(target, TargetModule) and TensorRole.BIAS in entry.tensors:
            self._replace_biases(target, self._read_values(entry, TensorRole.BIAS))
        if isinstance(target, TargetModule) and TensorRole.WHOLE in entry.tensors:
            self._read_whole_matrix(next(iter(target.parts)), self._read_values(entry, TensorRole.WHOLE))

    def apply_to_tied_head(self) -> None:
        """Apply the changes of the embedding to the tied head."""
        if EMBEDDING in self._saved:
            self._saved.setdefault(LM_HEAD, self._saved[EMBEDDING])
        if EMBEDDING in self._products and LM_HEAD not in self._products:
            own = self._products[EMBEDDING]
            self._add_product(LM_HEAD, np.ascontiguousarray(own.up.T), own.down.T)

    def adapter(self, name: str) -> Adapter:
        """Return the adapter built from the modules read so far."""
        return Adapter(name, _value_digest(self._products, self._biases, self._saved), self._products, self._biases, self._saved)

    def _read_values(self, entry: ModuleTensors, kind: TensorRole) -> Floats:
        name, tensor = entry.tensors[kind]
        return as_float32(self._path, name, tensor)

    def _read_scaled(self, entry: ModuleTensors, kind: TensorRole, scale: float) -> Floats:
        values = self._read_values(entry, kind)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= np.float32(scale)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._path}: {entry.tensors[kind][0]} times its scale {scale:g} is beyond float32: use another adapter"
            )
        return values

    def _add_product(self, name: str, down: Floats, up: Floats) -> None:
        if name in self._products:
            raise CheckpointError(f"{self._path} adapts {name} twice, alone and in a matrix with others: export the adapter again")
        self._products[name] = LowRank(down, np.ascontiguousarray(up))

    def _read_expert_stack(self, stack: ExpertParameter, down: Floats, up: Floats, rank: int) -> None:
        """Add the products of all experts. Experts are consecutive in the rows of `down`, and interleaved in the columns of `up`."""
        for number, parts in enumerate(stack.experts):
            own_down, own_up = down[number * rank : (number + 1) * rank], up[:, number :: len(stack.experts)]
            for name, rows in parts.items():
                self._add_product(name, own_down, _select_rows(own_up, rows))

    def _add_biases(self, module: TargetModule, values: Floats) -> None:
        for name, rows in module.parts.items():
            own = np.ascontiguousarray(_select_rows(values, rows))
            if own.any():
                self._biases[name] = self._biases[name] + own if name in self._biases else own

    def _replace_biases(self, module: TargetModule, values: Floats) -> None:
        """Add biases that replace the target's, stored as the difference from the target's biases."""
        if self._weights is None:
            raise ConfigError(f"{self._path} holds biases instead of the model's, which they are compared with: give its weights")
        for name, rows in module.parts.items():
            own = np.array(_select_rows(values, rows))
            for matrix in self._targets.matrices[name]:
                chosen = slice(None) if matrix.rows is None else matrix.rows
                part = own[chosen]
                own[chosen] = part - self._weights.rows(f"{matrix.name}.bias", np.arange(len(part), dtype=np.int32))
            self._add_biases(TargetModule(module.shape, {name: None}), own)

    def _read_whole_matrix(self, name: str, values: Floats) -> None:
        """Keep a whole matrix that replaces the target's. An unchanged matrix is left out."""
        if self._weights is None or not self._equals_target(name, values, self._weights):
            self._saved[name] = values

    def _equals_target(self, name: str, values: Floats, weights: Weights) -> bool:
        stem = "embedding" if self._config.tied_embeddings else self._targets.matrices[name][0].name
        starts = range(0, len(values), _CHUNK_ROWS)
        parts = (np.arange(start, min(start + _CHUNK_ROWS, len(values)), dtype=np.int32) for start in starts)
        return all(np.array_equal(weights.rows(f"{stem}.weight", part), values[part]) for part in parts)


def _select_rows(values: Floats, rows: Rows | None) -> Floats:
    return values if rows is None else values[rows]


def _value_digest(products: Mapping[str, LowRank], biases: Mapping[str, Floats], saved: Mapping[str, Floats]) -> bytes:
    digest = hashlib.sha256()
    low_rank = {f"{name} {part}": values for name, one in products.items() for part, values in (("down", one.down), ("up", one.up))}
    others = {f"{name} {part}": values for part, of_part in (("bias", biases), ("saved", saved)) for name, values in of_part.items()}
    for name, values in sorted({**low_rank, **others}.items()):
        digest.update(repr((name, values.shape)).encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
