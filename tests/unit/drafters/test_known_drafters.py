"""The package's drafter of a public model is found by the model's file, and by nothing else."""

import hashlib
import json
from pathlib import Path

import pytest

from paceline.drafters import known_drafters
from paceline.drafters.known_drafters import find_packaged_drafter


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 3 MiB, and a package that has a drafter for it."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3 << 20))
    folder = tmp_path / "package" / "assets" / "drafters" / "model"
    folder.mkdir(parents=True)
    facts = {"bytes": file.stat().st_size, "sha256_of_first_mib": hashlib.sha256(file.read_bytes()[: 1 << 20]).hexdigest()}
    (folder / "target.json").write_text(json.dumps(facts), encoding="utf-8")
    monkeypatch.setattr(known_drafters.resources, "files", lambda _: tmp_path / "package")
    return file


def test_packaged_drafter_is_found_under_any_name_of_the_target(target: Path) -> None:
    found = find_packaged_drafter(target.rename(target.with_name("renamed.gguf")))
    assert found == target.parent / "package" / "assets" / "drafters" / "model" / "drafter.gguf"


@pytest.mark.parametrize("change", ["longer", "other header", "directory"])
def test_packaged_drafter_is_not_used_for_another_target(change: str, target: Path) -> None:
    content = target.read_bytes()
    if change == "longer":
        target.write_bytes(content + b"\0")
    elif change == "other header":
        target.write_bytes(content[:100] + b"x" + content[101:])
    else:
        target = target.parent
    assert find_packaged_drafter(target) is None


def test_packaged_drafters_of_this_installation_are_complete() -> None:
    folders = sorted((Path(known_drafters.__file__).parents[1] / "assets" / "drafters").iterdir())
    assert folders
    for folder in folders:
        facts = json.loads((folder / "target.json").read_text(encoding="utf-8"))
        assert set(facts) == {"name", "bytes", "sha256_of_first_mib"}
        assert (folder / "drafter.gguf").read_bytes()[:4] == b"GGUF"
        assert (folder / "README.md").is_file()
