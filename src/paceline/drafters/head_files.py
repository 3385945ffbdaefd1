"""The files of a drafting head: tensors, config.json, and the drafting method that the head was trained for.

A head is stored in safetensors or PyTorch files, with or without a config.json. Prefixes that training code leaves in tensor names are
removed. PyTorch files are read with `weights_only=True`, so that code in them does not run.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_kinds import MEDUSA_AND_HYDRA_FILE_NAMES, HeadKind, detect_head_kind
from paceline.errors import CheckpointError, IncompatibleDrafterError, name_list
from paceline.models.config import FLOAT_TYPES, ModelConfig, WeightType
from paceline.models.gguf.stored_tensor import TensorSource, read_tensor
from paceline.models.storage.safetensors_file import checkpoint_files
from paceline.models.storage.tensor_file import ITEM_TYPES, FileTensor, read_tensors
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import AnyTensor, Tensor
from paceline.small_files import INDEX_BYTES, is_file, read_json

_TRAINING_PREFIXES = re.compile(r"^(?:module\.|model\.|draft_model\.|eagle_module\.|ea_layer\.)*")
_INDEX_PATTERN = "[0-9]{1,6}"  # index of a layer or head; more digits only occur in damaged files

Shapes = dict[str, tuple[int, ...]]
GGUF_LAYER_MODULE_NAMES = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Modules of a decoder layer: name in GGUF files -> name in safetensors and PyTorch files."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The tensors and config of a head. Values of a tensor are only read from the file when they are needed."""

    path: Path  # directory of the head, or its file
    config: Mapping[str, Any]  # contents of config.json; empty if there is none
    tensors: Mapping[str, FileTensor]  # tensors by name, without prefixes such as `module.`
    kind: HeadKind
    files: tuple[Path, ...] = ()  # the files that contain the tensors
    quantized: Mapping[str, TensorSource] = field(default_factory=dict)  # matrices that a GGUF file stores in quantised blocks

    @classmethod
    def open(cls, path: Path) -> "HeadFiles":
        """Open the head in a directory or file. A config.json in the file's directory is read too.

        Raises:
            CheckpointError: there is no head, or a file is damaged.
            IncompatibleDrafterError: the drafting method of the head is unknown.
            BackendUnavailableError: a library that reads the files is not installed.
        """
        directory = path if path.is_dir() else path.parent
        config = read_json(directory / "config.json") or {}
        files = (path,) if path.is_file() else _tensor_files(directory)
        tensors_with_prefixes: dict[str, FileTensor] = {}
        for file in files:
            tensors_with_prefixes.update(read_tensors(file, "head"))
        tensors: dict[str, FileTensor] = {}
        for name in sorted(tensors_with_prefixes, key=len):  # names without a prefix are shorter and have priority
            tensors.setdefault(strip_prefixes(name), tensors_with_prefixes[name])
        kind = detect_head_kind(path, config, {name: tensor.shape for name, tensor in tensors.items()}, files)
        return cls(path, config, tensors, kind, files)

    @property
    def config_path(self) -> Path:
        """Path of config.json; path of the GGUF file if the config is its metadata."""
        if self.path.suffix == ".gguf":
            return self.path
        return self.path / "config.json" if self.path.is_dir() else self.path.with_name("config.json")

    @property
    def is_speculators(self) -> bool:
        """Whether the files have the format of the speculators library."""
        return "speculators_model_type" in self.config

    def with_canonical_names(self, aliases: Mapping[str, str]) -> "HeadFiles":
        """Return the files with tensor names of other formats converted to one set of names.

        Args:
            aliases: prefixes of tensor names in other formats -> our prefixes.

        Raises:
            CheckpointError: the files contain a tensor under two names.
        """
        renamed: dict[str, FileTensor] = {}
        for name, tensor in self.tensors.items():
            alias = next((alias for alias in aliases if name.startswith(alias)), None)
            canonical = name if alias is None else aliases[alias] + name.removeprefix(alias)
            if canonical in renamed:
                raise CheckpointError(f"{self.path} holds {canonical} under two names, one of them {name}: the file is damaged")
            renamed[canonical] = tensor
        return replace(self, tensors=renamed)

    def matrix_shape(self, name: str) -> tuple[int, int] | None:
        """Return the numbers of rows and columns of a matrix; None if there is no tensor of this name.

        Raises:
            CheckpointError: the tensor is not a matrix.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if len(tensor.shape) != 2:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of shape {list(tensor.shape)}, expected a matrix: it may belong to another head"
            )
        return tensor.shape[0], tensor.shape[1]

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a matrix; 0 if there is no tensor of this name. Errors as for `matrix_shape`."""
        return (self.matrix_shape(name) or (0, 0))[0]

    def count_indices(self, pattern: str) -> int:
        """Return how many different indices tensor names have in place of the `{}` of a pattern, such as the 12 of "layers.{}.".

        Raises:
            CheckpointError: the indices are not 0, 1, … without gaps.
        """
        regex = re.compile(re.escape(pattern).replace(r"\{\}", f"({_INDEX_PATTERN})"))
        indices = {int(match[1]) for name in self.tensors if (match := regex.match(name))}
        if indices and max(indices) >= len(indices):
            missing = next(index for index in range(len(indices)) if index not in indices)
            largest_name, missing_name = pattern.format(max(indices)), pattern.format(missing)
            raise CheckpointError(f"{self.path} holds {largest_name}* and no {missing_name}*: the file is damaged, download it again")
        return len(indices)

    def weight(self, name: str) -> Tensor:
        """Open a floating-point tensor; float64 is converted to float32.

        Raises:
            CheckpointError: the tensor is stored in another data type.
        """
        tensor = self.tensors[name]
        if tensor.dtype == "F64":
            return Tensor(tensor.read_values().astype(np.float32), WeightType.F32, tensor.shape)
        if tensor.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {tensor.dtype}, supported are {', '.join(FLOAT_TYPES)}: use an unquantised head"
            )
        return Tensor(tensor.read_values(), FLOAT_TYPES[tensor.dtype], tensor.shape)

    def matrix(self, name: str, num_threads: int = 1) -> AnyTensor:
        """Open a floating-point tensor, or a quantised matrix of a GGUF file, which stays quantised.

        Args:
            num_threads: threads that convert the quantised blocks.

        Raises:
            CheckpointError: the tensor is stored in another data type.
        """
        source = self.quantized.get(name)
        return self.weight(name) if source is None else read_tensor(name, source, regroup=False, num_threads=num_threads)

    def integer_vector(self, name: str) -> NDArray[np.int64]:
        """Read a one-dimensional tensor of integers or booleans, such as `d2t`.

        Raises:
            CheckpointError: the tensor is not one-dimensional, or contains neither integers nor booleans.
        """
        tensor = self.tensors[name]
        if tensor.dtype in ("F32", "F16", "BF16", "F64") or tensor.dtype not in ITEM_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {tensor.dtype}, expected integers: it may belong to another head"
            )
        if len(tensor.shape) != 1:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {list(tensor.shape)}, expected a vector: it may belong to another head"
            )
        return tensor.read_values().astype(np.int64)

    def check_shapes(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Check that all required tensors are there, and that required and optional tensors have these shapes.

        Raises:
            CheckpointError: tensors are missing or have other shapes; the error lists all of them.
        """
        expected = {**required, **(optional or {})}
        missing = [f"{name} {list(shape)}" for name, shape in required.items() if name not in self.tensors]
        wrong = [
            f"{name} {list(self.tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        if missing or wrong:
            problems = [f"it lacks {name_list(missing)}"] * bool(missing) + [f"it holds {name_list(wrong)}"] * bool(wrong)
            raise CheckpointError(f"{self.path} is no complete {self.kind.value} head for this target: {'; '.join(problems)}")

    def check_all_used(self, used: Iterable[str], *, ignored: Callable[[str], bool] = lambda _: False) -> None:
        """Check that the files contain no unknown tensors. An unknown tensor is part of a computation that paceline lacks.

        Args:
            used: names of the tensors that the network uses.
            ignored: returns whether a tensor, given by name, is known to be unused; rotary frequencies always are.

        Raises:
            CheckpointError: tensors are neither used nor ignored; the error lists all of them.
        """
        known = set(used)
        unknown = [name for name in self.tensors if name not in known and not name.endswith("rotary_emb.inv_freq") and not ignored(name)]
        if unknown:
            raise CheckpointError(
                f"{self.path} holds {name_list(unknown)} that no known {self.kind.value} head has: it may compute something else with them;"
                " use another head, or another drafter"
            )


def layer_tensors(layers: ModelConfig) -> tuple[dict[str, str], Shapes, Shapes]:
    """Return internal names, shapes of required tensors and shapes of optional biases of decoder layers, all by name in the file."""
    shapes = tensor_shapes(layers)
    names = {in_file.removeprefix("model."): name for name, in_file in checkpoint_names(layers).items() if name.startswith("layers.")}
    required = {in_file: shapes[name] for in_file, name in names.items()}
    projections = [in_file.removesuffix("weight") for in_file in names if in_file.endswith("_proj.weight")]
    names |= {f"{stem}bias": names[f"{stem}weight"].removesuffix("weight") + "bias" for stem in projections}
    return names, required, {f"{stem}bias": required[f"{stem}weight"][:1] for stem in projections}


def gguf_tensors(sources: Mapping[str, TensorSource]) -> tuple[dict[str, FileTensor], dict[str, TensorSource]]:
    """Return the tensors of a GGUF file by their names in safetensors files, and the locations and data types of the quantised ones.

    Only `HeadFiles.matrix` can read the values of a quantised tensor. GGUF files contain target ids in `d2t`; offsets are returned.
    `sources` contains for each name the tensor in the file, its shape and its row order.
    """
    tensors = {
        name: FileTensor(source.shape, source.tensor.block_type.name, partial(_read_gguf_values, name, source))
        for name, source in sources.items()
    }
    return tensors, {name: source for name, source in sources.items() if source.tensor.block_type.name not in ITEM_TYPES}


def _read_gguf_values(name: str, source: TensorSource) -> NDArray[Any]:
    tensor, item_type = source.tensor, ITEM_TYPES.get(source.tensor.block_type.name)
    if item_type is None:
        types = ", ".join(FLOAT_TYPES)
        raise CheckpointError(f"{tensor} is of type {tensor.block_type.name}, expected one of {types}; download the file again")
    values = tensor.data.view(np.dtype(item_type)).reshape(source.shape)
    values = values if source.row_order is None else values[source.row_order()]
    if name == "d2t" and values.ndim == 1 and values.dtype.kind in "iu":
        return values - np.arange(len(values))
    return values if values.flags.aligned else values.copy()


def is_head_file(name: str) -> bool:
    """Return whether a path is a file, not a directory, that can contain a head."""
    path = Path(name)
    return path.suffix in (".pt", ".bin", ".safetensors") and is_file(path)


def strip_prefixes(name: str) -> str:
    """Return a tensor's name without the prefixes that training code leaves, such as `module.`."""
    return _TRAINING_PREFIXES.sub("", name, count=1)


def rename_module(name: str, modules: Mapping[str, str]) -> str:
    """Return a tensor's name with its module renamed if `modules` has another name for it."""
    module, kind = name.rsplit(".", 1)
    return f"{modules.get(module, module)}.{kind}"


def check_target_sizes(files: HeadFiles, target: ModelConfig, *, hidden_size: int, num_vocab_rows: int | None = None) -> None:
    """Check that a head was made for a target of this hidden size and vocabulary size.

    Args:
        hidden_size: hidden size of the target that the head expects.
        num_vocab_rows: number of target ids that the head's embedding or lm_head has rows for; None = it has neither. Padding may
            make it differ from the target's vocabulary size.

    Raises:
        IncompatibleDrafterError: a size differs.
    """
    if hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} takes features of {hidden_size} values, the target's have {target.hidden_size}: "
            "it was made for another model"
        )
    if num_vocab_rows is not None and (num_vocab_rows == 0 or abs(num_vocab_rows - target.vocab_size) > max(1024, target.vocab_size // 20)):
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} has {num_vocab_rows} token ids, the target {target.vocab_size}: "
            "it was made for another base model"
        )


def read_target_ids(files: HeadFiles, size: int, target: ModelConfig) -> NDArray[np.int64] | None:
    """Return the target id of each of `size` draft ids; None if draft ids are target ids.

    `d2t` contains target id minus draft id for each draft id. The target ids must ascend. `t2d`, if any, is True for these target ids.

    Raises:
        IncompatibleDrafterError: a target id is not in the target's vocabulary.
        CheckpointError: `d2t` and `t2d` contradict each other.
    """
    if "d2t" not in files.tensors:
        return None
    offsets = files.integer_vector("d2t")
    if offsets.shape != (size,):
        raise CheckpointError(f"{files.path}: d2t has {list(offsets.shape)} entries for {size} rows of lm_head.weight; download it again")
    ids = np.arange(size) + offsets
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or np.any(np.diff(ids) <= 0)):
        raise IncompatibleDrafterError(
            f"{files.path}: d2t, which holds what to add to a draft id, gives ids from {ids.min()} to {ids.max()} that do not ascend "
            f"within the target's {target.vocab_size}: the head was made for another model, or its table holds ids in place of offsets"
        )
    if "t2d" in files.tensors:
        ids_in_t2d = np.flatnonzero(files.integer_vector("t2d"))
        if len(ids_in_t2d) and not np.array_equal(ids_in_t2d, ids):
            raise CheckpointError(f"{files.path}: d2t and t2d name different target ids; the file is damaged, download it again")
    return None if np.array_equal(ids, np.arange(target.vocab_size)) else ids


def read_token_map(files: HeadFiles, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the target ids of a draft vocabulary in vLLM's format (`token_map`), ascending, and the index of each in `token_map`.

    Raises:
        IncompatibleDrafterError: an id is not in the target's vocabulary, or occurs twice.
    """
    ids = files.integer_vector("token_map")
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(np.unique(ids)) < len(ids):
        span = f"from {ids.min()} to {ids.max()}" if len(ids) else "none"
        raise IncompatibleDrafterError(
            f"{files.path}: token_map has {len(ids)} ids, {span}, of the target's {vocab_size}, each at most once: "
            "the head was made for another model"
        )
    row_order = np.argsort(ids)
    return ids[row_order], row_order


def _tensor_files(directory: Path) -> tuple[Path, ...]:
    """Return the files in a directory that contain the head's tensors; safetensors files are preferred to PyTorch files."""
    for name in MEDUSA_AND_HYDRA_FILE_NAMES:
        if (directory / name).is_file():
            return (directory / name,)
    if (directory / "model.safetensors").is_file() or (directory / "model.safetensors.index.json").is_file():
        return checkpoint_files(directory)
    if (directory / "pytorch_model.bin").is_file():
        return (directory / "pytorch_model.bin",)
    if (directory / "pytorch_model.bin.index.json").is_file():
        return _read_shard_index(directory / "pytorch_model.bin.index.json")
    other_files = sorted(directory.glob("*.safetensors"))
    if len(other_files) == 1:
        return (other_files[0],)
    names = ", ".join((*MEDUSA_AND_HYDRA_FILE_NAMES, "model.safetensors", "pytorch_model.bin"))
    contents = f"{len(other_files)} *.safetensors files" if other_files else "no weights"
    raise CheckpointError(f"{directory} holds {contents}; expected config.json with {names} or one *.safetensors: name a head or a model")


def _read_shard_index(index: Path) -> tuple[Path, ...]:
    """Return the paths of the PyTorch files that an index file lists; they are in the directory of the index."""
    weight_map = (read_json(index, INDEX_BYTES) or {}).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, Mapping) else []
    wrong = [name for name in names if Path(name).name != name or not name.endswith(".bin") or not (index.parent / name).is_file()]
    if wrong or not names:
        raise CheckpointError(
            f"{index} names {name_list(wrong) if wrong else 'no files'}, expected *.bin files next to it; download it again"
        )
    return tuple(index.parent / name for name in names)
