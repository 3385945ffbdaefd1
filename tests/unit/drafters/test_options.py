"""Options of heads: read from Python and the command line, refused where they have no effect."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import write_checkpoint
from harness.eagle_checkpoints import write_legible_target, write_reading_eagle3
from harness.medusa_checkpoints import perfect_heads, write_heads, write_successor_target
from paceline import LLM, ConfigError, IncompatibleDrafterError, SamplingParams
from paceline.drafters.medusa.drafter import MedusaDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.options import MEDUSA_TREES, OPTIONS, HeadOptions
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.engine.loader import parse_settings

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, HeadOptions()),
        ({"tree": "accuracy"}, HeadOptions(tree="accuracy")),
        ({"boundaries": "2, 8,13"}, HeadOptions(boundaries=(2, 8, 13))),
        ({"boundaries": [2, 8, 13]}, HeadOptions(boundaries=(2, 8, 13))),
        ({"draft_vocab_size": "32768"}, HeadOptions(draft_vocab_size=32768)),
        ({"draft_vocab_size": 512, "draft_vocab_corpus": "a.txt"}, HeadOptions(draft_vocab_size=512, draft_vocab_corpus=Path("a.txt"))),
        ({"draft_vocab_size": 256, "normed_recurrence": True}, HeadOptions(draft_vocab_size=256, normed_recurrence=True)),
        ({"norm_before_residual": "true"}, HeadOptions(norm_before_residual=True)),
        (
            {"tree": "zephyr_stage2", "normed_recurrence": False, "rope_theta": "5e5"},
            HeadOptions(tree="zephyr_stage2", normed_recurrence=False, rope_theta=5e5),
        ),
    ],
)
def test_head_options_are_parsed_from_values_or_strings(given: Mapping[str, object], expected: HeadOptions) -> None:
    options = HeadOptions.parse(given)
    assert options == expected


def test_drafter_options_list_every_head_options_field() -> None:
    assert list(OPTIONS) == list(HeadOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tree": "oak"}, f"tree is 'oak': use one of {', '.join(MEDUSA_TREES)}"),
        ({"tree": 3}, "tree is 3"),
        ({"boundaries": "2,x"}, "boundaries is '2,x': use the target's layer boundaries"),
        ({"boundaries": (2.5, 3)}, "boundaries is"),
        ({"boundaries": ()}, "boundaries is"),
        ({"boundaries": 7}, "boundaries is 7"),
        ({"norm_before_residual": "yes"}, "norm_before_residual is 'yes': use true or false"),
        ({"normed_recurrence": 1}, "normed_recurrence is 1"),
        ({"rope_theta": "-1"}, "rope_theta is '-1'"),
        ({"rope_theta": "nan"}, "rope_theta is 'nan'"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"draft_vocab_size": 255}, "draft_vocab_size is 255: use a number of ids from 256 to the size of the target's vocabulary"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
        ({"draft_vocab_size": 300.0}, "draft_vocab_size is 300.0"),
        ({"draft_vocab_size": True}, "draft_vocab_size is True"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"draft_vocab_corpus": 3}, "draft_vocab_corpus is 3: use a text file"),
        ({"draft_vocab_corpus": " "}, "draft_vocab_corpus is ' '"),
        ({"branches": 2}, "'branches' is unknown; there are tree \\(medusa\\), boundaries \\(eagle3 and peagle\\)"),
    ],
)
def test_invalid_drafter_option_error_names_the_allowed_values(given: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeadOptions.parse(given)


@pytest.mark.parametrize(("asked", "expected"), [(256, 256), (257, 272), (592, 592), (593, 600), (600, 600)])
def test_draft_vocab_size_is_rounded_up_within_the_vocabulary(asked: int, expected: int) -> None:
    assert HeadOptions(draft_vocab_size=asked).num_draft_ids(600) == expected
    assert HeadOptions().num_draft_ids(600) is None
    assert HeadOptions(draft_vocab_corpus=Path("a.txt")).num_draft_ids(600) == 600
    assert HeadOptions(draft_vocab_corpus=Path("a.txt")).num_draft_ids(248320) == 16384
    with pytest.raises(ConfigError, match="draft_vocab_size is 601 and the target has 600 ids: use at most 600, or leave it out"):
        HeadOptions(draft_vocab_size=601).num_draft_ids(600)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_legible_target(tmp_path_factory.mktemp("legible"), reads_mean=False)


def open_llm(target: Path, drafter: Any, **options: Any) -> LLM:
    return LLM(str(target), drafter=drafter, backend="native", threads=1, max_model_len=128, kv_cache_gb=0.05, **options)


@pytest.mark.parametrize("drafter", ["none", "ngram", ("ngram", "suffix")])
def test_unused_drafter_option_is_refused(target: Path, drafter: str | tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'boundaries' is for eagle3 and peagle heads, and the drafter is (none|ngram)"):
        open_llm(target, drafter, drafter_options={"boundaries": (1, 2, 3)})


def test_drafter_options_with_a_drafter_object_are_refused(target: Path) -> None:
    options = {"drafter": NgramDrafter(), "drafter_options": {"tree": "accuracy"}}
    with pytest.raises(ConfigError, match="have no effect on a Drafter object"):
        open_llm(target, **options)
    with pytest.raises(ConfigError, match="have no effect on a Drafter object"):
        parse_settings(str(target), options)


def test_medusa_tree_option_selects_the_tree(tmp_path: Path) -> None:
    target, successor = write_successor_target(tmp_path / "target", sharpness=3.0)
    heads = str(write_heads(tmp_path / "heads", "rows", perfect_heads(successor, 4, sharpness=3.0)))
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)
    said: list[list[int]] = []
    for tree, shown in (("accuracy", "trees by accuracy"), ("zephyr_stage2", "tree zephyr_stage2"), (None, "trees by probability")):
        given = {} if tree is None else {"drafter_options": {"tree": tree}}
        llm = open_llm(target, ("ngram", heads), num_speculative_tokens=4, tree_width=4, **given)
        assert shown in llm.banner
        (medusa,) = [one for one in llm.engine.speculator.drafters if isinstance(one, MedusaDrafter)]
        assert medusa.name == "medusa"
        said.append(llm.generate([prompt], params)[0].token_ids)
    assert said[0] == said[1] == said[2] == open_llm(target, "none").generate([prompt], params)[0].token_ids


def test_boundaries_option_overrides_the_eagle3_config(target: Path, tmp_path: Path) -> None:
    head = str(write_reading_eagle3(tmp_path / "head", **{IDS: [7, 8, 9]}))  # the target has no such boundaries
    with pytest.raises(IncompatibleDrafterError, match="--drafter-options boundaries="):
        open_llm(target, head)
    for boundaries in ((0, 2, 3), "1,2,4"):
        llm = open_llm(target, ("ngram", head), drafter_options={"boundaries": boundaries})
        (drafter,) = [one for one in llm.engine.speculator.drafters if isinstance(one, EagleStyleDrafter)]
        assert drafter.head.config.layer_boundaries == drafter.needs.layers == HeadOptions.parse({"boundaries": boundaries}).boundaries
        assert "speculation: on" in llm.banner
    with pytest.raises(IncompatibleDrafterError, match=r"option 'boundaries' gives \[1, 2\] for its 4 layers"):
        open_llm(target, head, drafter_options={"boundaries": (1, 2)})


def test_drafter_options_with_a_draft_model_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="'tree' is for medusa heads, and the drafter is draft_model"):
        open_llm(directory, str(directory), drafter_options={"tree": "accuracy"})
