"""From what a user asks for to a drafter, or an error that says why not."""

import json
import shutil
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint, write_tokenizer
from paceline.drafters import EMBEDDED, NAMES, TargetDescription, make_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.stack import StackDrafter
from paceline.drafters.suffix.drafter import SuffixDrafter
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=1)


def describe(directory: Path) -> TargetDescription:
    return TargetDescription(
        directory=directory, tokenizer=Tokenizer.open(directory), vocab_size=97, max_context=256, max_slots=320, device="cpu", offline=True
    )


@pytest.fixture
def target(directory: Path) -> TargetDescription:
    return describe(directory)


def test_names_become_drafters(target: TargetDescription) -> None:
    assert NAMES == ("auto", "none", "ngram", "suffix", "prediction", "draft_model", "medusa", "mtp")
    assert make_drafter("none", target) is None
    assert isinstance(make_drafter("ngram", target), NgramDrafter)
    assert isinstance(make_drafter(["ngram"], target), NgramDrafter)
    assert isinstance(make_drafter("suffix", target), SuffixDrafter)
    assert isinstance(make_drafter("prediction", target), PredictionDrafter)
    assert isinstance(make_drafter(str(target.directory), target), DraftModelDrafter)
    stack = make_drafter(("ngram", str(target.directory)), target)
    assert isinstance(stack, StackDrafter)
    assert stack.name == "ngram+draft_model"


def test_auto_is_the_targets_own_draft_model_or_ngram(directory: Path, tmp_path: Path) -> None:
    assert isinstance(make_drafter("auto", describe(directory)), NgramDrafter)
    own = Path(shutil.copytree(directory, tmp_path / "own"))
    shutil.copytree(directory, own / EMBEDDED)
    for name in ("auto", "draft_model"):
        assert isinstance(make_drafter(name, describe(own)), DraftModelDrafter)


def test_a_draft_model_holds_as_many_rows_as_its_target(target: TargetDescription) -> None:
    drafter = make_drafter(str(target.directory), target)
    assert isinstance(drafter, DraftModelDrafter)
    assert drafter.cache.max_slots >= target.max_slots
    assert drafter.cache_bytes_per_token * target.max_slots <= drafter.cache.storage.nbytes


@pytest.mark.parametrize("wanted", ["nothing", "/no/such/directory", "two words", "ngram,none"])
def test_an_unknown_name_is_refused_with_the_known_ones(target: TargetDescription, wanted: str) -> None:
    with pytest.raises(IncompatibleDrafterError, match="auto, none, ngram, suffix, prediction, draft_model"):
        make_drafter(wanted, target)


@pytest.mark.parametrize("wanted", [[], ["ngram", "none"], ("none", "none")])
def test_a_list_with_none_or_nothing_is_refused(target: TargetDescription, wanted: list[str]) -> None:
    with pytest.raises(IncompatibleDrafterError, match="use 'none' alone"):
        make_drafter(wanted, target)


def test_a_model_without_an_own_draft_model_says_so(target: TargetDescription) -> None:
    with pytest.raises(IncompatibleDrafterError, match="no embedded draft model"):
        make_drafter("draft_model", target)


def test_a_draft_model_that_cannot_be_read_is_a_checkpoint_error(target: TargetDescription, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_drafter(str(tmp_path), target)


def test_a_draft_model_with_other_ids_works_through_the_pieces_both_have(target: TargetDescription, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("w9", "v9"), encoding="utf-8")
    drafter = make_drafter(str(other), target)
    assert isinstance(drafter, DraftModelDrafter)
    assert "overlapping vocabularies: ids are mapped through the pieces both have (92.8% of the target's pieces)" in drafter.describe()


def test_a_draft_model_that_cannot_spell_the_targets_text_is_refused(target: TargetDescription, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"] = {(f"q{index}" if index > 3 else piece): index for piece, index in content["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(IncompatibleDrafterError, match=r"disjoint .*its pieces spell 4\.1% of the target's, and at least 50%"):
        make_drafter(str(other), target)


def test_the_banner_says_where_a_shorter_context_ends_the_drafts(target: TargetDescription, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=64)
    drafter = make_drafter(str(other), target)
    assert drafter is not None
    assert "no drafts behind its context of 64 tokens" in drafter.describe()


def test_a_draft_model_that_knows_fewer_tokens_is_good_enough(target: TargetDescription, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=60)
    write_tokenizer(other, 60)
    assert isinstance(make_drafter(str(other), target), DraftModelDrafter)
