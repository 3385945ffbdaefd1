"""From the user's setting to a drafter, or an error with the reason."""

import json
import re
import shutil
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint, write_tokenizer
from harness.eagle_checkpoints import EAGLE3, eagle3_tensors, write_head
from harness.loaded_targets import load_target, make_drafter, make_drafters
from harness.medusa_checkpoints import random_heads, write_heads
from paceline import drafters
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters import DRAFT_SUBFOLDER, DRAFTER_NAMES, prepare_drafters
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.drafter import MedusaDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.errors import CheckpointError, IncompatibleDrafterError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=1)


def test_drafter_names_and_paths_create_their_drafters(directory: Path) -> None:
    assert DRAFTER_NAMES == ("auto", "none", "ngram", "suffix", "prediction", "draft_model", "medusa", "mtp")
    assert make_drafter("none", directory) is None
    assert isinstance(make_drafter("ngram", directory), NgramDrafter)
    assert isinstance(make_drafter(["ngram"], directory), NgramDrafter)
    assert isinstance(make_drafter("suffix", directory), SuffixDrafter)
    assert isinstance(make_drafter("prediction", directory), PredictionDrafter)
    assert isinstance(make_drafter(str(directory), directory), DraftModelDrafter)
    both = make_drafters(("ngram", str(directory)), directory)
    assert [drafter.name for drafter in both] == ["ngram", "draft_model"]


def _with_embedded(directory: Path, tmp_path: Path, num_layers: int = 2) -> Path:
    """Write a target of some layers with the one of `directory` as its own draft model."""
    own = write_checkpoint(tmp_path / "own", "llama", num_hidden_layers=num_layers)
    shutil.copytree(directory, own / DRAFT_SUBFOLDER)
    return own


def test_auto_does_not_choose_a_draft_model_as_large_as_its_target(directory: Path, tmp_path: Path) -> None:
    own = _with_embedded(directory, tmp_path, num_layers=1)
    prepared = prepare_drafters(own, EngineConfig(offline=True), SpeculationConfig())
    assert [drafter.name for drafter in prepared.drafters] == ["suffix"]
    (notice,) = prepared.notices
    assert notice.startswith(f"{own / DRAFT_SUBFOLDER} is not used: the draft model has ")
    assert notice.endswith("so drafting cannot be faster (--drafter draft_model uses it)")


def test_named_draft_model_as_large_as_its_target_gets_a_notice(directory: Path, tmp_path: Path) -> None:
    larger = write_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    for draft, notices in ((larger, 1), (directory, 1)):
        drafter = make_drafter(str(draft), directory)
        assert isinstance(drafter, DraftModelDrafter)
        assert len(drafter.traits.notices) == notices
        assert drafter.traits.notices[0].endswith("a draft pass costs as much as a plain step, so drafting cannot be faster")
    assert make_drafter(str(directory), larger).traits.notices == []  # type: ignore[union-attr]


@pytest.mark.parametrize(("given", "meant"), [("ngarm", "ngram"), ("sufix", "suffix"), ("draft-model", "draft_model"), ("none ", "none")])
def test_misspelt_drafter_name_gets_a_suggestion(directory: Path, given: str, meant: str) -> None:
    with pytest.raises(IncompatibleDrafterError, match=rf"drafter {given!r} \(did you mean {meant}\?\) is neither"):
        make_drafter(given, directory)


def test_auto_drafter_is_suffix_with_the_embedded_draft_model_if_any(directory: Path, tmp_path: Path) -> None:
    assert isinstance(make_drafter("auto", directory), SuffixDrafter)
    own = _with_embedded(directory, tmp_path)
    assert isinstance(make_drafter("draft_model", own), DraftModelDrafter)
    speculation = SpeculationConfig()
    both = prepare_drafters(own, EngineConfig(offline=True), speculation).open(load_target(own, speculation))
    assert [type(drafter) for drafter in both] == [SuffixDrafter, DraftModelDrafter], "it copies where the text repeats itself"


def test_draft_model_cache_holds_as_many_tokens_as_the_target_cache(directory: Path) -> None:
    speculation = SpeculationConfig(drafter=str(directory))
    target = load_target(directory, speculation)
    (drafter,) = prepare_drafters(directory, EngineConfig(offline=True), speculation).open(target)
    assert isinstance(drafter, DraftModelDrafter)
    assert drafter.cache.max_slots >= target.cache.max_slots
    assert drafter.traits.cache_bytes_per_token * target.cache.max_slots <= drafter.cache.num_bytes


@pytest.mark.parametrize("wanted", ["nothing", "/no/such/directory", "two words", "ngram,none"])
def test_unknown_drafter_error_lists_the_known_names(directory: Path, wanted: str) -> None:
    with pytest.raises(IncompatibleDrafterError, match="auto, none, ngram, suffix, prediction, draft_model"):
        make_drafter(wanted, directory)


@pytest.mark.parametrize("wanted", [["ngram", "none"], ("none", "none")])
def test_drafter_list_with_none_is_refused(directory: Path, wanted: list[str]) -> None:
    with pytest.raises(IncompatibleDrafterError, match="use 'none' alone"):
        make_drafter(wanted, directory)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["ngram", "suffix", "ngram"], "holds 'ngram' twice: name each drafter once"),
        (["suffix", "suffix"], "holds 'suffix' twice"),
        (["{target}", "{target}"], "holds '{target}' twice"),
        (["{target}", "{target}/../{name}"], "holds '{target}' and '{target}/../{name}', which are the same"),
    ],
)
def test_drafter_named_twice_is_refused(directory: Path, wanted: list[str], message: str) -> None:
    def placed(text: str) -> str:
        return text.format(target=directory, name=directory.name)

    with pytest.raises(IncompatibleDrafterError, match=re.escape(placed(message))):
        make_drafter([placed(one) for one in wanted], directory)


def test_auto_in_a_drafter_list_adds_no_duplicate(directory: Path, tmp_path: Path) -> None:
    for wanted in (["auto", "suffix"], ["suffix", "auto"]):
        assert isinstance(make_drafter(wanted, directory), SuffixDrafter)
    own = _with_embedded(directory, tmp_path)
    both = make_drafters(["auto", "suffix"], own)
    assert [drafter.name for drafter in both] == ["draft_model", "suffix"]
    assert [drafter.name for drafter in make_drafters(["auto", "ngram"], own)] == ["suffix", "draft_model", "ngram"]


def test_draft_model_drafter_without_an_embedded_model_is_refused(directory: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match="no embedded draft model"):
        make_drafter("draft_model", directory)


def test_unreadable_draft_model_is_a_checkpoint_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_drafter(str(tmp_path), directory)


def test_draft_model_with_other_token_ids_maps_ids_by_shared_pieces(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("w9", "v9"), encoding="utf-8")
    drafter = make_drafter(str(other), directory)
    assert isinstance(drafter, DraftModelDrafter)
    assert (
        "overlapping vocabularies: ids are mapped by the pieces that both have (92.8% of the target's pieces)" in drafter.traits.description
    )


def test_draft_model_that_cannot_spell_target_text_is_refused(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"] = {(f"q{index}" if index > 3 else piece): index for piece, index in content["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(IncompatibleDrafterError, match=r"disjoint .*its pieces spell 4\.1% of the target's, and at least 50%"):
        make_drafter(str(other), directory)


def test_banner_names_a_draft_model_context_shorter_than_the_target(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=64)
    drafter = make_drafter(str(other), directory)
    assert drafter is not None
    assert "drafts from the last tokens of texts longer than its context of 64" in drafter.traits.description


def test_draft_model_with_fewer_tokens_is_accepted(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=60)
    write_tokenizer(other, 60)
    assert isinstance(make_drafter(str(other), directory), DraftModelDrafter)


def test_drafter_name_is_resolved_and_its_file_opened_once(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    of_files, resolved = HeadFiles.open, drafters.resolve_model
    monkeypatch.setattr(HeadFiles, "open", lambda path: opened.append(path) or of_files(path))
    monkeypatch.setattr(drafters, "resolve_model", lambda name, **options: opened.append(Path(name)) or resolved(name, **options))
    heads = write_heads(tmp_path, "rows", random_heads())
    assert isinstance(make_drafter(str(heads), directory), MedusaDrafter)
    assert opened == [heads, heads]


def test_head_for_another_target_is_refused_before_loading_the_target(directory: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, EAGLE3, eagle3_tensors())
    with pytest.raises(IncompatibleDrafterError, match="made for another model"):
        prepare_drafters(directory, EngineConfig(offline=True), SpeculationConfig(drafter=str(head)))
