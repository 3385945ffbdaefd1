"""The files of a drafting head, whatever they are called: its tensors by their plain names, its config, and which method it is for.

Heads come as safetensors or as PyTorch's own files, with or without a config.json, and their names with whatever prefix the training
code left on them. PyTorch files are read with `weights_only`, so that nothing in them runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, IncompatibleDrafterError, described
from paceline.models.config import ModelConfig, WeightType
from paceline.models.safetensors_file import StoredTensor, checkpoint_files, map_file, read_header, view_tensor
from paceline.models.weights import Tensor
from paceline.small_files import INDEX_BYTES, is_file, read_json

if TYPE_CHECKING:
    import torch

METHOD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Files that hold a head and nothing else."""

_PREFIXES = ("module.", "model.", "draft_model.", "eagle_module.", "ea_layer.")
_NAMES_IN_AN_ERROR = 20
_ITEM_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "BOOL": "|b1", "U8": "|u1", "I8": "|i1",
    "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
_WEIGHT_TYPES = {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}
_TORCH_TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
_SPECULATORS = {"eagle3": "eagle3", "eagle": "eagle", "peagle": "peagle", "dflash": "dflash", "dspark": "dflash", "mtp": "mtp"}
_MEDUSA_NAMES = re.compile(r"\d+\.\d+\.linear\.|medusa_heads?\.|blocks\.\d+\.layers\.\d+\.|lm_heads\.\d+\.")


class HeadKind(Enum):
    """The method that files are for."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MTP = "mtp"
    HYDRA = "hydra"
    PEAGLE = "peagle"
    DFLASH = "dflash"
    LANGUAGE_MODEL = "draft_model"


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of a head: its shape, its type as safetensors calls it, and how to open it (bf16 as the uint16 of its bits)."""

    shape: tuple[int, ...]
    dtype: str
    open: Callable[[], NDArray[Any]]


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
    tensors: Mapping[str, HeadTensor]
    kind: HeadKind
    files: tuple[Path, ...] = ()

    @classmethod
    def open(cls, path: Path) -> "HeadFiles":
        """The head in a directory, or in one file of it.

        Raises:
            CheckpointError: there is none, or a file is damaged.
        """
        directory = path if path.is_dir() else path.parent
        config = read_json(directory / "config.json") or {}
        files = (path,) if path.is_file() else _files_of(directory)
        found: dict[str, HeadTensor] = {}
        for file in files:
            found.update(_safetensors(file) if file.suffix == ".safetensors" else _torch_file(file))
        tensors: dict[str, HeadTensor] = {}
        for name in sorted(found, key=len):  # a name that needs no stripping wins
            tensors.setdefault(plain_name(name), found[name])
        return cls(path, config, tensors, _kind(config, tensors, files), files)

    def weight(self, name: str) -> Tensor:
        """A floating-point tensor.

        Raises:
            CheckpointError: it is stored in a type that is no weight's.
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
            CheckpointError: it holds no whole numbers.
        """
        tensor = self.tensors[name]
        if tensor.dtype in ("F32", "F16", "BF16", "F64") or tensor.dtype not in _ITEM_TYPES:
            raise CheckpointError(f"{self.path}: tensor {name!r} is of type {tensor.dtype}, expected whole numbers; is it another head's?")
        return tensor.open().astype(np.int64)

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Hold the tensors to the shapes a network calls for.

        Raises:
            CheckpointError: with all that are missing and all of another shape.
        """
        expected = {**required, **(optional or {})}
        missing = [f"{name} {list(shape)}" for name, shape in required.items() if name not in self.tensors]
        wrong = [
            f"{name} {list(self.tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        if missing or wrong:
            problems = [f"it lacks {_listed(missing)}"] * bool(missing) + [f"it holds {_listed(wrong)}"] * bool(wrong)
            raise CheckpointError(f"{self.path} is no complete {self.kind.value} head for this target: {'; '.join(problems)}")

    def unused(self, used: Iterable[str], *, ignored: Callable[[str], bool] = lambda _: False) -> tuple[str, ...]:
        """One line about tensors that nothing knows, or none.

        Args:
            ignored: names that are known to be of no use.
        """
        known = set(used)
        unknown = [name for name in self.tensors if name not in known and not name.endswith("rotary_emb.inv_freq") and not ignored(name)]
        return (f"{self.path} holds {_listed(unknown)} that the {self.kind.value} drafter does not know and leaves out",) if unknown else ()


def is_head_file(name: str) -> bool:
    """Whether this is the path of one file that heads come in, and not of a directory."""
    path = Path(name)
    return path.suffix in (".pt", ".bin", ".safetensors") and is_file(path)


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes that training code leaves."""
    while (prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)) is not None:
        name = name.removeprefix(prefix)
    return name


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
    if vocab_rows is not None and abs(vocab_rows - target.vocab_size) > max(1024, target.vocab_size // 20):
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} knows {vocab_rows} token ids, the target {target.vocab_size}: "
            "it was made for another base model"
        )


def _kind(config: Mapping[str, Any], tensors: Mapping[str, HeadTensor], files: Iterable[Path]) -> HeadKind:
    """The first method whose evidence there is."""
    if "speculators_model_type" in config:
        named = str(config["speculators_model_type"])
        return HeadKind(_SPECULATORS[named]) if named in _SPECULATORS else HeadKind.LANGUAGE_MODEL
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    fc = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    is_dflash = "DFlash" in architecture or "dflash_config" in config or "DSpark" in architecture
    if "Eagle3" in architecture or "d2t" in tensors or any(name.startswith("midlayer.") for name in tensors):
        return HeadKind.EAGLE3
    if len(fc) == 2 and fc[1] >= 3 * fc[0] and not is_dflash:
        return HeadKind.EAGLE3
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    if len(fc) == 2 and fc[1] == 2 * fc[0] and query is not None and query.shape[-1:] == fc[:1] and "lm_head.weight" not in tensors:
        return HeadKind.EAGLE
    names = {file.name for file in files}
    if names & set(METHOD_FILES[:2]) or any(_MEDUSA_NAMES.match(name) for name in tensors):
        return HeadKind.MEDUSA
    if METHOD_FILES[2] in names or any(name.startswith("hydra_mlp.") for name in tensors):
        return HeadKind.HYDRA
    if is_dflash:
        return HeadKind.DFLASH
    num_layers = config.get("num_hidden_layers")
    if f"layers.{num_layers}.eh_proj.weight" in tensors or any(name.startswith("mtp.") for name in tensors):
        return HeadKind.MTP
    return HeadKind.LANGUAGE_MODEL


def _files_of(directory: Path) -> tuple[Path, ...]:
    """The files that hold the head; safetensors before PyTorch's."""
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


def _shards(index: Path) -> tuple[Path, ...]:
    """The files an index of PyTorch shards names, which lie beside it."""
    weight_map = (read_json(index, INDEX_BYTES) or {}).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    wrong = [name for name in names if Path(name).name != name or not name.endswith(".bin") or not (index.parent / name).is_file()]
    if wrong or not names:
        raise CheckpointError(f"{index} names {_listed(wrong) if wrong else 'no files'}, expected *.bin files beside it; download it again")
    return tuple(index.parent / name for name in names)


def _safetensors(path: Path) -> dict[str, HeadTensor]:
    stored, file_bytes = read_header(path), map_file(path)
    return {name: HeadTensor(tensor.shape, tensor.dtype, partial(_view, tensor, file_bytes)) for name, tensor in stored.items()}


def _view(stored: StoredTensor, file_bytes: NDArray[np.uint8]) -> NDArray[Any]:
    return view_tensor(stored, file_bytes, np.dtype(_ITEM_TYPES[stored.dtype]))


def _torch_file(path: Path) -> dict[str, HeadTensor]:
    """The tensors of a PyTorch file: a dictionary of them and nothing else.

    Raises:
        CheckpointError: it is damaged, or holds anything but tensors.
    """
    import torch

    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before PyTorch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a stranger's bytes may fail in any way
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors: {described(error)}; use safetensors, or download it again"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds more than tensors by name: it is no head's file, or a training checkpoint; export its weights")
    return {str(name): HeadTensor(tuple(tensor.shape), _torch_type(tensor), partial(_array, tensor)) for name, tensor in content.items()}


def _torch_type(tensor: "torch.Tensor") -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _TORCH_TYPES.get(name, name)


def _array(tensor: "torch.Tensor") -> NDArray[Any]:
    import torch

    dense = tensor.detach().contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()


def _listed(items: list[str]) -> str:
    rest = len(items) - _NAMES_IN_AN_ERROR
    count = f"{len(items)} tensor{'s' if len(items) > 1 else ''}"
    return f"{count}: {', '.join(items[:_NAMES_IN_AN_ERROR])}{f' and {rest} more' if rest > 0 else ''}"
