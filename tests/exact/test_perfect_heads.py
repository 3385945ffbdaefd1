"""Heads that must be right are right every time, however they are stored and whatever happens to rows; the same ones misread are not."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from harness.eagle_checkpoints import DRAFT_IDS, FIRST_TOKEN
from harness.engine_jobs import Solo
from harness.engine_traffic import check_clean
from harness.exact_targets import skip_without_kernels
from harness.head_targets import PerfectHeads
from paceline import LLM, SamplingParams
from paceline.outputs import RequestOutput
from paceline.speculation import speculator as speculator_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.tree import DraftTree

SoloOf = Callable[[str], Solo]
GREEDY = SamplingParams(max_tokens=45, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=3)
NUM_BLOCKS = 10  # of the cache: two or three of the texts below
# logits that are the target's but for rounding, so that sampled texts are known too
SAME_DISTRIBUTION = ("eagle reading", "eagle3", "peagle", "mtp")
CONFIDENT_HEADS = ("medusa tgi", "medusa vllm_shared")
"""Heads so confident that only the most probable candidate is ever drafted."""

TREES_IN_A_NORMAL_RUN = ("eagle listening safetensors", "peagle plain", "medusa rows", "mtp mtp")


@dataclass(slots=True)
class Walks:
    """What became of the drafts of every step that had any: tokens kept of those the head held likeliest, and how many these were.

    Attributes:
        stopped: steps that a stop token ended, left out of the others.
    """

    kept: int = 0
    possible: int = 0
    branches: int = 0
    stopped: int = 0

    def clear(self) -> None:
        self.kept = self.possible = self.branches = self.stopped = 0

    def assert_right(self) -> None:
        assert self.kept == self.possible > 0, self


def likeliest_path(tree: DraftTree) -> list[int]:
    """The chain of the most probable tokens of a head; a tree of paths that are likely as a whole may go deeper elsewhere."""
    path = [0]
    while children := tree.children(path[-1]):
        path.append(children[0])
    return path[1:]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    """Filled by every walk from here on."""
    seen, real = Walks(), speculator_module.verify

    def verify(tree, logits, request, walked=None):  # type: ignore[no-untyped-def]
        result = real(tree, logits, request, walked)
        if result.token_ids[-1] in request.end_token_ids:
            seen.stopped += tree.num_draft_tokens > len(result.accepted_nodes)
        elif tree.num_draft_tokens > 0:
            path = likeliest_path(tree)
            seen.kept += len({*path} & {*result.accepted_nodes})
            seen.possible += len(path)
            seen.branches += tree.num_draft_tokens - tree.tree_depth
        return result

    monkeypatch.setattr(speculator_module, "verify", verify)
    return seen


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> PerfectHeads:
    skip_without_kernels()
    return PerfectHeads(tmp_path_factory.mktemp("perfect"))


@pytest.fixture(scope="module")
def solo_of(heads: PerfectHeads) -> SoloOf:
    """The target of heads by their name, decoded plainly."""
    made = cache(lambda target: Solo(heads.targets[target], "f32"))
    return lambda name: made(heads.target_of(name))


def late_tokens(solo: Solo, text: list[int]) -> list[int]:
    """Tokens the answer has for the first time, late enough for a block with words of its own to be full before them."""
    answer = solo.answer(text, GREEDY)[0].token_ids
    return [answer[at] for at in range(20, 38) if answer[at] not in answer[:at]]


class Scene:
    """An engine with a head, whose every answer is compared with the target's own."""

    def __init__(self, heads: PerfectHeads, name: str, solo: Solo, *, depth: int, width: int) -> None:
        pair = heads.pair(name)
        self._solo, other = solo, copy(solo)
        other.directory = pair.target
        self.llm: LLM = other.open(pair.drafter, num_blocks=NUM_BLOCKS, num_speculative_tokens=depth, tree_width=width)  # type: ignore[arg-type]
        self.llm.engine.speculator.policy = FixedDraftLength(depth, max_rows=32 if width > 1 else None)
        self.num_compared = 0

    def limit(self, **limits: int) -> None:
        scheduler = self.llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, **limits)

    def ask(self, texts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        outputs = self.llm.generate(texts, params)
        expected = [answer.token_ids for text in texts for answer in self._solo.answer(text, params)]
        assert [output.token_ids for output in outputs] == expected
        self.num_compared += sum(map(len, expected))
        self.llm.engine.cache.check_consistency()
        return outputs


def prompts(*lengths: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[FIRST_TOKEN, *random.choice(DRAFT_IDS, length - 1).tolist()] for length in lengths]


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("name", PerfectHeads.NAMES)
def test_perfect_head_is_always_accepted(
    name: str,
    width: int,
    heads: PerfectHeads,
    solo_of: SoloOf,
    walks: Walks,
    large_counts: bool,
    seed: int,
    tally: "Counter[str]",
) -> None:
    """Over a prompt in chunks, cached prefixes, an answer that is stopped in the middle of a draft, and a batch that is preempted."""
    if width > 1 and not large_counts and name not in TREES_IN_A_NORMAL_RUN:
        pytest.skip("left to make test-long")
    solo = solo_of(name)
    scene = Scene(heads, name, solo, depth=3 if "medusa" in name else 4, width=width)
    for round_ in range(4 if large_counts else 1):
        play(scene, solo, walks, seed=seed + round_)
        if name.startswith(SAME_DISTRIBUTION):
            walks.clear()
            scene.ask(prompts(40, 65, seed=seed + 50 + round_), replace(SAMPLED, n=2))
            assert walks.kept >= 0.97 * walks.possible > 60, walks  # a draw may fall between two roundings of a distribution
    assert width == 1 or (walks.branches > 0) is (name not in CONFIDENT_HEADS)
    check_clean(scene.llm)
    tally["token ids drafted by heads that must be right"] += scene.num_compared


def play(scene: Scene, solo: Solo, walks: Walks, *, seed: int) -> None:
    random = np.random.default_rng(seed)
    llm, stats = scene.llm, scene.llm.stats
    (first,) = prompts(75, seed=seed)
    scene.limit(prefill_chunk_size=20, max_num_batched_tokens=48)
    before = llm.runtime.num_passes
    (output,) = scene.ask([first])
    assert llm.runtime.num_passes - before == output.speculation.steps + 3, "the prompt came in chunks"
    walks.assert_right()

    grown = [*first, *output.token_ids]
    for text in ([*first[:64], *random.choice(DRAFT_IDS, 7).tolist()], [*grown[:100], *random.choice(DRAFT_IDS, 3).tolist()]):
        (output,) = scene.ask([text])
        assert output.usage.num_cached_tokens == len(text) // 32 * 32, "from here on the prefix is adopted"
    walks.assert_right()

    num_preemptions = stats().num_preemptions
    scene.ask(prompts(31, 33, 50, 32, seed=seed + 7), replace(GREEDY, max_tokens=90))  # in chunks, together with requests that draft
    assert stats().num_preemptions > num_preemptions
    walks.assert_right()

    scene.limit(prefill_chunk_size=256, max_num_batched_tokens=512)
    walks.stopped = 0
    for number in range(200):  # few answers have a new token so late
        (text,) = prompts(80, seed=seed + 1000 + number)
        for stop in late_tokens(solo, text)[number % 4 : 1 + number % 4]:
            (output,) = scene.ask([text], replace(GREEDY, stop_token_ids=(stop,)))
            assert output.finish_reason == "stop"
            longer = [*text, *output.token_ids, *random.choice(DRAFT_IDS, 2).tolist()]
            (output,) = scene.ask([longer])
            assert output.usage.num_cached_tokens == 96, "of the stopped answer's rows some are used"
        if walks.stopped:
            break
    assert walks.stopped > 0, "a stop cut a draft"
    walks.assert_right()


@pytest.mark.parametrize("name", PerfectHeads.WRONG)
def test_drafts_of_a_misread_head_are_mostly_rejected(
    name: str, heads: PerfectHeads, solo_of: SoloOf, walks: Walks, tally: "Counter[str]"
) -> None:
    """Halves swapped, offsets of ids taken for ids, or every head one token further than its index."""
    scene = Scene(heads, name, solo_of(name), depth=3, width=1)
    scene.ask(prompts(31, 40, 70, 64, seed=9))
    assert walks.possible > 250
    assert walks.kept < 0.2 * walks.possible
    check_clean(scene.llm)
    tally["token ids drafted by heads that are misread"] += scene.num_compared
