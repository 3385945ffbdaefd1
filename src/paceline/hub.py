"""Finds the checkpoint of a model that a user names, and downloads it from the Hugging Face Hub if necessary."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from paceline.errors import CheckpointError, first_names, shortened
from paceline.model_directory import SAFETENSORS, list_directory, no_model_among_error, no_model_error
from paceline.small_files import is_file, open_regular_file

MINI = "mini"
"""Name of the small model that is part of the package."""

_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*tekken*.json", "tiktoken.model", "*.tiktoken",
    "chat_template*", "*.jinja",
)  # fmt: skip
_HEAD_FILES = ("medusa_lm_head.*", "hydra_lm_head.pt", "warp_model.bin")
_TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_LATER_SHARD = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_FIRST_SHARD = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_GGUF = ".gguf"
_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER_ID = re.compile(  # as llama.cpp, Ollama and browsers write them
    r"(?P<site>(?:https?://)?(?:hf\.co|(?:www\.)?huggingface\.co)/)?(?P<owner>[A-Za-z0-9][\w.-]*/)?(?P<name>[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<tag>[\w.-]+))?/?"
)
_BARE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def resolve_model(
    model: str | Path,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    with_heads: bool = False,
) -> Path:
    """Return the path of a model's checkpoint; download it if it is not in the local cache.

    Args:
        model: path of a directory or of a GGUF file, "mini", or the id of a model on the Hugging Face Hub.
        gguf_file: name of a GGUF file in the directory or in the model on the Hub.
        revision: branch, tag or commit on the Hub.
        token: access token for gated or private models; None = the token stored by `hf auth login`.
        offline: use only the local cache, without a network connection.
        with_heads: also download files of drafting heads, and PyTorch files if there are no safetensors.

    Returns:
        the path of a GGUF file if `gguf_file` is given or the directory has no safetensors; else the path of the directory.

    Raises:
        CheckpointError: the directory, file or model does not exist, the download fails, the directory contains no model, or it contains
            several GGUF files and `gguf_file` is None.
    """
    if not str(model).strip():
        raise CheckpointError(f"the model's name is empty; give a directory, {MINI!r}, or a Hugging Face id such as 'owner/name'")
    if model == MINI:  # also where there is a directory of this name: ./mini
        return _checkpoint_in(_embedded_model(), gguf_file)
    path = _expand_home(Path(model))
    if os.path.isdir(path):
        return _checkpoint_in(path, gguf_file, with_heads=with_heads)
    if os.path.exists(path):
        return _gguf_path(path, gguf_file)
    name = str(model)
    is_local = path.suffix.lower() == _GGUF and os.path.isdir(path.parent)
    if isinstance(model, Path) or is_local or not (_HUB_ID.fullmatch(name) or _BARE_NAME.fullmatch(name)):
        raise CheckpointError(f"{shortened(name)} does not exist; {_name_hint(name)}")
    if "/" not in name:
        raise CheckpointError(
            f"there is no directory {shortened(name)} here, and an id on the Hugging Face hub has an owner: give 'owner/{name[:60]}', "
            f"or the path of a directory or GGUF file, or {MINI!r}"
        )
    return _find_on_hub(name, gguf_file, revision=revision, token=token, offline=offline, with_heads=with_heads)


def _name_hint(name: str) -> str:
    """Return what to give instead of a name that is neither a path nor an id on the Hub."""
    match = _OTHER_ID.fullmatch(name)
    if match is not None and match["owner"] is not None and (match["site"] or match["tag"]):
        file = f", and with --gguf-file the file whose name has {match['tag']!r}" if match["tag"] else ""
        return f"give the id on the Hugging Face Hub, {match['owner'] + match['name']!r}{file}"
    if match is not None and match["tag"] is not None:
        return (
            "names of Ollama's library are not looked up: give a GGUF file, a directory, or an id of the Hugging Face Hub such as "
            "'owner/name' (ollama show --modelfile NAME prints the path of a model that Ollama has)"
        )
    return f"give a directory, a GGUF file, {MINI!r}, or a Hugging Face id such as 'owner/name'"


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # the user is unknown or has no home directory
        raise CheckpointError(f"{path} names a home directory that is not there ({error}); write the path out") from error


def _gguf_path(path: Path, gguf_file: str | None) -> Path:
    if not is_file(path):
        raise CheckpointError(f"{path} is neither a directory nor a regular file; give a model's directory or a *.gguf file")
    if path.suffix.lower() != _GGUF:
        if _begins_as_gguf(path):  # such as Ollama's blobs
            raise CheckpointError(
                f"{path} is a GGUF file whose name does not end in {_GGUF}; make a link and give that: ln -s {path} MODEL{_GGUF}"
            )
        raise CheckpointError(
            f"{path} is a file; give the directory that holds config.json, the tokenizer and model.safetensors, or a *.gguf file"
        )
    if gguf_file is not None:
        raise CheckpointError(f"the model {path} is a file and the GGUF file {gguf_file!r} is named besides; give one of them")
    return path


def _begins_as_gguf(path: Path) -> bool:
    try:
        with open_regular_file(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, CheckpointError):
        return False


def _checkpoint_in(directory: Path, gguf_file: str | None, *, with_heads: bool = False) -> Path:
    """Return the directory if it has safetensors and `gguf_file` is None; else the path of its GGUF file."""
    if gguf_file is None and any(is_file(directory / name) for name in SAFETENSORS):
        return directory
    names = _gguf_names(list_directory(directory))
    if gguf_file is None:
        if names:
            return directory / _only_gguf(names, directory)
        if with_heads:
            return directory  # loading the head raises an error that says what is missing
        raise no_model_error(directory)
    path = directory / gguf_file
    if Path(gguf_file).is_absolute() or ".." in Path(gguf_file).parts or path.suffix.lower() != _GGUF or not is_file(path):
        raise CheckpointError(f"{directory} has no GGUF file {shortened(gguf_file)}; {_describe_choice(names)}")
    return path


def gguf_models(directory: Path) -> list[Path]:
    """Return the paths of the GGUF files in a directory. Of a model that is split into several files, only the first is returned.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    return [directory / name for name in _gguf_names(list_directory(directory))]


def _gguf_names(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files, sorted. Of a model that is split into several files, only the first is returned."""
    return sorted(name for name in names if name.lower().endswith(_GGUF) and not _LATER_SHARD.fullmatch(name))


def _only_gguf(names: Sequence[str], source: object) -> str:
    if len(names) > 1:
        raise CheckpointError(f"{source} holds several GGUF files; name one with gguf_file (--gguf-file): {_describe_choice(names)}")
    return names[0]


def _describe_choice(names: Sequence[str]) -> str:
    return f"it holds {first_names(names) or 'none'}"


def _find_on_hub(name: str, gguf_file: str | None, *, revision: str | None, token: str | None, offline: bool, with_heads: bool) -> Path:
    """Return the path of a model on the Hub, downloaded if necessary: its safetensors, or a GGUF file as for `resolve_model`."""
    if gguf_file is None:
        files = (*_FILES, *_HEAD_FILES) if with_heads else _FILES
        directory = _download(name, files, revision=revision, token=token, offline=offline)
        if offline or any(is_file(directory / file) for file in SAFETENSORS) or any(directory.glob(_HEAD_FILES[0])):
            return _checkpoint_in(directory, None, with_heads=with_heads)
        listing = _list_hub_files(name, revision=revision, token=token)
        names = _gguf_names(listing)
        if not names and with_heads:
            return _download(name, (*files, *_TORCH_FILES), revision=revision, token=token, offline=offline)
        if not names:
            raise no_model_among_error(listing, f"the model {name!r}")
        gguf_file = _only_gguf(names, f"the model {name!r}")
    shard = _FIRST_SHARD.fullmatch(gguf_file)
    pattern = gguf_file if shard is None else f"{shard[1]}-*-of-{shard[2]}{_GGUF}"
    return _checkpoint_in(_download(name, (pattern,), revision=revision, token=token, offline=offline), gguf_file)


def _list_hub_files(name: str, *, revision: str | None, token: str | None) -> Sequence[str]:
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(name, revision=revision, token=token)
    except Exception as error:  # the Hub's client and its HTTP library raise exceptions of many types
        raise CheckpointError(
            f"the files of {name!r} cannot be listed: {error}; check the network, or name the file with gguf_file (--gguf-file)"
        ) from error


def _embedded_model() -> Path:
    directory = Path(str(resources.files("paceline"))) / "assets" / "mini" / "target"
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"the model {MINI!r} is missing from this installation ({directory}); install paceline again")
    return directory


@dataclass(frozen=True, slots=True)
class PlannedDownload:
    """What `resolve_model(name, with_heads=True)` would download.

    Attributes:
        num_bytes: size of all files.
        missing_bytes: size of the files that are not in the local cache yet.
        directory: the local cache.
        free_bytes: free space there.
    """

    num_bytes: int
    missing_bytes: int
    directory: Path
    free_bytes: int


def plan_download(name: str) -> PlannedDownload:
    """Return the size of a drafter on the Hugging Face Hub, and where its files would be stored. Nothing is downloaded.

    Raises:
        CheckpointError: the Hub cannot be reached, has no such model or does not give access to it.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [*_FILES, *_HEAD_FILES]
    with _hub_errors(name, revision=None, offline=False):
        files = snapshot_download(name, allow_patterns=patterns, dry_run=True)
        if not any(file.filename in SAFETENSORS or file.filename.startswith(_HEAD_FILES[0][:-1]) for file in files):
            files = snapshot_download(name, allow_patterns=[*patterns, *_TORCH_FILES, f"*{_GGUF}"], dry_run=True)
    directory = Path(constants.HF_HUB_CACHE)
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    missing_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    return PlannedDownload(sum(file.file_size or 0 for file in files), missing_bytes, directory, shutil.disk_usage(existing).free)


def _download(name: str, files: Sequence[str], *, revision: str | None, token: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(name, revision=revision, offline=offline):
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=list(files), local_files_only=offline))


@contextmanager
def _hub_errors(name: str, *, revision: str | None, offline: bool) -> Iterator[None]:
    """Turn errors of the Hub's client into a CheckpointError that says what to do."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
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
        advice = f"hf download {name} gets it, and so does a run without --offline" if offline else "check the network, or give a directory"
        raise CheckpointError(f"the model {name!r} is not in the local cache and was not downloaded; {advice}") from error
    except Exception as error:  # the Hub's client and its HTTP library raise exceptions of many types
        raise CheckpointError(f"the model {name!r} cannot be downloaded: {error}; check network and disk, or give a directory") from error
