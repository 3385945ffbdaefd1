"""The files of a drafting head, whatever they are called: its tensors by their plain names, its config, and which method it is for.

Heads come as safetensors or as PyTorch's own files, with or without a config.json, and their names with whatever prefix the training
code left on them. PyTorch files are read with `weights_only`, so that nothing in them runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_containers import files_of, listed
from paceline.drafters.head_kinds import HeadKind, kind_of
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig, WeightType
from paceline.models.storage.tensor_file import ITEM_TYPES, FileTensor, read_tensors
from paceline.models.weights import Tensor
from paceline.small_files import is_file, read_json

_PREFIXES = re.compile(r"(?:module\.|model\.|draft_model\.|eagle_module\.|ea_layer\.)*")
_WEIGHT_TYPES = {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}
_NUMBER = "[0-9]{1,6}"  # of a layer or a head: no file has more


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """What the files of a head hold; nothing is read until it is asked for.

    Attributes:
        path: the directory, or the file where one was given.
        config: config.json; empty where there is none.
        tensors: by name, without prefixes such as `module.`.
        kind: the method they are for.
        files: those the tensors are in.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    kind: HeadKind
    files: tuple[Path, ...] = ()

    @classmethod
    def open(cls, path: Path) -> "HeadFiles":
        """The head in a directory, or in one file of it.

        Raises:
            CheckpointError: there is none, or a file is damaged.
            IncompatibleDrafterError: it is of a method that is not known.
            BackendUnavailableError: it takes a library that is not installed.
        """
        directory = path if path.is_dir() else path.parent
        config = read_json(directory / "config.json") or {}
        files = (path,) if path.is_file() else files_of(directory)
        found: dict[str, FileTensor] = {}
        for file in files:
            found.update(read_tensors(file, "head"))
        tensors: dict[str, FileTensor] = {}
        for name in sorted(found, key=len):  # a name that needs no stripping wins
            tensors.setdefault(plain_name(name), found[name])
        kind = kind_of(path, config, {name: tensor.shape for name, tensor in tensors.items()}, files)
        return cls(path, config, tensors, kind, files)

    @property
    def is_speculators(self) -> bool:
        """Whether it is in the container of the speculators library."""
        return "speculators_model_type" in self.config

    def shape(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of a matrix, None where there is none of this name.

        Raises:
            CheckpointError: it is no matrix.
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
        """Number of parts whose names match `pattern`, where `{}` is the part's index: 0, 1, … without gaps.

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
        """A floating-point tensor.

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
        """A table of ids, offsets or flags.

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
            CheckpointError: names all tensors that are missing or of another shape.
        """
        expected = {**required, **(optional or {})}
        missing = [f"{name} {list(shape)}" for name, shape in required.items() if name not in self.tensors]
        wrong = [
            f"{name} {list(self.tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        if missing or wrong:
            problems = [f"it lacks {listed(missing)}"] * bool(missing) + [f"it holds {listed(wrong)}"] * bool(wrong)
            raise CheckpointError(f"{self.path} is no complete {self.kind.value} head for this target: {'; '.join(problems)}")

    def check_all_used(self, used: Iterable[str], *, ignored: Callable[[str], bool] = lambda _: False) -> None:
        """Refuse a head with tensors that we do not use: without them it would be another network.

        Args:
            ignored: names that are known to be no part of the computation; rotary frequencies are.

        Raises:
            CheckpointError: names all tensors that are neither used nor ignored.
        """
        known = set(used)
        unknown = [name for name in self.tensors if name not in known and not name.endswith("rotary_emb.inv_freq") and not ignored(name)]
        if unknown:
            raise CheckpointError(
                f"{self.path} holds {listed(unknown)} that no known {self.kind.value} head has: it may compute something else with them; "
                "use another head, or another drafter"
            )


def is_head_file(name: str) -> bool:
    """Whether a path is that of a head's file rather than of a directory."""
    path = Path(name)
    return path.suffix in (".pt", ".bin", ".safetensors") and is_file(path)


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes that training code leaves."""
    found = _PREFIXES.match(name)
    return name[found.end() :] if found else name


def check_pairing(files: HeadFiles, target: ModelConfig, *, hidden_size: int, vocab_rows: int | None = None) -> None:
    """Refuse a head that was made for another target.

    Args:
        hidden_size: width of the target's features the head takes.
        vocab_rows: rows of its vocabulary matrices, of the target's ids; None = it has none. Padding may differ.

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
            f"the {files.kind.value} head {files.path} knows {vocab_rows} token ids, the target {target.vocab_size}: "
            "it was made for another base model"
        )
