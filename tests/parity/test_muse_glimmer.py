"""Muse Glimmer with its assistant: it drafts what transformers drafts with it, and changes no token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import MUSE_GLIMMER, VOCAB_SIZE, auto_causal_lm, write_checkpoint
from paceline import LLM, SamplingParams
from paceline.drafters.block.drafter import BlockDrafter
from paceline.runtimes.native.library import kernels_path
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")

BLOCK_SIZE, MASK_ID, NUM_TOKENS = 6, 3, 40
PROMPT = np.random.default_rng(3).integers(4, VOCAB_SIZE, 20).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "muse_glimmer_text", **MUSE_GLIMMER)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random assistant of that target, saved by transformers."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, sliding_window=16, block_size=BLOCK_SIZE, mask_token_id=MASK_ID, target_layer_ids=[0, 1, 3],
        bos_token_id=0, eos_token_id=0, pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = MuseGlimmerAssistantModel(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            else:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            assert "norm" in name or parameter.dim() > 1
    directory = tmp_path_factory.mktemp("assistant")
    model.save_pretrained(directory)
    return directory


def transformers_drafts(target: Path, assistant: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], dict[int, list[int]]]:
    """The greedy text of assisted decoding in transformers, and the draft after each number of tokens."""
    from transformers import AutoModel
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    drafts: dict[int, list[int]] = {}
    real = DFlashTokenCandidateGenerator.get_candidates

    def recording(self: Any, input_ids: Any, *args: Any, **options: Any) -> Any:
        ids, logits = real(self, input_ids, *args, **options)
        if logits is not None:
            drafts[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recording)
    model, drafter = auto_causal_lm().from_pretrained(target).eval(), AutoModel.from_pretrained(assistant).eval()
    ids = torch.tensor([PROMPT])
    options = {"speculation_type": "dflash", "max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, assistant_model=drafter, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(PROMPT) :].tolist(), drafts


class Recording:
    """Records the drafts of a block drafter by the number of tokens before them."""

    def __init__(self, drafter: BlockDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: dict[int, list[int]] = {}
        self._propose = drafter.propose
        monkeypatch.setattr(drafter, "propose", self.propose)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees = self._propose(requests, budgets)
        for request, tree in zip(requests, trees, strict=True):
            if tree is not None:
                self.drafts[len(request.token_ids)] = [int(token) for token in tree.token_ids[1:]]  # without the root
        return trees


def open_with_assistant(target: Path, assistant: Path) -> LLM:
    llm = LLM(str(target), drafter=str(assistant), dtype="f32", threads=1, num_speculative_tokens=BLOCK_SIZE - 1, draft_quantization="none")
    llm.engine.speculator.policy = FixedDraftLength(BLOCK_SIZE - 1)
    return llm


def test_assistant_drafts_equal_those_of_transformers(target: Path, assistant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a block are embedding rows without the target's embedding norm."""
    text, expected = transformers_drafts(target, assistant, monkeypatch)
    with open_with_assistant(target, assistant) as llm:
        assert isinstance(llm.drafter, BlockDrafter)
        recording = Recording(llm.drafter, monkeypatch)
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    assert output.token_ids == text
    # before the last tokens paceline drafts shorter blocks, whose rows see fewer others
    whole = {place: draft for place, draft in recording.drafts.items() if len(draft) == BLOCK_SIZE - 1 and place in expected}
    assert len(whole) > NUM_TOKENS / 2
    assert {place: expected[place] for place in whole} == whole


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)], ids=["greedy", "sampled"])
def test_drafting_with_the_assistant_changes_no_token(target: Path, assistant: Path, sampling: SamplingParams) -> None:
    params = replace(sampling, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(target), drafter="none", dtype="f32", threads=1) as llm:
        (plain,) = llm.generate([PROMPT], params)
    with open_with_assistant(target, assistant) as llm:
        (output,) = llm.generate([PROMPT], params)
        assert llm.stats().speculation.num_draft_tokens > NUM_TOKENS
        assert llm.stats().drafter_failures == 0
    assert output.token_ids == plain.token_ids
