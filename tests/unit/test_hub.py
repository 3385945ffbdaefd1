"""What a user types becomes a directory, or one clear error."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from paceline import hub
from paceline.errors import CheckpointError
from paceline.hub import resolve


class Download:
    """Stands for `snapshot_download`: remembers its arguments and returns a directory or raises."""

    def __init__(self, result: Path | Exception) -> None:
        self.result = result
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **arguments: Any) -> str:
        self.calls.append((name, arguments))
        if isinstance(self.result, Exception):
            raise self.result
        return str(self.result)


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> Download:
    download = Download(AssertionError("nothing may be downloaded"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


def test_a_directory_is_itself(tmp_path: Path, no_download: Download) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    assert no_download.calls == []


def test_mini_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_download: Download) -> None:
    target = tmp_path / "assets" / "mini" / "target"
    target.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub.resources, "files", lambda _package: tmp_path)
    with pytest.raises(CheckpointError, match="missing from this installation"):
        resolve("mini")
    (target / "config.json").write_text("{}")
    assert resolve("mini") == target


def test_an_id_is_downloaded_with_the_files_we_read_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Download(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/some-model_1.5", revision="main", token="secret", offline=True) == tmp_path
    [(name, arguments)] = download.calls
    assert name == "owner/some-model_1.5"
    assert (arguments["revision"], arguments["token"], arguments["local_files_only"]) == ("main", "secret", True)
    patterns = set(arguments["allow_patterns"])
    assert {"config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "tokenizer*"} <= patterns
    assert not any("bin" in pattern or pattern == "*" or pattern.endswith(".py") for pattern in patterns)


@pytest.mark.parametrize("name", ["./model", "/no/such/model", "a/b/c", "../model", "~/no-such-model", "models\\one", "a b"])
def test_what_looks_like_a_path_is_never_asked_for_on_the_hub(name: str, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(name)
    assert no_download.calls == []


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_directory(name: str, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve(name)


def test_a_missing_path_object_is_an_error(tmp_path: Path, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(tmp_path / "model")
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(Path("owner/model"))
    assert no_download.calls == []


def test_a_file_is_not_a_model(tmp_path: Path, no_download: Download) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        resolve(file)
    assert no_download.calls == []


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "offline", "text"),
    [
        (LocalEntryNotFoundError("no"), True, "not in the local cache.*run once without offline"),
        (LocalEntryNotFoundError("no"), False, "not in the local cache.*check the network"),
        (RepositoryNotFoundError("no", response=RESPONSE), False, "no directory and no model 'owner/model'"),
        (GatedRepoError("no", response=RESPONSE), False, "is gated"),
        (RevisionNotFoundError("no", response=RESPONSE), False, "no revision 'v2'"),
        (HfHubHTTPError("server error", response=RESPONSE), False, "cannot be downloaded: server error"),
        (OSError("disk full"), False, "cannot be downloaded: disk full"),
    ],
)
def test_every_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, offline: bool, text: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Download(error))
    with pytest.raises(CheckpointError, match=text):
        resolve("owner/model", revision="v2", offline=offline)
