"""A drafter's state of a request ends with the request, even if its release fails."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.always_drafts import draft_always
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.engine_targets import assert_clean, make, run_to_end
from harness.loaded_targets import make_drafter
from paceline import LLM, SamplingParams
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import DraftBudget, Drafter, RequestState
from paceline.speculation.request import Request

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
TEXT, OTHER = [1, 2, 3, 4] * 3, [9, 8, 7, 6] * 3
MAKE: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "prediction": PredictionDrafter,
}


class Refusing(NgramDrafter):
    """Never releases a request."""

    def release(self, request: Request) -> None:
        raise RuntimeError("no")


def make_request(token_ids: list[int]) -> Request:
    processor = LogitsProcessor(GREEDY, VOCAB_SIZE, token_ids)
    return Request(
        list(token_ids), 1, GREEDY, processor, CachedSequence(), seed=0, sample_index=0, max_len=1000, prediction_token_ids=token_ids[1:]
    )


def draft_ids(drafter: Drafter, request: Request) -> list[int]:
    (tree,) = drafter.propose([request], [DraftBudget(5, 4)])
    return [] if tree is None else list(tree.token_ids)


class Remembered:
    """Something whose end shows."""


def test_request_state_is_freed_with_the_request() -> None:
    state = RequestState[Remembered]()
    request, kept = make_request(TEXT), Remembered()
    state[request] = kept
    assert state.get(request) is state[request] is kept
    assert RequestState[Remembered]().get(request) is None, "another drafter's"
    end = weakref.ref(kept)
    del request, kept
    gc.collect()
    assert end() is None
    request = make_request(TEXT)
    state[request] = Remembered()
    assert state.pop(request) is not None
    assert state.pop(request) is state.get(request) is None


@pytest.mark.parametrize("name", MAKE)
def test_request_with_a_reused_object_id_gets_new_drafter_state(name: str) -> None:
    drafter, places = MAKE[name](), set[int]()
    for _ in range(20):
        request = make_request(TEXT)
        assert draft_ids(drafter, request) == draft_ids(MAKE[name](), make_request(TEXT))
        places.add(id(request))
        del request
        request = make_request(OTHER)
        assert draft_ids(drafter, request) == draft_ids(MAKE[name](), make_request(OTHER))
        places.add(id(request))
        del request
    assert len(places) < 40, "places are taken again"


def test_drafter_that_raises_in_release_does_not_block_other_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    draft = make_drafter(str(directory), directory)
    assert isinstance(draft, DraftModelDrafter)
    options = {"threads": 2, "device": "cpu", "kv_cache_gb": 0.02}
    prompts = [[5, 6, 7], [9, 8] * 30]
    plain = [output.token_ids for output in LLM(str(directory), drafter="none", **options).generate(prompts, GREEDY)]
    llm = LLM(str(directory), drafter=[Refusing(), draft], **options)
    for _ in range(3):
        requests = [make(llm, prompt, GREEDY) for prompt in prompts]
        for request in requests:
            llm.engine.add_request(request)
        run_to_end(llm)
        assert [list(request.output_token_ids) for request in requests] == plain
        assert [request.drafter_states for request in requests] == [{}, {}]
        assert any(request.stats.num_draft_tokens for request in requests)
        assert draft.cache.pool.num_free == draft.cache.pool.num_blocks
        draft.cache.check_consistency()
        assert_clean(llm)
    assert llm.stats().drafter_failures == 6
