"""What files of heads leave open is found out with the target's own text: heads that are right by one convention are opened by it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.eagle_checkpoints import DRAFT_IDS, EAGLE3, FIRST_TOKEN, eagle3_tensors, write_head, write_legible_target
from harness.loaded_targets import make_drafter
from harness.medusa_checkpoints import write_successor_target
from harness.mtp_checkpoints import add_module
from harness.unconventional_heads import (
    LOOKS_BACK,
    from_first_boundary,
    less_first_boundary,
    module_with_signs,
    with_signed_norm,
    with_small_features,
    with_small_outputs,
    with_strange_norm,
    write_converted_hass,
    write_eagle1_with_a_stray_bias,
    write_looking_back_eagle1,
    write_reading_eagle3,
)
from paceline import LLM, SamplingParams
from paceline.drafters.eagle.config import EagleConfig, read_eagle_config
from paceline.drafters.eagle.head import open_eagle_head
from paceline.drafters.eagle.variants import candidates
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.pairs import calibration, opening
from paceline.drafters.pairs.cache import TrueRows
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.head import DraftedRows, PairHead
from paceline.drafters.pairs.target_text import TargetText
from paceline.errors import IncompatibleDrafterError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.runtimes.base import RowRange
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.profile_cache import FILE_NAME

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")

IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = {"speculators_model_type": "eagle3"}
Write = Callable[[Path], Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_legible_target(tmp_path_factory.mktemp("legible"), reads_mean=False)


@pytest.fixture(scope="module")
def looking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_legible_target(tmp_path_factory.mktemp("looking"), reads_mean=False, looks_back=LOOKS_BACK)


@pytest.fixture(autouse=True)
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known at the beginning of a test."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "facts"))
    draft_always(monkeypatch)
    return tmp_path / "facts"


def open_llm(target: Path, drafter: str, **options: Any) -> LLM:
    given = {"backend": "native", "threads": 1, "max_model_len": 256, "kv_cache_gb": 0.05, **options}
    return LLM(str(target), drafter=drafter, num_draft_tokens=4, **given)


def drafter_of(llm: LLM) -> PairDrafter:
    assert isinstance(llm.drafter, PairDrafter)
    return llm.drafter


def acceptance(llm: LLM) -> float:
    prompt = [FIRST_TOKEN, *np.random.default_rng(1).choice(DRAFT_IDS, 40).tolist()]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.speculation.drafted > 28
    return output.speculation.acceptance_rate


def default_of(head: Path, target: Path) -> EagleConfig:
    return read_eagle_config(HeadFiles.open(head), read_model_config(target))


def from_first_boundary_with_small_outputs(tensors: dict[str, Any]) -> None:
    from_first_boundary(tensors)
    with_small_outputs(tensors)


CONVENTIONS: dict[str, tuple[Write, dict[str, Any]]] = {
    "layers are counted from their outputs": (
        lambda path: write_reading_eagle3(path, from_first_boundary, **{IDS: [0, 2, 3]}),
        {"boundaries": (1, 3, 4)},
    ),
    "one was added already": (
        lambda path: write_reading_eagle3(path, less_first_boundary, **{IDS: [1, 2, 3], **SPECULATORS}),
        {"boundaries": (0, 1, 2)},
    ),
    "the stream begins with the normed feature": (
        lambda path: write_reading_eagle3(path, with_small_features, norm_before_residual=None),
        {"norm_before_residual": True},
    ),
    "the next feature is normed": (
        lambda path: write_reading_eagle3(path, with_small_outputs, norm_before_residual=False),
        {"normed_recurrence": True},
    ),
    "both": (
        lambda path: write_reading_eagle3(
            path,
            lambda tensors: (from_first_boundary(tensors), with_small_outputs(tensors))[0],
            norm_before_residual=None,
            **{IDS: [0, 2, 3]},
        ),
        {"boundaries": (1, 3, 4), "norm_before_residual": False, "normed_recurrence": True},
    ),
    "norm_output is about the recurrence": (
        lambda path: write_reading_eagle3(path, with_signed_norm, norm_output=False),
        {"has_final_norm": True},
    ),
    "a converted norm is the feature's": (
        lambda path: write_converted_hass(path, is_on_feature=True),
        {"norms_mixture": False, "norms_feature": True},
    ),
    "a bias that is not meant": (lambda path: write_eagle1_with_a_stray_bias(path, is_meant=False), {"uses_fc_bias": False}),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_convention_that_files_do_not_say_is_found_out(name: str, target: Path, tmp_path: Path) -> None:
    write, truth = CONVENTIONS[name]
    head = write(tmp_path / "head")
    default = default_of(head, target)
    assert {field: getattr(default, field) for field in truth} != truth
    llm = open_llm(target, str(head))
    assert drafter_of(llm).head.config == replace(default, **truth)
    assert drafter_of(llm).traits.notices == ()
    assert acceptance(llm) == 1.0


@pytest.mark.parametrize(("theta", "said", "found"), [(1e4, 1e6, 1e4), (1e6, 1e6, 1e6)])
def test_the_base_of_rotations_is_the_one_it_was_trained_with(
    theta: float, said: float, found: float, looking_target: Path, tmp_path: Path
) -> None:
    head = write_looking_back_eagle1(tmp_path / "head", theta=theta, rope_theta=said)
    llm = open_llm(looking_target, str(head))
    assert drafter_of(llm).head.config.layers.attention.rope.theta == found
    assert acceptance(llm) == 1.0


@pytest.mark.parametrize("is_normed", [False, True])
def test_an_mtp_module_hands_on_what_it_was_trained_to(is_normed: bool, tmp_path: Path) -> None:
    target, successor = write_successor_target(tmp_path, "qwen3")
    add_module(target, "extra_layer", module_with_signs(successor, is_normed=is_normed), num_layers=2)
    llm = open_llm(target, "mtp")
    assert drafter_of(llm).head.config.normed_recurrence == is_normed
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.speculation.acceptance_rate == 1.0


def test_what_is_right_as_it_is_written_stays(target: Path, tmp_path: Path) -> None:
    heads = [
        write_reading_eagle3(tmp_path / "whole"),
        write_reading_eagle3(tmp_path / "unsaid", norm_before_residual=None),  # both are right: the documented one
        write_eagle1_with_a_stray_bias(tmp_path / "bias", is_meant=True),
        write_reading_eagle3(tmp_path / "plain", with_strange_norm, norm_output=False),  # as SpecForge means it
        write_converted_hass(tmp_path / "hass", is_on_feature=False),
    ]
    for head in heads:
        default = default_of(head, target)
        assert len(candidates(HeadFiles.open(head), default, read_model_config(target))) > 1
        llm = open_llm(target, str(head))
        assert drafter_of(llm).head.config == default
        assert acceptance(llm) == 1.0


def random_head(directory: Path, **config: Any) -> Path:
    values = {**EAGLE3, "hidden_size": 64, "head_dim": 16, IDS: [2, 3, 4], "rope_theta": 1e6, **config}
    return write_head(directory, values, eagle3_tensors(values, target_hidden=64))


def test_a_head_that_knows_nothing_gets_the_default_and_is_said_not_to_match(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=6)
    head = random_head(tmp_path / "head")
    default = default_of(head, target)
    admitted = candidates(HeadFiles.open(head), default, read_model_config(target))
    assert len(admitted) == len(set(admitted)) == 3 * 2 * 2 * 2
    for _ in range(2):  # found out, and known
        llm = open_llm(target, str(head))
        assert drafter_of(llm).head.config == default
        (notice,) = [notice for notice in llm.notices if "was made for another" in notice]
        assert "eagle3 head" in notice
        assert "\n" not in notice
    one_of_several = open_llm(target, ["ngram", str(head)])  # type: ignore[arg-type]
    assert notice in one_of_several.notices


def test_a_head_whose_layers_see_a_window_is_tried_like_any_other(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=6)
    llm = open_llm(target, str(random_head(tmp_path / "head", sliding_window=8, layer_types=["sliding_attention"])))
    assert any("was made for another" in notice for notice in llm.notices)
    assert drafter_of(llm).head.config.layers.sliding_window == 8


def test_a_head_of_another_model_is_said_not_to_match(target: Path, tmp_path: Path) -> None:
    def speaks_another_way(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = np.random.default_rng(9).normal(0.0, 1.0, tensors["lm_head.weight"].shape).astype(np.float32)

    llm = open_llm(target, str(write_reading_eagle3(tmp_path / "other", speaks_another_way)))
    assert any("was made for another" in notice for notice in llm.notices)


def test_an_answer_is_kept_for_these_files_only(target: Path, tmp_path: Path, facts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time only the boundaries that the head reads are collected, and no text is drawn."""
    head = write_reading_eagle3(tmp_path / "head", from_first_boundary, **{IDS: [0, 2, 3]})
    texts: list[object] = []
    draw = opening.draw_text
    monkeypatch.setattr(opening, "draw_text", lambda *given, **named: (texts.append(given), draw(*given, **named))[1])
    first, second = open_llm(target, str(head)), open_llm(target, str(head))
    assert len(texts) == 1
    assert drafter_of(first).needs.layers == (0, 1, 2, 3, 4)
    assert drafter_of(second).needs.layers == (1, 3, 4)
    assert drafter_of(first).head.config == drafter_of(second).head.config
    assert acceptance(second) == 1.0
    prompts = [[FIRST_TOKEN, 7, 10], [FIRST_TOKEN, *DRAFT_IDS]]
    sampled = SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True)
    answers = [[output.token_ids for output in llm.generate(prompts, sampled)] for llm in (first, second, open_llm(target, "none"))]
    assert answers[0] == answers[1] == answers[2]
    write_reading_eagle3(head, with_small_features, **{IDS: [0, 2, 3]})
    open_llm(target, str(head))
    assert len(texts) == 2
    for broken in ('{"choice": 99}', "nothing", '{"choice": -1, "agreement": 1}'):
        text = (facts / FILE_NAME).read_text(encoding="utf-8")
        (facts / FILE_NAME).write_text(_with_every_calibration(text, broken), encoding="utf-8")
        open_llm(target, str(head))
    assert len(texts) == 5


def _with_every_calibration(facts: str, value: str) -> str:
    try:
        replacement = json.loads(value)
    except ValueError:
        replacement = value
    return json.dumps({key: replacement if key.startswith("calibration") else fact for key, fact in json.loads(facts).items()})


def test_a_user_who_names_the_convention_is_believed(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "draw_text", lambda *given, **named: pytest.fail("nothing was to be tried"))
    head = write_reading_eagle3(tmp_path / "head", from_first_boundary, **{IDS: [0, 2, 3]})
    for boundaries in ((0, 1, 2), (1, 3, 4)):
        options = {"boundaries": boundaries, "rope_theta": 5e5, "normed_recurrence": True}
        drafter = make_drafter(str(head), target, drafter_options=options)
        assert isinstance(drafter, PairDrafter)
        config = drafter.head.config
        assert config.boundaries == drafter.needs.layers == boundaries
        assert (config.layers.attention.rope.theta, config.normed_recurrence) == (5e5, True)
    with pytest.raises(IncompatibleDrafterError, match="name as many different ones, from 0 to 4"):
        make_drafter(str(head), target, drafter_options={"boundaries": (1, 2)})


def test_nothing_is_tried_without_room_or_where_the_user_says_it(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = write_reading_eagle3(tmp_path / "head", norm_before_residual=None)
    llm = open_llm(target, str(head), max_model_len=10)
    assert drafter_of(llm).head.config == default_of(head, target)
    llm.engine.cache.check()
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks
    said = write_reading_eagle3(tmp_path / "said", **SPECULATORS, norm_output=False)  # too shallow a target for other boundaries
    assert drafter_of(open_llm(target, str(said))).head.config == default_of(said, target)
    monkeypatch.setattr(opening, "draw_text", lambda *given, **named: pytest.fail("nothing was to be tried"))
    named = drafter_of(open_llm(target, str(said), drafter_options={"rope_theta": 10000.0})).head.config
    assert named == default_of(said, target)


@pytest.mark.parametrize("matches", [True, False])
def test_a_head_that_leaves_nothing_open_is_tried_as_well(target: Path, tmp_path: Path, *, matches: bool) -> None:
    def speaks_another_way(tensors: dict[str, Any]) -> None:
        if not matches:
            tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 7, axis=0)

    said = write_reading_eagle3(tmp_path / "said", speaks_another_way, **SPECULATORS, norm_output=False)
    notices = drafter_of(open_llm(target, str(said))).traits.notices
    assert any("was made for another" in notice for notice in notices) is not matches


def test_guesses_of_both_steps_are_those_of_one_pair_after_another(tmp_path: Path) -> None:
    """Two texts, read at once; held to a cache of its own for every single guess."""
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=6)
    sizes = read_model_config(target)
    files = HeadFiles.open(random_head(tmp_path / "head"))
    head = open_eagle_head(files, sizes, open_weights(target, sizes), num_threads=1, max_model_len=64)
    random = np.random.default_rng(6)
    layers, length = (2, 3, 4), 9
    token_ids = random.integers(1, VOCAB_SIZE, (2, length)).astype(np.int32)
    collected = random.normal(0, 1, (2, len(layers), length, 64)).astype(np.float32)
    said = np.zeros((2, 2, length), np.int64)  # by one pair and by two, behind each token
    for index in range(2):
        inputs = collected[index].transpose(1, 0, 2).reshape(length, -1)
        for pair in range(length - 1):
            said[0, index, pair + 1], feature = _after(head, token_ids[index, 1 : pair + 2], inputs[: pair + 1])
            if pair < length - 2:
                rows = RowRange(0, 1, pair + 2, np.array([1], np.int32), None, 1)
                outputs = head.run_drafted([DraftedRows([int(token_ids[index, pair + 2])], feature[None], [pair + 1], rows, [0])])
                said[1, index, pair + 2] = _target_id(head, outputs.logits[0])
    assert not np.array_equal(said[0, :, 2:], said[1, :, 2:])
    texts = [TargetText(token_ids, argmaxes, np.zeros((2, length, 64), np.float32), collected) for argmaxes in said]
    assert calibration._Reading.of(head, texts[0], layers).hits.all()
    assert calibration._second_steps(head, texts[1], layers).all()
    assert not calibration._second_steps(head, texts[0], layers).all()


def _after(head: PairHead, token_ids: Any, inputs: Any) -> tuple[int, Any]:
    """What the last of some pairs says, and its feature."""
    head.runtime.allocate_kv(2)
    rows = RowRange(0, len(token_ids), 1, np.array([1], np.int32), None, 1)
    outputs = head.run_true([TrueRows(token_ids, inputs, rows)], wants_logits=True)
    return _target_id(head, outputs.logits[0]), outputs.features[-1].copy()


def _target_id(head: PairHead, logits: Any) -> int:
    assert head.target_ids is not None
    return int(head.target_ids[int(logits.argmax())])


@pytest.mark.parametrize(
    ("num_hits", "chosen"),
    [
        ([100, 100, 100], 0),
        ([100, 101, 103], 0),  # as chance would have it
        ([100, 160, 160], 1),
        ([100, 99, 160], 2),
        ([0, 9, 9], 0),  # not even a tenth: none of them is right
    ],
)
def test_a_convention_is_taken_where_it_clearly_agrees_best(
    num_hits: list[int], chosen: int, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = default_of(write_reading_eagle3(tmp_path / "head"), target)
    admitted = [replace(default, boundaries=(first, 2, 4)) for first in range(3)]
    random = np.random.default_rng(8)

    def reading(config: Any, *_: object) -> calibration._Reading:
        hits = np.zeros(184, np.bool_)
        hits[random.permutation(184)[: num_hits[admitted.index(config)]]] = True
        return calibration._Reading(hits, np.zeros(0, np.float32))

    monkeypatch.setattr(calibration._Reading, "of", reading)
    text = TargetText(*(np.zeros(0) for _ in range(4)))  # type: ignore[arg-type]
    found = calibration.calibrate(admitted, lambda config: config, text, ())  # type: ignore[arg-type, return-value]
    assert admitted.index(found.config) == chosen
    assert found.is_match == (max(num_hits) > 18)
