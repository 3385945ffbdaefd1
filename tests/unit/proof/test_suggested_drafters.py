"""The tables of published drafters are well-formed, and predictions follow from costs and acceptance."""

import re
from pathlib import Path

import pytest

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from paceline.config import quant_options
from paceline.drafters import HEAD_OPENERS, MODEL_FREE_DRAFTERS
from paceline.drafters.head_kinds import HeadKind
from paceline.proof.checkpoint_facts import read_checkpoint_facts
from paceline.proof.suggested_drafters import (
    ACCEPTANCE,
    FAMILIES,
    MTP_FAMILIES,
    PUBLISHED,
    PassCosts,
    model_names,
    pass_costs,
    suggest_drafters,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PASS_S = {rows: 0.1 + 0.001 * rows for rows in (1, 2, 3, 4, 5, 7, 9, 13)}


def names_of(target: str, costs: PassCosts | None = None) -> list[str]:
    return [one.drafter for one in suggest_drafters([target], costs)]


# Tables


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry[0])
def test_published_drafter_is_suggested_for_each_of_its_targets(entry: tuple[str, str, str, float | None]) -> None:
    hub_id, method, targets, parameters = entry
    assert HUB_ID.fullmatch(hub_id)
    assert HeadKind(method) in HEAD_OPENERS
    assert all(HUB_ID.fullmatch(target) and target != hub_id for target in targets.split())
    assert parameters is None or 1e7 < parameters < 2e9
    assert all(hub_id in names_of(*model_names(target, None)) for target in targets.split())


def test_published_drafters_are_listed_once() -> None:
    ids = [entry[0].lower() for entry in PUBLISHED]
    assert len(set(ids)) == len(ids)


def test_published_drafter_table_covers_every_head_kind_but_mtp() -> None:
    assert {HeadKind(entry[1]) for entry in PUBLISHED} == set(HEAD_OPENERS) - {HeadKind.MTP}


def test_every_drafting_method_has_an_acceptance_range_with_its_source() -> None:
    assert set(ACCEPTANCE) == {*MODEL_FREE_DRAFTERS, *(kind.value for kind in HEAD_OPENERS), HeadKind.LANGUAGE_MODEL.value}
    assert all(0 <= one.low < one.high < 1 and len(one.source) > 10 for one in ACCEPTANCE.values())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: next(iter(family)))
def test_largest_model_of_a_family_gets_its_smallest_as_draft_model(family: dict[str, float]) -> None:
    assert all(HUB_ID.fullmatch(member) for member in family)
    largest, smallest = max(family, key=family.__getitem__), min(family, key=family.__getitem__)
    assert smallest in names_of(*model_names(largest, None))


def test_suggested_draft_models_are_at_most_half_as_large() -> None:
    siblings = [[name for name in names_of(target) if name.startswith("Qwen/")] for target in ("qwen3-8b", "qwen3-1.7b", "qwen3-0.6b")]
    assert siblings == [["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"], ["Qwen/Qwen3-0.6B"], []]
    assert names_of("someone's-own") == list(MODEL_FREE_DRAFTERS)


def test_models_with_mtp_layers_are_recognised_by_name_prefix() -> None:
    assert all("/" in beginning for beginning in MTP_FAMILIES)
    assert ["mtp" in names_of(name) for name in ("qwen3.5-9b", "mimo-7b-rl", "qwen3-8b")] == [True, True, False]


# Names


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("bartowski/Qwen3-8B-GGUF", "qwen3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b-instruct"),
        ("google/gemma-4-31B-it-qat-q4_0-gguf", "gemma-4-31b-it"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
    ],
)
def test_storage_suffixes_are_stripped_from_model_names(model: str, name: str) -> None:
    assert model_names(model, None) == (name,)


def test_long_name_that_is_nearly_suffixes_is_read_at_once() -> None:
    name = "a" + "_q1" * 3000 + "-!"  # an expression that backtracks takes seconds for 20 of them
    assert model_names(name, None)


def test_cached_model_is_identified_by_its_hub_id(tmp_path: Path) -> None:
    path = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "0e9e39f2"
    path.mkdir(parents=True)
    assert model_names(str(path), path)[0] == "llama-3.1-8b-instruct"


def test_model_directory_is_identified_by_name_and_config(tmp_path: Path) -> None:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3-8B"}', encoding="utf-8")
    assert model_names("my-model", path) == ("my-model", "qwen3-8b")
    file = tmp_path / "Qwen3-8B-Q4_K_M-00001-of-00002.gguf"
    file.write_bytes(b"no model")
    assert model_names(str(file), file) == ("qwen3-8b",)


# Predictions


def test_suggested_drafters_are_ordered_by_lowest_predicted_speedup() -> None:
    found = suggest_drafters(["qwen3-8b"], PassCosts(PASS_S, row_bytes=16e9, lm_head_bytes=1e9))
    speedups = [round(one.slowest.speedup, 2) for one in found if one.slowest is not None]
    assert speedups == sorted(speedups, reverse=True)
    assert len(speedups) == len(found) - len(MODEL_FREE_DRAFTERS), "what lookup brings depends on the text"
    assert all(one.fastest.speedup >= one.slowest.speedup >= 1.0 for one in found if one.slowest and one.fastest)


def test_larger_draft_model_is_predicted_to_be_slower() -> None:
    found = {one.drafter: one for one in suggest_drafters(["qwen3-8b"], PassCosts(PASS_S, row_bytes=16e9, lm_head_bytes=1e9))}
    small, large = found["Qwen/Qwen3-0.6B"].fastest, found["Qwen/Qwen3-1.7B"].fastest
    assert small is not None
    assert large is not None
    assert small.speedup > large.speedup


def test_head_of_unknown_size_gets_no_predicted_speedup() -> None:
    found = {one.drafter: one for one in suggest_drafters(["gpt-oss-20b"], PassCosts(PASS_S, row_bytes=16e9, lm_head_bytes=1e9))}
    assert found["amazon/GPT-OSS-20B-P-EAGLE"].slowest is None


def test_weight_bytes_per_row_exclude_embeddings_and_unselected_experts(tmp_path: Path) -> None:
    facts = read_checkpoint_facts(write_checkpoint(tmp_path / "dense", "llama", num_hidden_layers=1, hidden_size=32, head_dim=8))
    whole = facts.weights.nbytes - VOCAB_SIZE * 32 * 4
    assert pass_costs(facts, None, PASS_S).row_bytes == whole
    assert pass_costs(facts, quant_options("quantization", "int8"), PASS_S).row_bytes < 0.5 * whole
    path = write_checkpoint(tmp_path / "experts", "qwen3_moe", num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
                            moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
    facts = read_checkpoint_facts(path)
    experts = sum(facts.weights.tensor_info(name).nbytes for name in facts.weights if ".experts." in name)
    assert pass_costs(facts, None, PASS_S).row_bytes == facts.weights.nbytes - VOCAB_SIZE * 64 * 4 - 0.75 * experts
