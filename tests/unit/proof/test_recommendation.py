"""The tables of published drafters are well-formed, and predictions follow from costs and acceptance."""

import re
from pathlib import Path

import pytest

from paceline.drafters import DRAFTERS, HEADS
from paceline.drafters.head_kinds import HeadKind
from paceline.hub import cached_models, is_hub_id
from paceline.proof.recommendation.assumptions import ACCEPTANCE, Acceptance
from paceline.proof.recommendation.costs import DRAFT_LENGTHS, MachineCosts
from paceline.proof.recommendation.forecast import DraftCost, forecast
from paceline.proof.recommendation.published import OWN_MODULES, PUBLISHED, PublishedDrafter, has_own_module, plain_name, published_for
from paceline.proof.recommendation.recommend import names_of
from paceline.proof.recommendation.siblings import FAMILIES, Sibling, smaller_siblings

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
EVEN = dict.fromkeys((1, *(count + 1 for count in DRAFT_LENGTHS)), 1.0)  # a pass takes a second, whatever its rows


# Tables


@pytest.mark.parametrize("drafter", PUBLISHED, ids=lambda drafter: drafter.hub_id)
def test_every_published_drafter_has_an_id_a_method_we_run_and_targets_of_other_names(drafter: PublishedDrafter) -> None:
    assert HUB_ID.fullmatch(drafter.hub_id)
    assert drafter.method in HEADS
    assert drafter.method.value in ACCEPTANCE
    assert drafter.targets
    assert all(HUB_ID.fullmatch(target) and target != drafter.hub_id for target in drafter.targets)
    assert drafter.parameters is None or 1e7 < drafter.parameters < 2e9
    assert drafter in published_for([plain_name(drafter.targets[0])])


def test_no_drafter_is_listed_twice() -> None:
    ids = [drafter.hub_id.lower() for drafter in PUBLISHED]
    assert len(set(ids)) == len(ids)


def test_each_method_that_is_published_alone_is_in_the_table() -> None:
    assert {drafter.method for drafter in PUBLISHED} == set(HEADS) - {HeadKind.MTP}


def test_what_is_assumed_is_said_of_every_method_with_its_source() -> None:
    assert set(ACCEPTANCE) == {*DRAFTERS, *(kind.value for kind in HEADS), HeadKind.LANGUAGE_MODEL.value}
    assert all(0 <= one.low < one.high < 1 and len(one.source) > 10 for one in ACCEPTANCE.values())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0].hub_id)
def test_a_family_has_ids_and_sizes_and_a_sibling_for_its_largest(family: tuple[Sibling, ...]) -> None:
    assert all(HUB_ID.fullmatch(member.hub_id) for member in family)
    assert len({member.hub_id for member in family}) == len(family)
    largest = max(family, key=lambda member: member.parameters)
    smallest = min(family, key=lambda member: member.parameters)
    siblings = smaller_siblings([plain_name(largest.hub_id)])
    assert siblings[0] == smallest
    assert all(one in family for one in siblings)


def test_siblings_are_at_most_half_as_large() -> None:
    assert [one.hub_id for one in smaller_siblings(["qwen3-8b"])] == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]
    assert [one.hub_id for one in smaller_siblings(["qwen3-1.7b"])] == ["Qwen/Qwen3-0.6B"]
    assert smaller_siblings(["qwen3-0.6b"]) == []
    assert smaller_siblings(["someone's-own"]) == []


def test_models_with_a_layer_of_their_own_are_known_by_how_their_names_begin() -> None:
    assert all("/" in beginning for beginning in OWN_MODULES)
    assert has_own_module(["qwen3.5-9b"])
    assert has_own_module(["mimo-7b-rl"])
    assert not has_own_module(["qwen3-8b"])


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
def test_marks_of_storage_are_no_part_of_a_name(model: str, name: str) -> None:
    assert names_of(model, None) == (name,)


def test_a_cached_model_goes_by_its_id(tmp_path: Path) -> None:
    path = tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "0e9e39f2"
    path.mkdir(parents=True)
    assert names_of(str(path), path)[0] == "llama-3.1-8b-instruct"


def test_a_directory_goes_by_its_name_and_by_what_its_config_says(tmp_path: Path) -> None:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"_name_or_path": "Qwen/Qwen3-8B"}', encoding="utf-8")
    assert names_of("my-model", path) == ("my-model", "qwen3-8b")
    file = tmp_path / "Qwen3-8B-Q4_K_M-00001-of-00002.gguf"
    file.write_bytes(b"no model")
    assert names_of(str(file), file) == ("qwen3-8b",)


def test_the_cache_is_read_by_the_commit_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--name--with--dashes"
    for commit in ("older", "newer"):
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("older", encoding="ascii")
    (tmp_path / "models--owner--empty").mkdir()
    assert cached_models() == {"owner/name--with--dashes": folder / "snapshots" / "older"}
    assert is_hub_id("owner/name")
    assert not is_hub_id(str(tmp_path))
    assert not is_hub_id("mini")


# Predictions


def test_a_free_drafter_that_is_right_four_times_in_five_brings_what_the_formula_says() -> None:
    found = forecast(Acceptance(0.0, 0.8, "assumed"), DraftCost(0.0, 0.0), EVEN)
    assert (found.low.num_draft_tokens, found.low.speedup) == (0, 1.0)
    assert found.high.num_draft_tokens == 8
    assert found.high.speedup == pytest.approx(sum(0.8**depth for depth in range(9)))


def test_dear_guesses_make_drafts_short_and_dearer_ones_end_them() -> None:
    lengths = [forecast(Acceptance(0.6, 0.8, ""), DraftCost(cost, 0.0), EVEN).high.num_draft_tokens for cost in (0.0, 0.1, 0.3, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


def test_a_draft_pass_costs_its_bytes_and_never_less_a_byte_than_the_target() -> None:
    quick = MachineCosts({1: 1.0}, bytes_per_s=1e9, target_bytes=1e9)  # the target runs at the bandwidth
    slow = MachineCosts({1: 4.0}, bytes_per_s=1e9, target_bytes=1e9)
    assert quick.draft_pass_s(1e8) == pytest.approx(0.15)
    assert slow.draft_pass_s(1e8) == pytest.approx(0.4)
