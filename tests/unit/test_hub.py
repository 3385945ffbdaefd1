"""What a user types becomes a directory, or one clear error."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from paceline import hub
from paceline.errors import CheckpointError
from paceline.hub import resolve_model


class Download:
    """Replaces `snapshot_download`: records its arguments and returns a directory or raises."""

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


def test_model_directory_resolves_to_itself(tmp_path: Path, no_download: Download) -> None:
    touch(tmp_path, "model.safetensors")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    assert no_download.calls == []


def test_model_name_mini_resolves_to_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_download: Download) -> None:
    target = tmp_path / "assets" / "mini" / "target"
    target.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub.resources, "files", lambda _package: tmp_path)
    with pytest.raises(CheckpointError, match="missing from this installation"):
        resolve_model("mini")
    touch(target, "config.json", "model.safetensors")
    assert resolve_model("mini") == target
    (tmp_path / "mini").mkdir()
    assert resolve_model("mini") == target
    with pytest.raises(CheckpointError, match="holds no files"):
        resolve_model("./mini")


def test_hub_model_is_downloaded_with_the_needed_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Download(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    touch(tmp_path, "model.safetensors")
    assert resolve_model("owner/some-model_1.5", revision="main", token="secret", offline=True) == tmp_path
    [(name, arguments)] = download.calls
    assert name == "owner/some-model_1.5"
    assert (arguments["revision"], arguments["token"], arguments["local_files_only"]) == ("main", "secret", True)
    patterns = set(arguments["allow_patterns"])
    assert {"config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", "tokenizer*"} <= patterns
    assert not any("bin" in pattern or pattern == "*" or pattern.endswith(".py") for pattern in patterns)


@pytest.mark.parametrize("name", ["./model", "/no/such/model", "a/b/c", "../model", "~/no-such-model", "models\\one", "a b", "model.gguf"])
def test_model_name_that_looks_like_a_path_is_not_requested_from_the_hub(name: str, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(name)
    assert no_download.calls == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("owner/model:Q4_K_M", "give the id on the Hugging Face Hub, 'owner/model', and with --gguf-file the file whose name has 'Q4_K_M'"),
        ("hf.co/owner/model", "give the id on the Hugging Face Hub, 'owner/model'$"),
        ("https://huggingface.co/owner/model/", "give the id on the Hugging Face Hub, 'owner/model'$"),
        ("llama3.2:1b", "names of Ollama's library are not looked up"),
        ("a/b/c", "give a directory, a GGUF file"),
    ],
)
def test_model_name_as_other_programs_write_it_gets_a_hint(name: str, says: str, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match=says):
        resolve_model(name)
    assert no_download.calls == []


def test_gguf_file_without_its_ending_gets_a_hint(tmp_path: Path, no_download: Download) -> None:
    (tmp_path / "sha256-1").write_bytes(b"GGUF\x03")
    with pytest.raises(CheckpointError, match=r"does not end in \.gguf; make a link and give that: ln -s .*sha256-1 MODEL\.gguf"):
        resolve_model(tmp_path / "sha256-1")


@pytest.mark.parametrize("name", ["", " "])
def test_empty_model_name_is_refused(name: str, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve_model(name)


def test_path_of_a_missing_model_is_refused(tmp_path: Path, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(Path("owner/model"))
    assert no_download.calls == []


def test_safetensors_file_as_model_is_refused(tmp_path: Path, no_download: Download) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        resolve_model(file)
    assert no_download.calls == []


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "offline", "text"),
    [
        (LocalEntryNotFoundError("no"), True, "not in the local cache.*hf download owner/model gets it"),
        (LocalEntryNotFoundError("no"), False, "not in the local cache.*check the network"),
        (RepositoryNotFoundError("no", response=RESPONSE), False, "no directory and no model 'owner/model'"),
        (GatedRepoError("no", response=RESPONSE), False, "is gated"),
        (RevisionNotFoundError("no", response=RESPONSE), False, "no revision 'v2'"),
        (HfHubHTTPError("server error", response=RESPONSE), False, "cannot be downloaded: server error"),
        (OSError("disk full"), False, "cannot be downloaded: disk full"),
    ],
)
def test_failed_download_names_a_way_out(monkeypatch: pytest.MonkeyPatch, error: Exception, offline: bool, text: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Download(error))
    with pytest.raises(CheckpointError, match=text):
        resolve_model("owner/model", revision="v2", offline=offline)


def touch(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()


def test_gguf_file_resolves_to_itself(tmp_path: Path, no_download: Download) -> None:
    touch(tmp_path, "model.gguf")
    assert resolve_model(tmp_path / "model.gguf") == tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=r"is a file and the GGUF file 'other\.gguf' is named besides"):
        resolve_model(tmp_path / "model.gguf", gguf_file="other.gguf")


def test_only_gguf_file_of_a_directory_is_the_model(tmp_path: Path, no_download: Download) -> None:
    touch(tmp_path, "one.gguf", "config.json")
    assert resolve_model(tmp_path) == tmp_path / "one.gguf"
    touch(tmp_path, "model.safetensors")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(tmp_path, gguf_file="one.gguf") == tmp_path / "one.gguf"


def test_split_gguf_in_a_directory_resolves_to_its_first_part(tmp_path: Path, no_download: Download) -> None:
    touch(tmp_path, *(f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)))
    assert resolve_model(tmp_path) == tmp_path / "m-00001-of-00003.gguf"


def test_several_gguf_files_in_a_directory_are_listed_in_the_error(tmp_path: Path, no_download: Download) -> None:
    touch(tmp_path, "q4.gguf", "q8.gguf", "sub/q2.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files; name one with gguf_file \(--gguf-file\): it holds q4\.gguf, q8\.gguf"):
        resolve_model(tmp_path)
    assert resolve_model(tmp_path, gguf_file="q8.gguf") == tmp_path / "q8.gguf"
    assert resolve_model(tmp_path, gguf_file="sub/q2.gguf") == tmp_path / "sub" / "q2.gguf"
    for name in ("q5.gguf", "../x.gguf", str(tmp_path / "q4.gguf"), "config.json"):
        with pytest.raises(CheckpointError, match=r"has no GGUF file .*; it holds q4\.gguf, q8\.gguf"):
            resolve_model(tmp_path, gguf_file=name)


def test_named_gguf_file_is_the_only_file_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Download(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    touch(tmp_path, "q4.gguf", "big-00001-of-00002.gguf")
    assert resolve_model("owner/model", gguf_file="q4.gguf") == tmp_path / "q4.gguf"
    assert resolve_model("owner/model", gguf_file="big-00001-of-00002.gguf") == tmp_path / "big-00001-of-00002.gguf"
    assert [arguments["allow_patterns"] for _, arguments in download.calls] == [["q4.gguf"], ["big-*-of-00002.gguf"]]


def test_hub_model_with_one_gguf_file_is_downloaded_and_several_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Download(tmp_path)
    files = ["README.md", "q4.gguf"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, **arguments: files)
    touch(tmp_path, "q4.gguf")
    assert resolve_model("owner/model") == tmp_path / "q4.gguf"
    assert download.calls[-1][1]["allow_patterns"] == ["q4.gguf"]
    files.append("q8.gguf")
    with pytest.raises(CheckpointError, match=r"the model 'owner/model' holds several GGUF files; .*q4\.gguf, q8\.gguf"):
        resolve_model("owner/model")


def test_head_download_prefers_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Download(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, **arguments: ["pytorch_model.bin"])
    assert resolve_model("owner/head", with_heads=True) == tmp_path
    first, second = (arguments["allow_patterns"] for _, arguments in download.calls)
    assert "medusa_lm_head.*" in first
    assert "warp_model.bin" in first
    assert "pytorch_model.bin" not in first
    assert "pytorch_model.bin" in second
    with pytest.raises(CheckpointError, match=r"the model 'owner/model' holds PyTorch \*\.bin weights only"):
        resolve_model("owner/model")
    assert all("medusa_lm_head.*" not in arguments["allow_patterns"] for _, arguments in download.calls[2:])
    touch(tmp_path, "medusa_lm_head.pt")
    assert resolve_model("owner/head", with_heads=True) == tmp_path
    assert "pytorch_model.bin" not in download.calls[-1][1]["allow_patterns"]


def test_offline_resolve_uses_the_only_cached_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Download(tmp_path))
    touch(tmp_path, "q4.gguf")
    assert resolve_model("owner/model", offline=True) == tmp_path / "q4.gguf"


@pytest.mark.parametrize("name", ["llama3", "qwen2.5-0.5b", "no_such_model"])
def test_model_id_without_owner_is_refused_offline(name: str, no_download: Download) -> None:
    with pytest.raises(CheckpointError, match=f"an id on the Hugging Face hub has an owner: give 'owner/{name}'"):
        resolve_model(name)
    assert no_download.calls == []


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "holds no files; give a directory"),
        ([".gitattributes"], "holds no files; give a directory"),
        (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], "holds a LoRA adapter for another model"),
        (["config.json", "weights.npz", "tokenizer.json"], r"holds an MLX model \(\*\.npz\)"),
        (["config.json", "pytorch_model.bin"], r"holds PyTorch \*\.bin weights only"),
        (["README.md", "config.json"], r"holds neither model\.safetensors nor .*, only README\.md, config\.json; download"),
    ],
    ids=["nothing", "hidden files", "an adapter", "MLX", "pickles", "no weights"],
)
def test_directory_without_a_model_is_refused_with_its_content(names: list[str], text: str, tmp_path: Path, no_download: Download) -> None:
    touch(tmp_path, *names)
    if "adapter_config.json" in names:
        (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=text):
        resolve_model(tmp_path)
    if names != ["config.json", "pytorch_model.bin"]:
        assert resolve_model(tmp_path, with_heads=True) == tmp_path


def test_adapter_given_as_model_names_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')
    with pytest.raises(CheckpointError, match="holds a LoRA adapter for 'owner/base', not a model: give that as the model"):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["~no-such-user-here/model", "model\0.gguf", "x" * 5000, "a/" * 3000, "owner/" + "x" * 5000, "/dev/null", "/dev/zero.gguf", "\udcff"],
    ids=["unknown user", "zero byte", "long", "deep", "long id", "device", "no device", "not UTF-8"],
)
def test_impossible_path_as_model_is_a_checkpoint_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Download(ValueError("no such repository id")))
    for model in (name, Path(name)):
        with pytest.raises(CheckpointError) as caught:
            resolve_model(model)
        assert len(str(caught.value)) < 4100
        assert str(caught.value).isprintable()


def test_model_path_with_an_unknown_home_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(CheckpointError, match="names a home directory that is not there"):
        resolve_model("~/model")


def test_pipe_as_model_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is neither a directory nor a regular file"):
        resolve_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("error", [ValueError("not a repository id"), RuntimeError("no connection"), TypeError("what?")])
def test_any_exception_of_the_hub_client_is_a_checkpoint_error(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Download(error))
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        resolve_model("owner/model")

    def cannot_list(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", Download(tmp_path))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", cannot_list)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        resolve_model("owner/model")
