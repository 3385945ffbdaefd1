"""Verification accepts the tokens of token-by-token sampling, whatever the tree contains."""

import numpy as np
import pytest

from harness.scripted_target import ScriptedTarget
from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.commit import commit
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import verify

NUM_TOKENS = 10
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    "penalties": SamplingParams(
        temperature=0.8, top_k=8, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.5, stop_token_ids=(2,), min_tokens=5
    ),
    "greedy penalties": SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0),
}


def _request(target: ScriptedTarget, params: SamplingParams, seed: int, sample_index: int = 0) -> Request:
    processor = LogitsProcessor(params, target.vocab_size, target.prompt)
    max_len = len(target.prompt) + NUM_TOKENS
    return Request(list(target.prompt), len(target.prompt), params, processor, CachedSequence(), seed, sample_index, max_len)


def _random_draft(generator: np.random.Generator, root: int, right: tuple[int, ...], vocab_size: int) -> DraftTree:
    """A random tree in which each level often holds the right token somewhere."""
    tokens: list[int] = []
    parents: list[int] = []
    on_path, depth = 0, 0
    for node in range(1, int(generator.integers(1, 13))):
        if generator.random() < 0.5 and depth < len(right):
            tokens.append(right[depth])
            parents.append(on_path)
            on_path, depth = node, depth + 1
        else:
            tokens.append(int(generator.integers(vocab_size)))
            parents.append(int(generator.integers(node)))
    return DraftTree.from_nodes(root, tokens, parents, "oracle")


def _node_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The drafted tokens that lead to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def _logits(target: ScriptedTarget, request: Request, tree: DraftTree) -> np.ndarray:
    return np.stack([target.logits((*request.token_ids, *path)) for path in _node_paths(tree)])


@pytest.mark.parametrize("name", PARAMS)
def test_verify_of_any_tree_gives_the_tokens_of_plain_decoding(name, seed):
    generator = np.random.default_rng(seed)
    target = ScriptedTarget()
    num_accepted = 0
    for case in range(60):
        plain = target.generate(PARAMS[name], case, NUM_TOKENS + 12, sample_index=case % 3)
        request = _request(target, PARAMS[name], case, sample_index=case % 3)
        while not request.is_finished:
            done = request.num_output_tokens
            tree = _random_draft(generator, request.token_ids[-1], plain[done:], target.vocab_size)
            result = verify(tree, _logits(target, request, tree), request)
            _check_walk(tree, result, plain[done:NUM_TOKENS])
            assert request.num_output_tokens == done
            commit(request, result.token_ids, len(result.accepted_nodes), has_draft=True)
            num_accepted += len(result.accepted_nodes)
        assert request.output_token_ids == list(plain[:NUM_TOKENS])
    assert num_accepted > 60


def _check_walk(tree: DraftTree, result, right: tuple[int, ...]) -> None:
    """The longest drafted prefix of the right text was accepted, and the token after it is the bonus: at the latest the last one."""
    paths = _node_paths(tree)
    longest = min(max(len(path) for path in paths if path == right[: len(path)]), len(right) - 1)
    assert [paths[node] for node in result.accepted_nodes] == [right[:count] for count in range(1, longest + 1)]
    assert result.token_ids == right[: longest + 1]


def test_verify_reads_no_logits_rows_after_a_rejection():
    target = ScriptedTarget()
    request = _request(target, PARAMS["sampled"], seed=5)
    right = target.generate(PARAMS["sampled"], 5, 3)
    wrong = (right[0] + 1) % target.vocab_size
    tree = DraftTree.from_nodes(request.token_ids[-1], [wrong, right[0], 1, (right[1] + 1) % target.vocab_size], [0, 0, 1, 2], "oracle")
    logits = _logits(target, request, tree)
    paths = _node_paths(tree)
    for node, path in enumerate(paths):
        if path not in ((), right[:1]):
            logits[node] = np.nan
    assert verify(tree, logits, request).token_ids == right[:2]


def test_verify_without_draft_returns_one_token():
    target = ScriptedTarget()
    request = _request(target, PARAMS["sampled"], seed=3)
    tree = DraftTree.root_only(request.token_ids[-1])
    result = verify(tree, _logits(target, request, tree), request)
    assert (result.accepted_nodes, result.token_ids) == ((), target.generate(PARAMS["sampled"], 3, 1))


@pytest.mark.parametrize("name", ["penalties", "greedy penalties"])
def test_verify_does_not_change_the_request(name):
    target = ScriptedTarget()
    request = _request(target, PARAMS[name], seed=1)
    right = target.generate(PARAMS[name], 1, 6)
    tree = DraftTree.chain(request.token_ids[-1], right[:4], "oracle")
    logits = _logits(target, request, tree)
    first = verify(tree, logits, request)
    assert first.token_ids == right[:5]
    assert verify(tree, logits, request) == first
