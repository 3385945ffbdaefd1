"""Options of a head that its files leave open: the default is used, an option overrides it, and the doctor finds the better value."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.doctor_options import doctor_options
from harness.eagle_checkpoints import DRAFT_IDS, FIRST_TOKEN, write_legible_target, write_reading_eagle3
from harness.unconventional_heads import (
    LOOKS_BACK,
    from_first_boundary,
    less_first_boundary,
    with_signed_norm,
    with_small_features,
    with_small_outputs,
    with_strange_norm,
    write_looking_back_eagle1,
)
from paceline import LLM, SamplingParams
from paceline.drafters.eagle.config import EagleConfig, ambiguous_options, read_eagle_config
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.errors import IncompatibleDrafterError
from paceline.models.checkpoint import read_model_config
from paceline.proof.doctor import diagnose
from paceline.runtimes.native.library import kernels_path

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")

IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = {"speculators_model_type": "eagle3"}
LIMITS = {"backend": "native", "threads": 1, "max_model_len": 256, "kv_cache_gb": 0.05}
Write = Callable[[Path], Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_legible_target(tmp_path_factory.mktemp("legible"), reads_mean=False)


@pytest.fixture(autouse=True)
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


def open_llm(target: Path, head: Path, **options: object) -> LLM:
    return LLM(str(target), drafter=str(head), num_speculative_tokens=4, drafter_options=options, **LIMITS)  # type: ignore[arg-type]


def config_of(llm: LLM) -> EagleConfig:
    assert isinstance(llm.drafter, EagleStyleDrafter)
    assert isinstance(llm.drafter.head.config, EagleConfig)
    return llm.drafter.head.config


def acceptance(llm: LLM) -> float:
    prompt = [FIRST_TOKEN, *np.random.default_rng(1).choice(DRAFT_IDS, 40).tolist()]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.speculation.num_draft_tokens > 28
    return output.speculation.acceptance_rate


def default_of(head: Path, target: Path) -> EagleConfig:
    return read_eagle_config(HeadFiles.open(head), read_model_config(target))


def notes_of(target: Path, head: Path, **options: object) -> list[str]:
    """A probe's result for the head's options."""
    arguments = {"model": str(target), "drafter": str(head), "drafter_options": options, **LIMITS}
    question = doctor_options(model=str(target), drafters=(str(head),), drafter_options=options, probe_arguments=arguments)
    found = diagnose(question)
    assert found.problems == []
    return [note for note in found.notes if "drafts better" in note]


CASES: dict[str, tuple[Write, dict[str, Any]]] = {
    "layer outputs are numbered": (
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
    "two options at once": (
        lambda path: write_reading_eagle3(
            path,
            lambda tensors: (from_first_boundary(tensors), with_small_outputs(tensors))[0],
            norm_before_residual=False,
            **{IDS: [0, 2, 3]},
        ),
        {"boundaries": (1, 3, 4), "normed_recurrence": True},
    ),
    "norm_output is about the recurrence": (
        lambda path: write_reading_eagle3(path, with_signed_norm, norm_output=False),
        {"final_norm": True},
    ),
}
FIELDS = {"final_norm": "has_final_norm", "boundaries": "layer_boundaries"}


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("name", CASES)
def test_eagle_drafter_option_overrides_the_file_and_the_probe_suggests_it(name: str, target: Path, tmp_path: Path) -> None:
    write, options = CASES[name]
    head = write(tmp_path / "head")
    default = default_of(head, target)
    assert config_of(open_llm(target, head)) == default
    llm = open_llm(target, head, **options)
    assert config_of(llm) == replace(default, **{FIELDS.get(option, option): value for option, value in options.items()})
    assert acceptance(llm) == 1.0
    (note,) = notes_of(target, head)
    found = dict(option.split("=") for option in re.findall(r"--drafter-options (\S+)", note))
    assert acceptance(open_llm(target, head, **found)) == 1.0
    assert notes_of(target, head, **options) == [], "nothing is better than these"


@pytest.mark.parametrize(("theta", "written"), [(1e4, 1e6), (1e6, 1e6)])
def test_rope_theta_of_an_eagle_head_is_its_config_or_the_option(
    theta: float, written: float, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    target = write_legible_target(tmp_path_factory.mktemp("looking"), reads_mean=False, looks_back=LOOKS_BACK)
    head = write_looking_back_eagle1(tmp_path / "head", theta=theta, rope_theta=written)
    assert config_of(open_llm(target, head)).layers.attention.rope.theta == written
    assert acceptance(open_llm(target, head, rope_theta=theta)) == 1.0


def test_correctly_configured_eagle_heads_get_no_option_suggestion(target: Path, tmp_path: Path) -> None:
    heads = [
        write_reading_eagle3(tmp_path / "whole"),
        write_reading_eagle3(tmp_path / "unset", norm_before_residual=None),
        write_reading_eagle3(tmp_path / "plain", with_strange_norm, norm_output=False),  # as SpecForge means it
    ]
    for head in heads:
        assert ambiguous_options(HeadFiles.open(head), default_of(head, target), read_model_config(target))
        assert acceptance(open_llm(target, head)) == 1.0
        assert notes_of(target, head) == []


def test_eagle_head_reading_layers_the_target_lacks_is_refused(target: Path, tmp_path: Path) -> None:
    head = write_reading_eagle3(tmp_path / "head", **{IDS: [7, 8, 9]})
    with pytest.raises(IncompatibleDrafterError, match=r"--drafter-options boundaries=… names 3 different ones from 0 to 4"):
        open_llm(target, head)
    with pytest.raises(IncompatibleDrafterError, match=r"option 'boundaries' gives \[1, 2\]"):
        open_llm(target, head, boundaries=(1, 2))
