"""From what a user types to a checkpoint: a directory, or a GGUF file."""

import os
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from paceline.errors import CheckpointError, shortened
from paceline.model_directory import SAFETENSORS, names_in, no_model_among, without_model
from paceline.small_files import is_file

MINI = "mini"
"""The model that comes with the package."""

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.jinja",
)
_HEAD_FILES = ("medusa_lm_head.*", "hydra_lm_head.pt")
_TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_LATER_PART = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_FIRST_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_GGUF = ".gguf"
_NAMES_IN_AN_ERROR = 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BARE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def resolve(
    model: str | Path,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    with_heads: bool = False,
) -> Path:
    """The checkpoint of a model.

    Args:
        model: the path of a directory or of a GGUF file, the word "mini", or an id on the Hugging Face hub, which is downloaded once.
        gguf_file: name of a GGUF file in the directory or in the hub's model.
        revision: branch, tag or commit on the hub.
        token: access token for gated or private models; the one stored by `hf auth login` otherwise.
        offline: use what is in the local cache and ask no server.
        with_heads: fetch the files of drafting heads too, and PyTorch's where there is nothing else.

    Returns:
        the directory; or a GGUF file, where one is named or the directory holds one and no safetensors.

    Raises:
        CheckpointError: there is no such directory, file or model, it is not in the cache and cannot be fetched, the directory holds
            no model, or there are several GGUF files and none is named.
    """
    if not str(model).strip():
        raise CheckpointError(f"the model's name is empty; give a directory, {MINI!r}, or a Hugging Face id such as 'owner/name'")
    path = _expanded(Path(model))
    if os.path.isdir(path):
        return _checkpoint_in(path, gguf_file, with_heads=with_heads)
    if os.path.exists(path):
        return _gguf_path(path, gguf_file)
    if model == MINI:
        return _checkpoint_in(_embedded_model(), gguf_file)
    name = str(model)
    is_local = path.suffix.lower() == _GGUF and os.path.isdir(path.parent)
    if isinstance(model, Path) or is_local or not (_HUB_ID.fullmatch(name) or _BARE_NAME.fullmatch(name)):
        raise CheckpointError(
            f"{shortened(name)} does not exist; give a directory, a GGUF file, {MINI!r}, or a Hugging Face id such as 'owner/name'"
        )
    if "/" not in name:
        raise CheckpointError(
            f"there is no directory {shortened(name)} here, and an id on the Hugging Face hub has an owner: give 'owner/{name[:60]}', "
            f"or the path of a directory or GGUF file, or {MINI!r}"
        )
    return _from_hub(name, gguf_file, revision=revision, token=token, offline=offline, with_heads=with_heads)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # `~nosuchuser`, or `~` without a home directory
        raise CheckpointError(f"{path} names a home directory that is not there ({error}); write the path out") from error


def _gguf_path(path: Path, gguf_file: str | None) -> Path:
    if not is_file(path):
        raise CheckpointError(f"{path} is neither a directory nor a regular file; give a model's directory or a *.gguf file")
    if path.suffix.lower() != _GGUF:
        raise CheckpointError(
            f"{path} is a file; give the directory that holds config.json, the tokenizer and model.safetensors, or a *.gguf file"
        )
    if gguf_file is not None:
        raise CheckpointError(f"the model {path} is a file and the GGUF file {gguf_file!r} is named besides; give one of them")
    return path


def _checkpoint_in(directory: Path, gguf_file: str | None, *, with_heads: bool = False) -> Path:
    """The directory, or the GGUF file in it that is named or the only one."""
    if gguf_file is None and any(is_file(directory / name) for name in SAFETENSORS):
        return directory
    names = _models(names_in(directory))
    if gguf_file is None:
        if names:
            return directory / _only(names, directory)
        if with_heads:
            return directory  # opening the head will tell what is missing
        raise without_model(directory)
    path = directory / gguf_file
    if Path(gguf_file).is_absolute() or ".." in Path(gguf_file).parts or path.suffix.lower() != _GGUF or not is_file(path):
        raise CheckpointError(f"{directory} has no GGUF file {shortened(gguf_file)}; {_choice(names)}")
    return path


def gguf_models(directory: Path) -> list[Path]:
    """The GGUF files of a directory; of a split one only the first part.

    Raises:
        CheckpointError: it cannot be read.
    """
    return [directory / name for name in _models(names_in(directory))]


def _models(names: Iterable[str]) -> list[str]:
    """GGUF files by name, sorted; of a split one only the first part."""
    return sorted(name for name in names if name.lower().endswith(_GGUF) and not _LATER_PART.fullmatch(name))


def _only(names: Sequence[str], place: object) -> str:
    if len(names) > 1:
        raise CheckpointError(f"{place} holds several GGUF files; name one with gguf_file (--gguf-file): {_choice(names)}")
    return names[0]


def _choice(names: Sequence[str]) -> str:
    if not names:
        return "it holds none"
    shown = ", ".join(names[:_NAMES_IN_AN_ERROR])
    return f"it holds {shown}" + (f" and {len(names) - _NAMES_IN_AN_ERROR} more" if len(names) > _NAMES_IN_AN_ERROR else "")


def _from_hub(name: str, gguf_file: str | None, *, revision: str | None, token: str | None, offline: bool, with_heads: bool) -> Path:
    """The safetensors of a model on the hub, or one GGUF file of it: the one named, or the only one where there is nothing else."""
    if gguf_file is None:
        files = (*_FILES, *_HEAD_FILES) if with_heads else _FILES
        directory = _download(name, files, revision=revision, token=token, offline=offline)
        if offline or any(is_file(directory / file) for file in SAFETENSORS) or any(directory.glob(_HEAD_FILES[0])):
            return _checkpoint_in(directory, None, with_heads=with_heads)
        listing = _hub_files(name, revision=revision, token=token)
        names = _models(listing)
        if not names and with_heads:
            return _download(name, (*files, *_TORCH_FILES), revision=revision, token=token, offline=offline)
        if not names:
            raise no_model_among(listing, f"the model {name!r}")
        gguf_file = _only(names, f"the model {name!r}")
    parts = _FIRST_PART.fullmatch(gguf_file)
    pattern = gguf_file if parts is None else f"{parts[1]}-*-of-{parts[2]}{_GGUF}"
    return _checkpoint_in(_download(name, (pattern,), revision=revision, token=token, offline=offline), gguf_file)


def _hub_files(name: str, *, revision: str | None, token: str | None) -> Sequence[str]:
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(name, revision=revision, token=token)
    except Exception as error:  # from the hub client, its HTTP library or the system
        raise CheckpointError(
            f"the files of {name!r} cannot be listed: {error}; check the network, or name the file with gguf_file (--gguf-file)"
        ) from error


def _embedded_model() -> Path:
    directory = Path(str(resources.files("paceline"))) / "assets" / "mini" / "target"
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"the model {MINI!r} is missing from this installation ({directory}); install paceline again")
    return directory


def _download(name: str, files: Sequence[str], *, revision: str | None, token: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=list(files), local_files_only=offline))
    except GatedRepoError as error:
        raise CheckpointError(
            f"the model {name!r} is gated: ask for access at https://huggingface.co/{name}, then pass a token or run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no directory and no model {name!r} on the Hugging Face hub (or it is private: pass a token); check the spelling"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"the model {name!r} has no revision {revision!r}; leave it out to take the newest one") from error
    except LocalEntryNotFoundError as error:
        way_out = "run once without offline" if offline else "check the network, or give a directory"
        raise CheckpointError(f"the model {name!r} is not in the local cache and was not downloaded; {way_out}") from error
    except Exception as error:  # from the hub client, its HTTP library or the system
        raise CheckpointError(f"the model {name!r} cannot be downloaded: {error}; check network and disk, or give a directory") from error
