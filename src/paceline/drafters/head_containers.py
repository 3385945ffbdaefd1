"""The files heads come in: which files of a directory hold the tensors."""

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.models.storage.safetensors_file import checkpoint_files
from paceline.small_files import INDEX_BYTES, read_json

METHOD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Files that hold a head and nothing else."""

_NAMES_IN_AN_ERROR = 20


def files_of(directory: Path) -> tuple[Path, ...]:
    """The files of a directory that hold the head; safetensors before PyTorch's.

    Raises:
        CheckpointError: there are none, or an index names what is not there.
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


def listed(items: list[str]) -> str:
    """The items for an error, only the first ones if there are many."""
    rest = len(items) - _NAMES_IN_AN_ERROR
    count = f"{len(items)} tensor{'s' if len(items) > 1 else ''}"
    return f"{count}: {', '.join(items[:_NAMES_IN_AN_ERROR])}{f' and {rest} more' if rest > 0 else ''}"


def _shards(index: Path) -> tuple[Path, ...]:
    """The files an index of PyTorch shards names, which lie beside it."""
    weight_map = (read_json(index, INDEX_BYTES) or {}).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, Mapping) else []
    wrong = [name for name in names if Path(name).name != name or not name.endswith(".bin") or not (index.parent / name).is_file()]
    if wrong or not names:
        raise CheckpointError(f"{index} names {listed(wrong) if wrong else 'no files'}, expected *.bin files beside it; download it again")
    return tuple(index.parent / name for name in names)
