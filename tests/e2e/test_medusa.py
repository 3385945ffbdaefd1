"""The Medusa drafter with a target: its kinds of trees, and targets with heads inside."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.checkpoints import write_checkpoint
from harness.head_engines import GREEDY, PROMPTS, SAMPLED, follow, ids_of, open_llm
from harness.loaded_targets import load_target
from harness.medusa_checkpoints import perfect_heads, random_heads, write_heads, write_successor_target
from paceline.config import SpeculationConfig
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.drafter import open_medusa

pytestmark = pytest.mark.usefixtures("always_drafts")


@pytest.fixture(scope="module")
def successor_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.int64]]:
    return write_successor_target(tmp_path_factory.mktemp("successor"), sharpness=3.0)


@pytest.mark.parametrize("tree", ["probability", "accuracy", "mc_sim_7b_63"])
def test_medusa_tree_of_each_kind_accepts_the_right_path(
    successor_target: tuple[Path, NDArray[np.int64]], tmp_path: Path, tree: str
) -> None:
    target, successor = successor_target
    files = HeadFiles.open(write_heads(tmp_path, "rows", perfect_heads(successor, 4)))
    drafter = open_medusa(files, load_target(target, SpeculationConfig(drafter_options={"tree": tree})))
    llm = open_llm(target, drafter, num_speculative_tokens=4, tree_width=4)
    for params in (GREEDY, SAMPLED):
        for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
            assert output.token_ids == follow(successor.tolist(), prompt[-1])
            assert output.speculation.steps == 1 + (8 if tree != "mc_sim_7b_63" else 10)  # its fourth level begins after 40 nodes
            assert output.speculation.num_draft_tokens > 2 * output.speculation.num_accepted_tokens  # it was a tree


def test_model_file_with_medusa_heads_runs_without_them(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    before = open_llm(target, "none").generate(PROMPTS, GREEDY)
    write_heads(target, "whole", random_heads())
    llm = open_llm(target, "none")
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == ids_of(before)
    assert any("contains a drafting head: use drafter='medusa'" in notice for notice in llm.notices)
