"""Drafters that are part of the package: found for the model they were made for, and for no other."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness.checkpoints import write_checkpoint
from harness.gguf_checkpoints import write_gguf
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters import open_head_files, prepare_drafters
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.packaged import DRAFTER_FILE, TARGET_FILE, describe_target, find_packaged_drafter, packaged_drafters

MAX_BYTES = 12e6


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    directory.mkdir()
    write_checkpoint(directory, "llama", num_hidden_layers=2)
    return directory


def drafters_for(target: Path, directory: Path) -> Path:
    folder = directory / "one"
    folder.mkdir(parents=True)
    (folder / TARGET_FILE).write_text(json.dumps(describe_target(target)))
    return directory


def test_packaged_drafter_is_found_for_its_target_only(target: Path, tmp_path: Path) -> None:
    drafters = drafters_for(target, tmp_path / "drafters")
    assert find_packaged_drafter(target, drafters) == drafters / "one" / DRAFTER_FILE
    path = target / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * np.float32(1.01)}, path, metadata={"format": "pt"})
    assert find_packaged_drafter(target, drafters) is None
    assert find_packaged_drafter(target) is None


def test_packaged_drafter_is_found_for_a_quantised_target(target: Path, tmp_path: Path) -> None:
    drafters = drafters_for(target, tmp_path / "drafters")
    for block_type in ("F32", "Q8_0"):
        assert find_packaged_drafter(write_gguf(target, tmp_path / f"{block_type}.gguf", block_type), drafters)


def test_packaged_drafter_is_not_used_for_other_sizes(target: Path, tmp_path: Path) -> None:
    drafters = drafters_for(target, tmp_path / "drafters")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert find_packaged_drafter(target, drafters) is None


@pytest.mark.parametrize("content", [None, b"", b"GGUF", "half"])
def test_damaged_packaged_drafter_is_replaced_by_suffix_with_a_notice(
    target: Path, tmp_path: Path, content: bytes | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = (path for path in packaged_drafters().iterdir() if path.is_dir())
    whole = (folder / DRAFTER_FILE).read_bytes()
    drafters = drafters_for(target, tmp_path / "drafters")
    if content is not None:
        (drafters / "one" / DRAFTER_FILE).write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    monkeypatch.setattr("paceline.drafters.packaged.packaged_drafters", lambda: drafters)
    prepared = prepare_drafters(target, EngineConfig(), SpeculationConfig(drafter="auto"))
    assert [drafter.name for drafter in prepared.drafters] == ["suffix"]
    assert prepared.layer_boundaries == ()
    (notice,) = prepared.notices
    assert str(drafters / "one" / DRAFTER_FILE) in notice


def test_search_for_a_packaged_drafter_passes_over_an_unreadable_target(tmp_path: Path) -> None:
    assert find_packaged_drafter(tmp_path / "missing") is None


def test_every_packaged_drafter_is_a_small_head_with_a_card() -> None:
    folders = sorted(path for path in packaged_drafters().iterdir() if path.is_dir())
    assert folders
    for folder in folders:
        head = open_head_files(folder / DRAFTER_FILE)
        assert head is not None
        assert head.kind is HeadKind.EAGLE3
        assert (folder / DRAFTER_FILE).stat().st_size < MAX_BYTES
        assert {"sizes", "final_norm_sha256"} == set(json.loads((folder / TARGET_FILE).read_text()))
        assert "licence" in (folder / "README.md").read_text()
