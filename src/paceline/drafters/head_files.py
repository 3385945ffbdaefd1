"""Files of a draft head: its tensors by plain names, its config, and the method they are for.

A head comes as safetensors or as PyTorch files, with or without a config.json. Training code leaves different prefixes in tensor names.
PyTorch files are read with `weights_only`, so that no code in them runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_kinds import METHOD_FILES, HeadKind, kind_of
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig, WeightType
from paceline.models.storage.safetensors_file import checkpoint_files
from paceline.models.storage.tensor_file import ITEM_TYPES, FileTensor, read_tensors
from paceline.models.weights import Tensor
from paceline.small_files import INDEX_BYTES, is_file, read_json

_PREFIXES = re.compile(r"(?:module\.|model\.|draft_model\.|eagle_module\.|ea_layer\.)*")
_WEIGHT_TYPES = {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}
_NUMBER = "[0-9]{1,6}"  # digits of a layer or head index; real files have fewer
_MAX_LISTED_NAMES = 20


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The tensors and config of a head; a tensor is read when it is opened.

    Attributes:
        path: the directory, or the single file.
        config: config.json; empty if there is none.
        tensors: by name, without prefixes such as `module.`.
        kind: the method they are for.
        files: the files that hold the tensors.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    kind: HeadKind
    files: tuple[Path, ...] = ()

    @classmethod
    def open(cls, path: Path) -> "HeadFiles":
        """Open the head in a directory, or in one file of it.

        Raises:
            CheckpointError: there is none, or a file is damaged.
            IncompatibleDrafterError: its method is unknown.
            BackendUnavailableError: a library to read it is not installed.
        """
        directory = path if path.is_dir() else path.parent
        config = read_json(directory / "config.json") or {}
        files = (path,) if path.is_file() else _tensor_files(directory)
        found: dict[str, FileTensor] = {}
        for file in files:
            found.update(read_tensors(file, "head"))
        tensors: dict[str, FileTensor] = {}
        for name in sorted(found, key=len):  # of two tensors with one plain name, the one without a prefix is used
            tensors.setdefault(plain_name(name), found[name])
        kind = kind_of(path, config, {name: tensor.shape for name, tensor in tensors.items()}, files)
        return cls(path, config, tensors, kind, files)

    @property
    def config_path(self) -> Path:
        """The config.json; of a GGUF file, which has none, the file itself."""
        if self.path.suffix == ".gguf":
            return self.path
        return self.path / "config.json" if self.path.is_dir() else self.path.with_name("config.json")

    @property
    def is_speculators(self) -> bool:
        """Whether the files are in the format of the speculators library."""
        return "speculators_model_type" in self.config

    def shape(self, name: str) -> tuple[int, int] | None:
        """Return rows and columns of a matrix, None if there is none of this name.

        Raises:
            CheckpointError: it is not a matrix.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if len(tensor.shape) != 2:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of shape {list(tensor.shape)}, expected a matrix; is it another head's?"
            )
        return tensor.shape[0], tensor.shape[1]

    def count(self, pattern: str) -> int:
        """Return the number of parts whose names match `pattern`; `{}` is the part's index: 0, 1, … without gaps.

        Raises:
            CheckpointError: an index is missing (found without counting up to the largest).
        """
        regex = re.compile(re.escape(pattern).replace(r"\{\}", f"({_NUMBER})"))
        numbers = {int(match[1]) for name in self.tensors if (match := regex.match(name))}
        if numbers and max(numbers) >= len(numbers):
            missing = next(number for number in range(len(numbers)) if number not in numbers)
            held, absent = pattern.format(max(numbers)), pattern.format(missing)
            raise CheckpointError(f"{self.path} holds {held}* and no {absent}*: the file is damaged, download it again")
        return len(numbers)

    def weight(self, name: str) -> Tensor:
        """Return a floating-point tensor.

        Raises:
            CheckpointError: its stored type is not one of weights.
        """
        tensor = self.tensors[name]
        if tensor.dtype == "F64":
            return Tensor(tensor.open().astype(np.float32), WeightType.F32, tensor.shape)
        if tensor.dtype not in _WEIGHT_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {tensor.dtype}, supported are {', '.join(_WEIGHT_TYPES)}: use an unquantised head"
            )
        return Tensor(tensor.open(), _WEIGHT_TYPES[tensor.dtype], tensor.shape)

    def table(self, name: str) -> NDArray[np.int64]:
        """Return a table of ids, offsets or flags.

        Raises:
            CheckpointError: it is not one-dimensional, or not of integers.
        """
        tensor = self.tensors[name]
        if tensor.dtype in ("F32", "F16", "BF16", "F64") or tensor.dtype not in ITEM_TYPES:
            raise CheckpointError(f"{self.path}: tensor {name!r} is of type {tensor.dtype}, expected whole numbers; is it another head's?")
        if len(tensor.shape) != 1:
            raise CheckpointError(f"{self.path}: tensor {name!r} has shape {list(tensor.shape)}, expected a row; is it another head's?")
        return tensor.open().astype(np.int64)

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Check the tensors against the shapes a network needs.

        Raises:
            CheckpointError: tensors are missing or of another shape; all of them are named.
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
        """Check that every tensor is used or known to take no part in the computation: without it the network would be another one.

        Args:
            ignored: returns whether a tensor takes no part; rotary frequencies never do.

        Raises:
            CheckpointError: tensors are neither used nor ignored; all of them are named.
        """
        known = set(used)
        unknown = [name for name in self.tensors if name not in known and not name.endswith("rotary_emb.inv_freq") and not ignored(name)]
        if unknown:
            raise CheckpointError(
                f"{self.path} holds {name_list(unknown)} that no known {self.kind.value} head has: it may compute something else with them;"
                " use another head, or another drafter"
            )


def is_head_file(name: str) -> bool:
    """Return whether a path is a head's file rather than a directory."""
    path = Path(name)
    return path.suffix in (".pt", ".bin", ".safetensors") and is_file(path)


def plain_name(name: str) -> str:
    """Return a tensor's name without the prefixes that training code leaves."""
    found = _PREFIXES.match(name)
    return name[found.end() :] if found else name


def check_pairing(files: HeadFiles, target: ModelConfig, *, hidden_size: int, vocab_rows: int | None = None) -> None:
    """Check that a head's sizes are those of the target.

    Args:
        hidden_size: width of the target's features that the head takes.
        vocab_rows: rows of its vocabulary matrices, one per target id; None = it has none. Padding may differ.

    Raises:
        IncompatibleDrafterError: a size differs.
    """
    if hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} takes features of {hidden_size} values, the target's have {target.hidden_size}: "
            "it was made for another model"
        )
    if vocab_rows is not None and (vocab_rows == 0 or abs(vocab_rows - target.vocab_size) > max(1024, target.vocab_size // 20)):
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} has {vocab_rows} token ids, the target {target.vocab_size}: "
            "it was made for another base model"
        )


def target_ids_of(files: HeadFiles, size: int, target: ModelConfig) -> NDArray[np.int64] | None:
    """Return the target's id of each of `size` draft ids; None = the same.

    `d2t` holds offsets to add to draft ids. The sums ascend, and `t2d` marks the same ids.

    Raises:
        IncompatibleDrafterError: an id is not the target's.
        CheckpointError: the tables contradict each other.
    """
    if "d2t" not in files.tensors:
        return None
    offsets = files.table("d2t")
    if offsets.shape != (size,):
        raise CheckpointError(f"{files.path}: d2t has {list(offsets.shape)} entries for {size} rows of lm_head.weight; download it again")
    ids = np.arange(size) + offsets
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or np.any(np.diff(ids) <= 0)):
        raise IncompatibleDrafterError(
            f"{files.path}: d2t, which holds what to add to a draft id, gives ids from {ids.min()} to {ids.max()} that do not ascend "
            f"within the target's {target.vocab_size}: the head was made for another model, or its table holds ids in place of offsets"
        )
    if "t2d" in files.tensors:
        marked = np.flatnonzero(files.table("t2d"))
        if len(marked) and not np.array_equal(marked, ids):
            raise CheckpointError(f"{files.path}: d2t and t2d name different target ids; the file is damaged, download it again")
    return None if np.array_equal(ids, np.arange(target.vocab_size)) else ids


def _tensor_files(directory: Path) -> tuple[Path, ...]:
    """Return the files of a directory that hold the head; safetensors before PyTorch's.

    Raises:
        CheckpointError: there are none, or an index names missing files.
    """
    for name in METHOD_FILES:
        if (directory / name).is_file():
            return (directory / name,)
    if (directory / "model.safetensors").is_file() or (directory / "model.safetensors.index.json").is_file():
        return checkpoint_files(directory)
    if (directory / "pytorch_model.bin").is_file():
        return (directory / "pytorch_model.bin",)
    if (directory / "pytorch_model.bin.index.json").is_file():
        return _shards(directory / "pytorch_model.bin.index.json")
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return (others[0],)
    looked_for = ", ".join((*METHOD_FILES, "model.safetensors", "pytorch_model.bin"))
    found = f"{len(others)} *.safetensors files" if others else "no weights"
    raise CheckpointError(f"{directory} holds {found}; expected config.json with {looked_for} or one *.safetensors: name a head or a model")


def name_list(items: list[str]) -> str:
    """Format tensor names for an error: their number, and the first ones if there are many."""
    rest = len(items) - _MAX_LISTED_NAMES
    count = f"{len(items)} tensor{'s' if len(items) > 1 else ''}"
    return f"{count}: {', '.join(items[:_MAX_LISTED_NAMES])}{f' and {rest} more' if rest > 0 else ''}"


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files that an index of PyTorch shards lists, in the same directory."""
    weight_map = (read_json(index, INDEX_BYTES) or {}).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, Mapping) else []
    wrong = [name for name in names if Path(name).name != name or not name.endswith(".bin") or not (index.parent / name).is_file()]
    if wrong or not names:
        raise CheckpointError(
            f"{index} names {name_list(wrong) if wrong else 'no files'}, expected *.bin files next to it; download it again"
        )
    return tuple(index.parent / name for name in names)
