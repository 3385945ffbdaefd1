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
from paceline.models.adapters.adapter import Adapter, LowRankUpdate
from paceline.models.adapters.adapter_file import ModuleTensors, TensorRole, as_float32, read_adapter_file
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD, ExpertParameter, TargetModule
from paceline.models.adapters.settings import read_settings
from paceline.models.adapters.target import AdapterTargets
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.storage.fused_matrices import RowSelection
from paceline.models.weights import Weights

MAX_ADAPTER_NAME_LEN = 200
_ROWS_PER_COMPARISON = 4096
MAX_ADAPTER_COPIES = 2  # float32 copies in memory at once while an adapter is loaded: the tensors read, and what the runtime stores
Floats = NDArray[np.float32]


def read_adapter(
    directory: Path, *, name: str, config: ModelConfig, weights: Weights | None = None, memory_bytes: int | None = None
) -> Adapter:
    """Return the LoRA adapter in a directory.

    Args:
        name: name by which requests select the adapter.
        config: config of the target.
        weights: weights of the target; None = an adapter with biases, whose reading needs the weights, is refused.
        memory_bytes: free memory in bytes. An adapter that needs more is refused before it is read. None = no limit.

    Raises:
        CapacityError: There is not enough memory.
        CheckpointError: The adapter cannot be read, needs an unsupported computation, or was made for another model.
        ConfigError: The name is invalid, or the adapter has biases and `weights` is None.
        BackendUnavailableError: The adapter is a PyTorch file, and torch is not installed.
    """
    check_adapter_name(name)
    settings = read_settings(directory)
    path, modules = read_adapter_file(directory, FAMILIES[config.family])
    targets = AdapterTargets(path, modules, settings, config)
    if memory_bytes is not None:
        _check_memory(path, modules, memory_bytes)
    builder = _AdapterBuilder(path, targets, config, weights)
    for module in modules:
        builder.add_module(module)
    if settings.changes_tied_lm_head and config.tied_embeddings:
        builder.copy_embedding_changes_to_lm_head()
    return builder.build(name)


def _check_memory(path: Path, modules: Sequence[ModuleTensors], memory_bytes: int) -> None:
    """Refuse an adapter that does not fit into memory: the operating system would kill the process."""
    size = MAX_ADAPTER_COPIES * 4 * sum(math.prod(tensor.shape) for module in modules for _, tensor in module.tensors.values())
    if size > memory_bytes:
        raise CapacityError(
            f"{path} takes {size / 1e9:.3g} GB while it is read, {memory_bytes / 1e9:.3g} GB are free: use an adapter of a lower rank, "
            "remove others, or close programs"
        )


def check_adapter_name(name: object) -> None:
    """Check that a name can select an adapter in requests.

    Raises:
        ConfigError: The name is empty, too long, or not printable.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MAX_ADAPTER_NAME_LEN:
        raise ConfigError(f"the adapter's name is {shortened(name)}: use 1 to {MAX_ADAPTER_NAME_LEN} printable characters")


class _AdapterBuilder:
    """Builds an `Adapter` from the tensors of its modules."""

    def __init__(self, path: Path, targets: AdapterTargets, config: ModelConfig, weights: Weights | None) -> None:
        self._path, self._targets, self._config, self._weights = path, targets, config, weights
        self._updates: dict[str, LowRankUpdate] = {}
        self._biases: dict[str, Floats] = {}
        self._replacements: dict[str, Floats] = {}

    def add_module(self, module: ModuleTensors) -> None:
        """Read the tensors of one module.

        Raises:
            CheckpointError: A value is not finite, or a matrix is adapted twice.
        """
        target = self._targets.find_target(module)
        if TensorRole.LORA_A in module.tensors:
            rank, scale = self._targets.rank_and_scale(module)
            lora_a, lora_b = self._read_values(module, TensorRole.LORA_A), self._read_scaled_values(module, TensorRole.LORA_B, scale)
            if isinstance(target, ExpertParameter):
                self._add_expert_updates(target, lora_a, lora_b, rank)
                return
            assert target is not None  # `AdapterTargets` refuses unknown modules
            for name, rows in target.rows_by_matrix.items():
                self._add_update(name, lora_a, _select_rows(lora_b, rows))
            if TensorRole.LORA_B_BIAS in module.tensors:
                self._add_biases(target, self._read_scaled_values(module, TensorRole.LORA_B_BIAS, scale))
        if isinstance(target, TargetModule) and TensorRole.BIAS in module.tensors:
            self._add_replaced_biases(target, self._read_values(module, TensorRole.BIAS))
        if isinstance(target, TargetModule) and TensorRole.FULL_WEIGHT in module.tensors:
            self._add_replacement(next(iter(target.rows_by_matrix)), self._read_values(module, TensorRole.FULL_WEIGHT))

    def copy_embedding_changes_to_lm_head(self) -> None:
        """Apply the adapter's changes to the embedding to the tied lm_head as well."""
        if EMBEDDING in self._replacements:
            self._replacements.setdefault(LM_HEAD, self._replacements[EMBEDDING])
        if EMBEDDING in self._updates and LM_HEAD not in self._updates:
            update = self._updates[EMBEDDING]
            self._add_update(LM_HEAD, np.ascontiguousarray(update.lora_b.T), update.lora_a.T)

    def build(self, name: str) -> Adapter:
        """Return an adapter of all added modules."""
        digest = _adapter_digest(self._updates, self._biases, self._replacements)
        return Adapter(name, digest, self._updates, self._biases, self._replacements)

    def _read_values(self, module: ModuleTensors, role: TensorRole) -> Floats:
        """Return the tensor that has a role in a module, such as lora_A or bias, in float32."""
        name, tensor = module.tensors[role]
        return as_float32(self._path, name, tensor)

    def _read_scaled_values(self, module: ModuleTensors, role: TensorRole, scale: float) -> Floats:
        values = self._read_values(module, role)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= np.float32(scale)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._path}: {module.tensors[role][0]} times its scale {scale:g} is beyond float32: use another adapter"
            )
        return values

    def _add_update(self, name: str, lora_a: Floats, lora_b: Floats) -> None:
        if name in self._updates:
            raise CheckpointError(f"{self._path} adapts {name} twice, in a separate and in a fused matrix: export the adapter again")
        self._updates[name] = LowRankUpdate(lora_a, np.ascontiguousarray(lora_b))

    def _add_expert_updates(self, parameter: ExpertParameter, lora_a: Floats, lora_b: Floats, rank: int) -> None:
        """Add the updates of all experts. Rows of lora_A are ordered by expert and then rank, columns of lora_B by rank and then expert."""
        for expert, parts in enumerate(parameter.rows_by_expert):
            expert_a, expert_b = lora_a[expert * rank : (expert + 1) * rank], lora_b[:, expert :: len(parameter.rows_by_expert)]
            for name, rows in parts.items():
                self._add_update(name, expert_a, _select_rows(expert_b, rows))

    def _add_biases(self, module: TargetModule, values: Floats) -> None:
        for name, rows in module.rows_by_matrix.items():
            bias = np.ascontiguousarray(_select_rows(values, rows))
            if bias.any():
                self._biases[name] = self._biases[name] + bias if name in self._biases else bias

    def _add_replaced_biases(self, module: TargetModule, values: Floats) -> None:
        """Add biases that replace the target's. The adapter then holds the new bias minus the target's bias."""
        if self._weights is None:
            raise ConfigError(f"{self._path} holds biases that replace the model's: pass `weights`, which they are compared with")
        for name, rows in module.rows_by_matrix.items():
            difference = np.array(_select_rows(values, rows))
            for matrix in self._targets.matrices[name]:
                selected = slice(None) if matrix.lora_b_rows is None else matrix.lora_b_rows
                part = difference[selected]
                difference[selected] = part - self._weights.read_rows(f"{matrix.name}.bias", np.arange(len(part), dtype=np.int32))
            self._add_biases(TargetModule(module.shape, {name: None}), difference)

    def _add_replacement(self, name: str, values: Floats) -> None:
        """Add a matrix that replaces the target's, unless it equals the target's."""
        if self._weights is None or not self._equals_target(name, values, self._weights):
            self._replacements[name] = values

    def _equals_target(self, name: str, values: Floats, weights: Weights) -> bool:
        matrix_name = "embedding" if self._config.tied_embeddings else self._targets.matrices[name][0].name
        chunks = np.array_split(np.arange(len(values), dtype=np.int32), range(_ROWS_PER_COMPARISON, len(values), _ROWS_PER_COMPARISON))
        return all(np.array_equal(weights.read_rows(f"{matrix_name}.weight", rows), values[rows]) for rows in chunks)


def _select_rows(values: Floats, rows: RowSelection | None) -> Floats:
    return values if rows is None else values[rows]


def _adapter_digest(updates: Mapping[str, LowRankUpdate], biases: Mapping[str, Floats], replacements: Mapping[str, Floats]) -> bytes:
    digest = hashlib.sha256()
    arrays = {f"{name} {part}": getattr(update, part) for name, update in updates.items() for part in ("lora_a", "lora_b")}
    arrays |= {f"{name} bias": values for name, values in biases.items()}
    arrays |= {f"{name} saved": values for name, values in replacements.items()}
    for name, values in sorted(arrays.items()):
        digest.update(repr((name, values.shape)).encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
