"""Where numbers come from: the machine, the commit, and the files of a model."""

import hashlib
import json
import subprocess
from pathlib import Path

from harness.checkpoints import write_byte_level_tokenizer, write_checkpoint
from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from paceline.benchmarking.benchmark import read_bandwidth
from paceline.benchmarking.provenance import commit, is_grown, load_average, machine_facts, model_facts


def test_provenance_lists_model_files_with_size_and_hash(mini_dir: Path) -> None:
    found = model_facts("mini", mini_dir, "none")
    assert (found.shown, found.precision, found.is_grown) == ("mini", "bf16", False)
    by_name = {file["name"]: file for file in found.files}
    assert set(by_name) == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    weights = mini_dir / "model.safetensors"
    assert by_name["model.safetensors"]["bytes"] == weights.stat().st_size
    with weights.open("rb") as content:
        assert by_name["model.safetensors"]["sha256_of_first_mib"] == hashlib.sha256(content.read(1 << 20)).hexdigest()
    assert model_facts("mini", mini_dir, "int8").precision == "int8"


def test_provenance_marks_a_grown_model(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1) / "config.json"
    assert not is_grown(config.parent)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"paceline_grown": True}))
    assert is_grown(config.parent)
    assert not is_grown(tmp_path)


def test_provenance_lists_gguf_block_types(tmp_path: Path) -> None:
    directory = write_byte_level_tokenizer(write_checkpoint(tmp_path / "model", "llama", vocab_size=263, num_hidden_layers=1))
    for number, grown in enumerate(({}, {"paceline_grown": True})):
        file = tmp_path / f"{number}.gguf"
        write_gguf(directory, file, "Q4_0", metadata={**byte_level_vocabulary(directory), **grown})
        assert is_grown(file) is bool(grown)
        found = model_facts("x", file, "none")
        assert (found.precision, [one["name"] for one in found.files]) == ("q4_0", [file.name])


def test_provenance_describes_the_machine() -> None:
    found = machine_facts()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["versions"]["numpy"]
    load = load_average()
    assert load is None or len(load) == 3


def test_provenance_of_a_checkout_contains_its_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, "-C", str(tmp_path), "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert commit(tmp_path) is None  # another repository


def test_measured_memory_bandwidth_is_plausible() -> None:
    assert 1e8 < read_bandwidth(1) < 1e13
