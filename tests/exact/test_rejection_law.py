"""Over seeds, text made of drafts kept by rejection has exactly the target's law: real logits, processors and noise, several steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.kv_cache.paged import CachedSequence
from paceline.sampling import residual as residual_module
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs, acceptance, draw_distinct
from paceline.speculation import rejection
from paceline.speculation.commit import commit
from paceline.speculation.rejection import verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree, Proposal
from scripted_target import LEAST_EXPECTED, ScriptedTarget, Tokens, joint_counts, law_p_value


@dataclass(frozen=True)
class Scene:
    """A target, a drafter that is right in part, and how much of what it drafts.

    Attributes:
        widths: draws at each node, by depth.
        share: of the target's logits in the drafter's.
        num_seeds: texts by default; one takes 0.6 ms, with penalties 1 ms.
    """

    params: SamplingParams
    widths: Sequence[int]
    num_seeds: int
    vocab_size: int = 32
    num_tokens: int = 3
    share: float = 0.6

    @property
    def target(self) -> ScriptedTarget:
        return TARGETS[self.vocab_size]

    def exact_law(self) -> dict[Tokens, float]:
        return self.target.exact_joint_law(self.params, self.num_tokens)

    def draft_row(self, context: Tokens) -> np.ndarray:
        own = OTHERS[self.vocab_size].logits(context)
        return (self.share * self.target.logits(context) + 0.5 * own).astype(np.float32)


PROMPT = (2, 0, 1)
TARGETS = {size: ScriptedTarget(size, PROMPT, spread=1.2) for size in (3, 32)}
OTHERS = {3: ScriptedTarget(3, PROMPT, spread=2.4, script=3), 32: ScriptedTarget(32, PROMPT, spread=1.2, script=1)}
FREE = SamplingParams(temperature=1.0)
TOP_K = SamplingParams(temperature=1.0, top_k=4)
PENALTIES = SamplingParams(temperature=0.9, top_p=0.6, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.4)
SCENES = {
    "chain": Scene(TOP_K, (1, 1), 4_000),
    "chain with penalties": Scene(PENALTIES, (1, 1), 2_000),
    "tree": Scene(TOP_K, (2, 2), 2_500),
    "tree with penalties": Scene(PENALTIES, (2, 2), 2_000),
    "wide, then a chain": Scene(TOP_K, (3, 1), 2_000),
    "long chain over few ids": Scene(FREE, (1, 1, 1, 1), 2_000, vocab_size=3, num_tokens=5, share=0.0),
    "tree over few ids": Scene(FREE, (2, 1, 1), 2_000, vocab_size=3, num_tokens=5, share=0.0),
}
LARGE_NUM_SEEDS = 100_000
NUM_BROKEN_SEEDS = {3: 2_000, 32: 800}  # by vocabulary: what is wrong with noise shows late


def _draft(scene: Scene, request: Request) -> DraftTree:
    """Draws at every node, as deep as the text has room for."""
    widths = scene.widths[: request.num_remaining_tokens - 1]
    paths: list[Tokens] = [()]
    parents: list[int] = []
    laws: dict[int, TokenProbs] = {}
    for node, path in enumerate(paths):  # `paths` grows while it is read
        if len(path) == len(widths):
            break
        laws[node] = TokenProbs.of(request.processor.process(scene.draft_row((*request.token_ids, *path)), path))
        key = request.seed, request.sample_index, len(request.token_ids)
        drawn = draw_distinct(laws[node], widths[len(path)], *key, len(path))
        paths.extend((*path, token) for token in drawn)
        parents.extend([node] * len(drawn))
    return DraftTree.grow(request.token_ids[-1], [path[-1] for path in paths[1:]], parents, "test", laws)


def _rows(scene: Scene, request: Request, tree: DraftTree) -> np.ndarray:
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return np.stack([scene.target.logits((*request.token_ids, *path)) for path in paths])


def _request(scene: Scene, seed: int) -> Request:
    processor = LogitsProcessor(scene.params, scene.vocab_size, PROMPT)
    max_len = len(PROMPT) + scene.num_tokens
    return Request(list(PROMPT), len(PROMPT), scene.params, processor, CachedSequence(), seed, 0, max_len=max_len)


def _speak(scene: Scene, seed: int) -> tuple[Tokens, int]:
    """One text, and how many of its tokens were drafts."""
    request, num_accepted = _request(scene, seed), 0
    while not request.is_finished:
        tree = _draft(scene, request)
        result = verify_rejection(tree, _rows(scene, request, tree), request)
        num_accepted += len(result.accepted_nodes)
        commit(request, result.token_ids, len(result.accepted_nodes), drafted=True)
    return tuple(request.output_token_ids), num_accepted


def _p_value(scene: Scene, seeds: Sequence[int]) -> float:
    texts = np.array([_speak(scene, one)[0] for one in seeds], np.int64)
    return law_p_value(joint_counts(texts), scene.exact_law())


@pytest.mark.parametrize("name", SCENES)
def test_drafts_kept_by_rejection_have_the_targets_joint_law(name, seed, large_counts, tally):
    scene = SCENES[name]
    num_seeds = LARGE_NUM_SEEDS if large_counts else scene.num_seeds
    assert sum(mass * num_seeds >= LEAST_EXPECTED for mass in scene.exact_law().values()) > 40
    tally["texts with drafts kept by rejection"] += num_seeds
    assert _p_value(scene, range(seed, seed + num_seeds)) > 0.001


@pytest.mark.parametrize("name", SCENES)
def test_drafts_are_both_accepted_and_refused_here(name, seed):
    accepted = [_speak(SCENES[name], one)[1] for one in range(seed, seed + 100)]
    assert len(set(accepted)) >= 3


def test_the_proposals_are_of_both_kinds():
    proposals = {name: _draft(scene, _request(scene, 1)).proposal for name, scene in SCENES.items()}
    assert proposals["chain"] is proposals["long chain over few ids"] is Proposal.SAMPLED
    assert proposals["tree"] is proposals["wide, then a chain"] is Proposal.WITHOUT_REPLACEMENT


Break = Callable[[pytest.MonkeyPatch], None]


def _change(name: str, replacement: object) -> Break:
    return lambda patch: patch.setattr(rejection, name, replacement)


def _by_position_alone(patch: pytest.MonkeyPatch) -> None:
    """Noise that the next step meets again at the same position."""

    def uniform(seed: int, sample_index: int, first_position: int, purpose: Purpose, depth: int, index: int = 0) -> float:
        return step_uniform(seed, sample_index, 0, purpose, first_position + depth, index)

    for module in (rejection, residual_module):
        patch.setattr(module, "step_uniform", uniform)


def _path_ignored(patch: pytest.MonkeyPatch) -> None:
    process = LogitsProcessor.process
    patch.setattr(LogitsProcessor, "process", lambda processor, logits, path=(): process(processor, logits))


def _of_one_purpose(*key: int) -> float:
    return step_uniform(*key[:3], Purpose.ACCEPT, *key[4:])


BROKEN: dict[str, tuple[str, Break]] = {
    "the target's law in place of the residual": ("chain", _change("residual", lambda target, weights: target)),
    "the target's law in place of a tree's residual": ("tree", _change("residual", lambda target, weights: target)),
    "target and draft swapped": ("chain", _change("acceptance", lambda target, draft, token: acceptance(draft, target, token))),
    "a block that may end as its last draft may": (
        "long chain over few ids",
        _change("block_threshold", lambda share, weights: share),
    ),
    "one noise for accepting and for the residual": ("tree over few ids", _change("step_uniform", _of_one_purpose)),
    "noise of a step met again in the next": ("long chain over few ids", _by_position_alone),
    "a path left out of the penalties": ("chain with penalties", _path_ignored),
    "a path left out of a tree's penalties": ("tree with penalties", _path_ignored),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_wrong_rule_is_noticed(wrong, seed, monkeypatch):
    name, spoil = BROKEN[wrong]
    spoil(monkeypatch)
    assert _p_value(SCENES[name], range(seed, seed + NUM_BROKEN_SEEDS[SCENES[name].vocab_size])) < 0.001
