"""`paceline doctor`: its reports on good and bad pairs and files, its run time, and the libraries it imports."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from harness.adapter_files import low_rank, write_adapter
from harness.checkpoints import VOCAB_SIZE, write_byte_level_tokenizer, write_checkpoint, write_tokenizer
from harness.doctor_options import doctor_options
from harness.eagle_checkpoints import (
    EAGLE1,
    EAGLE3,
    HIDDEN,
    eagle1_tensors,
    eagle3_tensors,
    write_head,
    write_legible_target,
    write_reading_eagle1,
    write_reading_eagle3,
    write_recalling_peagle,
)
from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from harness.medusa_checkpoints import perfect_heads, random_heads, write_heads, write_successor_target
from harness.mtp_checkpoints import add_module, perfect_module, write_speculators
from harness.vocabulary_pairs import reorder_vocabulary
from harness.xlora_files import write_xlora
from paceline.cli import app
from paceline.config import QuantOptions
from paceline.installation import install_command
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.weights import Weights
from paceline.proof.doctor import diagnose
from paceline.proof.probe import best_draft_length, expected_speedup, probe
from paceline.runtimes import load as load_module
from paceline.runtimes.load import RuntimeOptions, load_network

HEAVY = {"torch", "transformers", "scipy"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("doctor") / "target", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("doctor") / "draft", "llama", num_hidden_layers=1)


def ask(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    return done.exit_code, json.loads(done.stdout)


def text(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["doctor", *map(str, arguments)])
    return done.exit_code, " ".join(done.stdout.split())


def pair_of(facts: dict[str, Any]) -> dict[str, Any]:
    pair: dict[str, Any] = facts["drafters"][0]["pair"]
    return pair


# Pairs


def test_doctor_reports_a_draft_model_with_the_same_vocabulary(target: Path, draft: Path) -> None:
    code, facts = ask("--model", target, "--drafter", draft)
    assert (code, facts["works"], facts["problems"]) == (0, True, [])
    assert (pair_of(facts)["match"], pair_of(facts)["same_ids"], pair_of(facts)["notes"]) == ("same", 1.0, [])
    assert facts["numerics"] in ("exact", "fast")
    code, said = text("--model", target, "--drafter", draft)
    assert code == 0
    assert said.endswith("works")
    assert "pair same vocabularies: 100.0% of the target's ids mean the same to the drafter; ids are used unchanged" in said


def test_doctor_reports_a_draft_model_with_a_padded_vocabulary(target: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "padded", "llama", num_hidden_layers=1, vocab_size=128)
    code, facts = ask("--model", target, "--drafter", other)
    assert (code, pair_of(facts)["match"], facts["drafters"][0]["model"]["vocabulary_rows"]) == (0, "padded", 128)
    write_tokenizer(other, VOCAB_SIZE)  # rows alone are no difference
    assert pair_of(ask("--model", target, "--drafter", other)[1])["match"] == "same"


def test_doctor_reports_a_draft_model_with_an_overlapping_vocabulary(target: Path, draft: Path, tmp_path: Path) -> None:
    other = reorder_vocabulary(draft, tmp_path / "other", list(range(VOCAB_SIZE))[::-1])
    code, facts = ask("--model", target, "--drafter", other)
    assert (code, pair_of(facts)["match"], pair_of(facts)["shared_pieces"]) == (0, "overlapping", 1.0)
    assert "ids are mapped by the pieces that both have (100.0% of the target's pieces)" in text("--model", target, "--drafter", other)[1]


def test_doctor_reports_a_draft_model_with_a_disjoint_vocabulary(mini_dir: Path, tmp_path: Path) -> None:
    other = reorder_vocabulary(mini_dir / "draft", tmp_path / "other", list(range(700)))
    code, facts = ask("--drafter", other)
    assert (code, pair_of(facts)["match"], pair_of(facts)["spellable"]) == (0, "disjoint", 1.0)
    assert "drafts are decoded and encoded again" in pair_of(facts)["summary"]


def test_doctor_reports_an_incompatible_draft_model(mini_dir: Path, draft: Path) -> None:
    code, facts = ask("--drafter", draft)
    assert (code, facts["works"]) == (1, False)
    assert f"the draft model {draft} cannot draft for {mini_dir}: disjoint vocabularies" in facts["problems"][0]
    assert "at least 50% are needed" in facts["problems"][0]
    code, said = text("--drafter", draft)
    assert code == 1
    assert said.endswith("does not work")


def test_doctor_notes_context_size_and_end_token_of_a_draft_model(target: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "d", "llama", num_hidden_layers=3, max_position_embeddings=64, eos_token_id=2)
    notes = pair_of(ask("--model", target, "--drafter", other)[1])["notes"]
    assert [note.partition(":")[0] for note in notes] == [
        "the draft model was made for 64 tokens, the target for 512",
        "the draft model has 105,024 parameters, the target 74,176",
        "the target ends with <|endoftext|>, the draft model with <|im_end|>",
    ]


def test_doctor_reports_a_drafter_named_twice(target: Path) -> None:
    found = diagnose(doctor_options(model=str(target), drafters=["ngram", "suffix", "ngram"]))
    assert found.problems == ["drafter 'ngram' was given more than once: name each drafter once"]


def test_doctor_accepts_lookup_drafters_and_reports_unknown_names(target: Path) -> None:
    code, facts = ask("--model", target, "--drafter", "ngram")
    assert (code, facts["drafters"][0]) == (0, {"name": "ngram", "model": None, "head": None, "pair": None, "adapter": None})
    assert ask("--model", target)[1]["drafters"][0]["name"] == "suffix"
    code, facts = ask("--model", target, "--drafter", "no such thing")
    assert code == 1
    assert "is neither one of auto, none, ngram" in facts["problems"][0]
    code, facts = ask("--model", target, "--drafter", "eagle3")
    assert code == 1
    assert "'eagle3' is a method whose head or draft model is a file of its own: give its directory or id" in facts["problems"][0]
    code, facts = ask("--model", target, "--drafter", "draft_model")
    assert code == 1
    assert "has no embedded draft model" in facts["problems"][0]


# Heads


@dataclass(frozen=True)
class HeadPairs:
    """Targets with a head for each: (model, drafter) by kind."""

    pairs: dict[str, tuple[Path, str]]
    other_eagle: Path  # for a smaller target

    def arguments(self, kind: str, *options: str) -> list[str]:
        model, drafter = self.pairs[kind]
        return ["--model", str(model), "--drafter", drafter, *(word for option in options for word in ("--drafter-options", option))]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> HeadPairs:
    folder = tmp_path_factory.mktemp("heads")
    legible = write_legible_target(folder / "legible", reads_mean=False)
    _, successor = write_successor_target(folder / "successor", "qwen3")
    medusa = write_heads(folder / "medusa", "rows", perfect_heads(successor))
    add_module(folder / "successor", "mtp", perfect_module(), num_layers=2)
    pairs = {
        "eagle": (legible, str(write_reading_eagle1(folder / "eagle"))),
        "eagle3": (legible, str(write_reading_eagle3(folder / "eagle3"))),
        "medusa": (folder / "successor", str(medusa)),
        "mtp": (folder / "successor", "mtp"),
        "peagle": (legible, str(write_recalling_peagle(folder / "peagle"))),
    }
    return HeadPairs(pairs, write_head(folder / "other", EAGLE3, eagle3_tensors()))


RANDOM_EAGLE = {**EAGLE1, "hidden_size": HIDDEN, "num_attention_heads": 3, "num_key_value_heads": 3, "bias": True}
HEADS = {
    "eagle": "eagle head that reads the final hidden states; its sizes fit the target's",
    "eagle3": "eagle3 head that reads layer boundaries 0, 2, 4; its sizes fit the target's",
    "medusa": "3 Medusa heads with a vocabulary matrix each; its sizes fit the target's",
    "mtp": "mtp module of the target's own checkpoint; its sizes fit the target's",
    "peagle": "peagle head that reads layer boundaries 0, 2, 4; its sizes fit the target's",
}


@pytest.mark.parametrize("kind", HEADS)
def test_doctor_checks_the_tensor_shapes_of_a_head(heads: HeadPairs, kind: str) -> None:
    code, facts = ask(*heads.arguments(kind))
    assert (code, facts["problems"], facts["drafters"][0]["name"]) == (0, [], kind)
    assert pair_of(facts)["summary"].startswith(HEADS[kind])
    head = facts["drafters"][0]["head"]
    assert head["stored_bytes"] >= 2 * head["parameters"] > 0
    assert facts["memory"]["draft_weights_bytes"] == head["stored_bytes"]
    assert (facts["memory"]["draft_cache_bytes_per_1k_tokens"] > 0) == (kind != "medusa")
    halved = ask(*heads.arguments(kind), "--draft-quantization", "int8")[1]["memory"]["draft_weights_bytes"]
    if kind in ("medusa", "mtp"):  # the others' matrices are of widths that no group divides
        assert 0.2 < halved / head["stored_bytes"] < 0.6
    quantization = QuantOptions(bits=8)
    model, drafter = heads.pairs[kind]
    (found,) = diagnose(doctor_options(model=str(model), drafters=[drafter], draft_quantization=quantization)).drafters
    assert found.head is not None
    assert halved == quantized_weights(Weights(found.head.weights), quantization, None).nbytes
    code, said = text(*heads.arguments(kind))
    assert said.endswith("works")
    assert HEADS[kind] in said


@pytest.mark.parametrize(
    ("kind", "option", "said"),
    [
        ("eagle3", "boundaries=1,2,3", "reads layer boundaries 1, 2, 3"),
        ("medusa", "tree=accuracy", "tree accuracy"),
    ],
)
def test_doctor_applies_drafter_options(heads: HeadPairs, kind: str, option: str, said: str) -> None:
    code, facts = ask(*heads.arguments(kind, option))
    assert code == 0
    assert said in pair_of(facts)["summary"]
    assert not any(option.partition("=")[0] in note for note in pair_of(facts)["notes"])


@pytest.mark.parametrize(
    ("kind", "option", "problem"),
    [
        ("eagle3", "boundaries=0,3,9", "names 3 different ones from 0 to 4"),
        ("eagle3", "tree=accuracy", "'tree' is for medusa heads, and the drafter is eagle3"),
        ("medusa", "tree=oak", "use one of probability, accuracy"),
        ("mtp", "nothing=1", "'nothing' is unknown; there are tree (medusa), boundaries (eagle3 and peagle)"),
    ],
)
def test_doctor_reports_an_unusable_drafter_option(heads: HeadPairs, kind: str, option: str, problem: str) -> None:
    code, facts = ask(*heads.arguments(kind, option))
    assert (code, len(facts["problems"])) == (1, 1)
    assert problem in facts["problems"][0]


def test_doctor_probe_passes_drafter_options_to_the_loader(heads: HeadPairs, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = heads.arguments("eagle3", "boundaries=1,2,3", "rope_theta=5e5")
    given: dict[str, Any] = {}

    def remember(prompts: object, **loaded: Any) -> Any:
        given.update(loaded)
        return probe(**loaded)

    monkeypatch.setattr("paceline.proof.doctor.probe", remember)
    assert ask(*arguments, "--probe", "--threads", "2")[0] == 0
    assert given["drafter_options"] == {"boundaries": "1,2,3", "rope_theta": "5e5"}


def test_doctor_probe_notices_heads_trained_for_other_weights(heads: HeadPairs, tmp_path: Path) -> None:
    """Medusa and EAGLE heads that draft almost nothing right."""
    model, _ = heads.pairs["medusa"]
    others = {
        "medusa": (model, write_heads(tmp_path / "medusa", "rows", random_heads(hidden=128))),
        "eagle": (heads.pairs["eagle"][0], write_head(tmp_path / "eagle", RANDOM_EAGLE, eagle1_tensors(RANDOM_EAGLE))),
    }
    for kind, (other_model, drafter) in others.items():
        code, facts = ask("--model", other_model, "--drafter", drafter, "--probe", "--threads", "2")
        assert code == 0
        (notice,) = [notice for notice in facts["probe"]["notices"] if "made for another" in notice]
        assert kind in notice
        right = ask(*heads.arguments(kind), "--probe", "--threads", "2")[1]["probe"]
        assert right["drafting_steps_with_accepted"] > 0.5 * right["drafting_steps"] > 0
        assert not any("made for another" in notice for notice in right["notices"])


def test_doctor_accepts_an_mtp_module_in_its_own_file(heads: HeadPairs, tmp_path: Path) -> None:
    model, _ = heads.pairs["mtp"]
    code, facts = ask("--model", model, "--drafter", write_speculators(tmp_path / "module", perfect_module(), model))
    assert (code, facts["problems"]) == (0, [])
    assert pair_of(facts)["summary"].startswith("mtp module of a file of its own; its sizes fit the target's")


def test_doctor_reports_a_head_for_another_target(heads: HeadPairs, target: Path, tmp_path: Path) -> None:
    legible, _ = heads.pairs["eagle3"]
    heads_of_64 = write_heads(tmp_path / "medusa", "rows", random_heads(hidden=64))
    short = write_recalling_peagle(tmp_path / "short")
    tensors = load_file(short / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"][:50]}, short / "model.safetensors")
    for model, drafter in (
        (legible, heads.other_eagle),
        (legible, heads_of_64),
        (legible, short),
        (target, heads.pairs["eagle"][1]),
        (target, "medusa"),
    ):
        code, facts = ask("--model", model, "--drafter", drafter)
        assert (code, len(facts["problems"])) == (1, 1)
        assert re.search("made for another model|holds no medusa head|from 0 to 2", facts["problems"][0]), facts["problems"]


# Files


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:-1000], "truncated, download it again"),
        ("model.safetensors", lambda data: b"\xff" * 8 + data[8:], "truncated or no safetensors file"),
        ("config.json", lambda data: data[:50], "cannot be read as JSON"),
        ("config.json", lambda data: data.replace(b'"llama"', b'"other"'), "is not supported"),
        ("tokenizer.json", lambda data: data[:500], "cannot be read as a tokenizer"),
    ],
)
@pytest.mark.parametrize("is_draft", [False, True])
def test_doctor_reports_a_corrupted_file(
    target: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str, is_draft: bool
) -> None:
    damaged = Path(shutil.copytree(target, tmp_path / "damaged"))
    damage(damaged / name, change)
    code, facts = ask("--model", target, "--drafter", damaged) if is_draft else ask("--model", damaged)
    assert (code, len(facts["problems"])) == (1, 1)
    assert message in facts["problems"][0]
    assert str(damaged) in facts["problems"][0]


def test_doctor_does_not_download_a_missing_model() -> None:
    code, facts = ask("--model", "owner/no-such-model")
    assert code == 1
    assert "is not in the local cache" in facts["problems"][0]


# Memory


def test_doctor_reports_a_model_larger_than_memory(target: Path) -> None:
    found = diagnose(doctor_options(model=str(target), memory_bytes=100_000))
    assert not found.works
    assert "0.0001 GB are free: use --quantization int8 or int4" in found.problems[0]
    for size in ("nan", "inf", "0", "-1"):
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["doctor", "--model", str(target), "--memory-gb", size])
        assert (done.exit_code, "use a size in gigabytes above 0" in done.output) == (2, True)
    code, facts = ask("--model", target, "--memory-gb", "0.0001")
    assert (code, facts["memory"]["fits"], facts["memory"]["context_that_fits"]) == (1, False, 0)


def test_doctor_counts_adapter_memory(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = open_weights(target, read_model_config(target)).tensor_info("layers.0.q_proj.weight").shape
    tensors = low_rank(np.random.default_rng(0), "model.layers.0.self_attn.q_proj", (shape[0], shape[1]))
    adapter = write_adapter(tmp_path, tensors, layers_to_transform=[0])
    plain = diagnose(doctor_options(model=str(target))).memory
    with_adapter = doctor_options(model=str(target), adapters={"a": str(adapter)})
    memory = diagnose(with_adapter).memory
    assert plain is not None
    assert memory is not None
    assert memory.weights_bytes - plain.weights_bytes == 4 * 4 * sum(shape) == memory.as_dict()["adapters_bytes"]
    monkeypatch.setattr("paceline.proof.doctor.available_memory_bytes", lambda: 100)
    assert any("GB while it is read, 1e-07 GB are free" in problem for problem in diagnose(with_adapter).problems)


def test_doctor_names_an_x_lora_mix_with_its_memory(target: Path, tmp_path: Path) -> None:
    directory = write_xlora(tmp_path / "mix", read_model_config(target), seed=1)
    plain, mixed = (diagnose(doctor_options(model=str(target), adapters=own)) for own in ({}, {"mix": str(directory)}))
    assert plain.memory is not None
    assert mixed.memory is not None
    assert mixed.works
    assert mixed.adapters[0].num_mixed == 3
    assert mixed.memory.cache_bytes(100) == 2 * plain.memory.cache_bytes(100)
    assert any("X-LoRA ('mix'): a step with it takes two passes, and keys and values are kept twice" in one for one in mixed.notes)
    shown = CliRunner().invoke(app, ["doctor", "--model", str(target), "--adapter", f"mix={directory}"])
    assert "mix: fits; X-LoRA of 3 adapters, " in " ".join(shown.stdout.split())
    (directory / "adapter_model.safetensors").unlink()
    assert any(
        "where X-LoRA's classifier is" in one
        for one in diagnose(doctor_options(model=str(target), adapters={"mix": str(directory)})).problems
    )


def test_doctor_notes_a_context_larger_than_memory(target: Path) -> None:
    memory = diagnose(doctor_options(model=str(target))).memory
    assert memory is not None
    enough = diagnose(doctor_options(model=str(target), memory_bytes=memory.full_context_bytes))
    assert (enough.works, enough.notes) == (True, [])
    less = memory.full_context_bytes - memory.cache_bytes_per_1k * 100 // 1000
    found = diagnose(doctor_options(model=str(target), memory_bytes=less, max_model_len=512))
    assert found.works
    assert "there is room for 412 tokens" in found.notes[0]


def test_doctor_counts_only_the_window_of_sliding_layers(tmp_path: Path) -> None:
    values = {"num_hidden_layers": 4, "max_position_embeddings": 30_000, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    target = write_checkpoint(tmp_path, "gemma3_text", sliding_window=100, layer_types=kinds, **values)
    memory = diagnose(doctor_options(model=str(target), drafters=["none"])).memory
    assert memory is not None
    row = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes
    assert memory.cache_bytes(500) == 500 * row
    assert memory.cache_bytes(30_000) == (30_000 + 740) * row // 2
    tight = diagnose(
        doctor_options(model=str(target), drafters=["none"], memory_bytes=memory.weights_bytes + memory.pass_bytes + 10_740 * row // 2)
    ).memory
    assert tight is not None
    assert tight.context_that_fits == 10_000
    assert "for every 1000 tokens; layers with a window keep at most 740 tokens" in text("--model", target, "--drafter", "none")[1]


def test_doctor_adds_the_memory_of_a_draft_model(target: Path, draft: Path) -> None:
    alone, pair = (diagnose(doctor_options(model=str(target), drafters=names)).memory for names in (["none"], [str(draft)]))
    assert alone is not None
    assert pair is not None
    assert len(pair.drafts) == 1
    assert pair.weights_bytes == alone.weights_bytes + pair.drafts[0].weights_bytes


def test_doctor_counts_quantised_weights(mini_dir: Path) -> None:
    sizes = []
    for quantization in ("none", QuantOptions(bits=8), QuantOptions(bits=4)):
        memory = diagnose(doctor_options(drafters=["none"], quantization=quantization)).memory
        assert memory is not None
        sizes.append(memory.weights_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 2.1 * (mini_dir / "model.safetensors").stat().st_size
    assert ask("--quantization", "int4", "--drafter", "none")[1]["memory"]["target_weights_bytes"] == sizes[2]


def test_doctor_reports_a_machine_without_any_backend(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_has_torch", lambda: False)
    code, facts = ask("--model", target, "--device", "cuda")
    assert (code, facts["memory"]) == (1, None)
    assert [install_command("torch") in problem for problem in facts["problems"]] == [True]
    assert text("--model", target, "--device", "cuda")[0] == 1


def test_doctor_reports_a_context_longer_than_the_model_allows(target: Path) -> None:
    code, facts = ask("--model", target, "--max-model-len", "513")
    assert code == 1
    assert facts["problems"] == ["max_model_len is 513, the model's limit is 512: lower max_model_len"]


# GGUF


def test_doctor_reads_gguf_files(shared_dir: Path) -> None:
    path = shared_dir / "data" / "tokenizers" / "ggml-vocab" / "ggml-vocab-llama-spm.gguf"
    if not path.is_file():
        pytest.skip(f"no {path.name} in ../shared")
    code, facts = ask("--model", path)  # a vocabulary alone
    assert code == 1
    assert str(path) in facts["problems"][0]


def test_doctor_compares_the_vocabulary_of_a_gguf_draft_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    directory = write_checkpoint(tmp_path / "hf", "llama", vocab_size=263, num_hidden_layers=1)
    write_byte_level_tokenizer(directory)
    size = len(json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]) + 2
    assert size == 263
    path = write_gguf(directory, tmp_path / "draft.gguf", "Q8_0", metadata=byte_level_vocabulary(directory))
    code, facts = ask("--model", directory, "--drafter", path)
    assert (code, pair_of(facts)["match"]) == (0, "padded")  # the file lacks two added tokens
    assert facts["drafters"][0]["model"]["stored_as"] == "gguf, Q8_0"
    memory = facts["memory"]
    assert memory["draft_weights_bytes"] < memory["target_weights_bytes"]
    assert ask("--model", path, "--drafter", "none")[0] == 0


def test_doctor_names_the_quantisation_that_a_gguf_file_states(tmp_path: Path) -> None:
    """As the server, Ollama and llama.cpp do: in Q4_K_M files of small models most bytes are of other types."""
    pytest.importorskip("gguf")
    directory = write_byte_level_tokenizer(write_checkpoint(tmp_path / "hf", "llama", vocab_size=263, num_hidden_layers=1))
    metadata = {**byte_level_vocabulary(directory), "general.file_type": 15}
    _, facts = ask("--model", write_gguf(directory, tmp_path / "model.gguf", "Q8_0", metadata=metadata))
    assert facts["target"]["stored_as"] == "gguf, Q4_K_M"


def test_doctor_predicts_the_memory_of_a_requantised_gguf_file(tmp_path: Path) -> None:
    """Without converting a matrix: what it will take is what the loaded weights take."""
    pytest.importorskip("gguf")
    directory = write_checkpoint(tmp_path / "hf", "llama", vocab_size=263)
    write_byte_level_tokenizer(directory)
    path = write_gguf(directory, tmp_path / "model.gguf", "Q8_0", metadata=byte_level_vocabulary(directory))
    memory = diagnose(doctor_options(model=str(path), drafters=["none"], quantization=QuantOptions(bits=4))).memory
    assert memory is not None
    weights = load_network(path, RuntimeOptions(quantization=QuantOptions(bits=4), backend="native")).network.weights
    assert memory.weights_bytes == weights.nbytes == Weights(weights).nbytes
    assert weights.nbytes < open_weights(path, read_model_config(path)).nbytes


# Without loading


def run_doctor(*arguments: str | Path) -> tuple[set[str], float]:
    """The libraries a run imported, and its processor time in seconds (the clock would count other programs as well)."""
    script = (
        "import json, resource, sys\nfrom paceline.cli import main\nsys.argv = ['paceline', 'doctor', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), used.ru_utime + used.ru_stime]))"
    )
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    modules, seconds = json.loads(done.stdout.splitlines()[-1])
    return set(modules), seconds


def test_doctor_imports_no_heavy_library_and_is_fast(mini_dir: Path) -> None:
    modules, seconds = run_doctor("--model", mini_dir)
    assert modules & HEAVY == set()
    assert seconds < 2.0


def test_doctor_compares_large_vocabularies_within_two_seconds(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    paths = []
    for name, vocab_size in (("target", 60_000), ("draft", 30_000)):
        path = write_checkpoint(tmp_path / name, "llama", vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, head_dim=4)
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = dict(zip(vocab, random.permutation(vocab_size).tolist(), strict=True))
        for token in content["added_tokens"]:
            token["id"] = content["model"]["vocab"][token["content"]]
        (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        paths.append(path)
    start = time.process_time()
    found = diagnose(doctor_options(model=str(paths[0]), drafters=[str(paths[1])]))
    assert time.process_time() - start < 2.0
    pair = found.drafters[0].pair
    assert pair is not None
    assert pair.vocabulary is not None
    assert pair.vocabulary.shared_piece_share == 0.5


# With loading


def test_doctor_probe_measures_a_speedup(target: Path, draft: Path) -> None:
    code, facts = ask("--model", target, "--drafter", draft, "--probe", "--threads", "2")
    assert code == 0
    probe = facts["probe"]
    assert probe["numerics"] in ("exact", "fast")
    assert min(probe["pass_ms_by_rows"].values()) > 0
    assert [one["kind"] for one in probe["measured"]] == ["new prose", "copying"]
    assert all(one["speedup"] > 0 and 0 <= one["acceptance_rate"] <= 1 for one in probe["measured"])
    assert all(0 <= one["draft_share"] <= 1 for one in probe["measured"])
    times = list(probe["pass_ms_by_rows"].values())
    assert times == sorted(times)


SPEEDUP_PATTERN = r"KIND (\d+\.\d\dx measured( \(\d+\.\d\d to \d+\.\d\d\))?|nothing was drafted); "


def test_doctor_probe_reports_the_measured_speedup_as_text(target: Path) -> None:
    said = text("--model", target, "--drafter", "ngram", "--probe")[1]
    assert re.search(SPEEDUP_PATTERN.replace("KIND", "new prose"), said)
    assert re.search(r"; \d+% of steps used a draft, and \d+% of draft tokens were accepted \(\d+ texts? of up to", said)
    assert re.search(r"new prose: about \d+\.\dx, copying: up to \d+\.\dx; measured here on short texts", said)
    assert "ngram ngram 5 to 55%" in said


def test_doctor_probe_measures_given_prompts(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("Once there was\nThe dog and the dog\n")
    said = text("--model", target, "--drafter", "ngram", "--probe", "--prompts", prompts)[1]
    assert re.search(SPEEDUP_PATTERN.replace("KIND", "your prompts"), said)
    assert re.search(r"your prompts: about \d+\.\dx works", said)
    assert "new prose" not in said


def test_doctor_refuses_missing_prompt_files_and_prompts_without_probe_option(target: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(target), "--prompts", str(tmp_path / "none.txt")])
    assert result.exit_code == 2
    assert "add --probe" in result.stderr
    result = CliRunner().invoke(app, ["doctor", str(target), "--probe", "--prompts", str(tmp_path / "none.txt")])
    assert result.exit_code == 2
    assert "there is no file" in result.stderr


def test_doctor_reports_an_invalid_prompt_as_wrong_input(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt_token_ids": [5000]}\n')
    result = CliRunner().invoke(app, ["doctor", str(target), "--drafter", "ngram", "--probe", "--prompts", str(prompts)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "prompt 2 of --prompts: " in result.stderr


def test_doctor_says_why_no_speedup_was_measured(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("Once\n")
    assert "no speedup was measured: there is no drafter" in text(target, "--drafter", "none", "--probe", "--prompts", prompts)[1]
    said = text(target, "--drafter", "ngram", "--probe", "--max-model-len", "100")[1]
    assert "no speedup was measured: the context is too short" in said
    assert ask(target, "--drafter", "ngram", "--probe", "--max-model-len", "4")[0] == 0


def test_doctor_probe_without_drafters_measures_no_speedup(target: Path) -> None:
    assert ask(target, "--drafter", "none", "--probe")[1]["probe"]["measured"] == []


def test_doctor_prediction_uses_the_best_draft_length() -> None:
    pass_s = {1: 1.0, 2: 1.1, 5: 1.5}
    best = [best_draft_length(rate, pass_s, 0.05) for rate in (0.5, 0.7, 0.9)]
    assert [one.num_draft_tokens for one in best] == [1, 4, 4]
    assert best[2].speedup == pytest.approx((1 + 0.9 + 0.81 + 0.729 + 0.6561) / (1.5 + 4 * 0.05))
    assert expected_speedup(0.0, 4, 1.0, 1.0, 0.0) == 1.0
    assert expected_speedup(1.0, 4, 1.0, 1.0, 0.0) == 5.0


def test_doctor_prediction_is_possible_if_passes_were_disturbed() -> None:
    assert best_draft_length(0.7, {1: 2.0, 2: 1.0}, 0.0).speedup == 1.7


def test_doctor_predicts_no_draft_if_drafting_cannot_pay() -> None:
    best = best_draft_length(0.9, {1: 1.0, 2: 2.0, 5: 5.0}, 1.0)
    assert (best.num_draft_tokens, best.speedup) == (0, 1.0)


# Suggestions


def test_doctor_suggests_published_drafters_for_a_missing_model() -> None:
    code, facts = ask("--model", "Qwen/Qwen3-8B")
    names = {one["drafter"]: one for one in facts["suggested_drafters"]}
    assert code == 1
    assert {"RedHatAI/Qwen3-8B-speculator.eagle3", "AngelSlim/Qwen3-8B_eagle3", "Qwen/Qwen3-0.6B", "ngram"} <= names.keys()
    assert names["AngelSlim/Qwen3-8B_eagle3"]["slowest"] is None
    said = text("--model", "Qwen/Qwen3-8B")[1]
    assert "Qwen/Qwen3-0.6B draft_model 0.6 B 55 to 80%" in said
    narrow = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["doctor", "Qwen/Qwen3-30B-A3B-Instruct-2507"]).stdout
    assert re.search(r"^lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex +eagle3 ", narrow, re.MULTILINE)


def test_doctor_predicts_no_speedup_of_lookup_drafters(target: Path) -> None:
    code, facts = ask("--model", target, "--drafter", "none", "--probe")
    assert code == 0
    assert [(one["location"], one["slowest"]) for one in facts["suggested_drafters"]] == [("built_in", None)] * 3
