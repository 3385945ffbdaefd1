"""From what a user types to a directory with a checkpoint in it."""

import re
from importlib import resources
from pathlib import Path

from paceline.errors import CheckpointError

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
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str | Path, *, revision: str | None = None, token: str | None = None, offline: bool = False) -> Path:
    """The directory of a model: a directory's path, the word "mini", or an id on the Hugging Face hub, which is downloaded once.

    Args:
        revision: branch, tag or commit on the hub.
        token: access token for gated or private models; the one stored by `hf auth login` otherwise.
        offline: use what is in the local cache and ask no server.

    Raises:
        CheckpointError: there is no such directory or model, or it is not in the cache and cannot be fetched.
    """
    if not str(model).strip():
        raise CheckpointError(f"the model's name is empty; give a directory, {MINI!r}, or a Hugging Face id such as 'owner/name'")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json, the tokenizer and model.safetensors")
    if model == MINI:
        return _embedded_model()
    name = str(model)
    if isinstance(model, Path) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"the directory {name!r} does not exist; give a directory, {MINI!r}, or a Hugging Face id such as 'owner/name'"
        )
    return _download(name, revision=revision, token=token, offline=offline)


def _embedded_model() -> Path:
    directory = Path(str(resources.files("paceline"))) / "assets" / "mini" / "target"
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"the model {MINI!r} is missing from this installation ({directory}); install paceline again")
    return directory


def _download(name: str, *, revision: str | None, token: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=list(_FILES), local_files_only=offline))
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
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"the model {name!r} cannot be downloaded: {error}; check network and disk, or give a directory") from error
