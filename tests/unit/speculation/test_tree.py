import numpy as np
import pytest

from paceline.sampling.residual import TokenProbs
from paceline.speculation.tree import DraftSampling, DraftTree

UNLIMITED = {"vocab_size": 1_000_000, "max_depth": 1_000, "max_rows": 1_000_000}


def _random_tree(generator: np.random.Generator, vocab_size: int = 4) -> tuple[DraftTree, list[int], list[int]]:
    """A grown tree with the tokens and parents it was grown from; few ids, so that siblings often agree."""
    count = int(generator.integers(0, 16))
    tokens = generator.integers(0, vocab_size, count).tolist()
    parents = [int(generator.integers(0, node)) for node in range(1, count + 1)]
    return DraftTree.from_nodes(99, tokens, parents, "ngram"), tokens, parents


def _texts(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, root included."""
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return texts


def _check_shape(tree: DraftTree) -> None:
    assert len(tree.token_ids) == len(tree.parents) == len(tree.depths) == len(tree.sources)
    assert (tree.parents[0], tree.depths[0], tree.sources[0]) == (-1, 0, "")
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    assert list(tree.depths) == [len(text) - 1 for text in _texts(tree)]
    assert list(tree.parents) == sorted(tree.parents), "children stand in the order of their parents: breadth-first"
    assert len(set(_texts(tree))) == len(tree.token_ids), "two siblings hold the same token"
    assert tree.tree_depth == max(tree.depths)
    assert tree.num_draft_tokens == len(tree.token_ids) - 1


def test_root_only_draft_tree_has_no_draft_tokens():
    tree = DraftTree.root_only(7)
    _check_shape(tree)
    assert (tree.num_draft_tokens, tree.tree_depth, tree.child(0, 7)) == (0, 0, None)


@pytest.mark.parametrize("tokens", [[], [5], [5, 5, 6]])
def test_draft_tree_chain_equals_grow_with_a_line_of_parents(tokens):
    chain = DraftTree.chain(9, tokens, "ngram")
    grown = DraftTree.from_nodes(9, tokens, range(len(tokens)), "ngram")
    _check_shape(chain)
    for name in ("token_ids", "parents", "depths", "sources"):
        assert list(getattr(chain, name)) == list(getattr(grown, name))


def test_draft_tree_grow_merges_equal_paths_in_breadth_first_order(seed):
    generator = np.random.default_rng(seed)
    for _ in range(500):
        tree, tokens, parents = _random_tree(generator)
        _check_shape(tree)
        wanted: list[tuple[int, ...]] = [(99,)]
        for token, parent in zip(tokens, parents, strict=True):
            wanted.append((*wanted[parent], token))
        assert set(_texts(tree)) == set(wanted)
        assert set(tree.sources[1:]) <= {"ngram"}


def test_draft_tree_grow_merges_the_children_of_equal_siblings():
    tree = DraftTree.from_nodes(0, [5, 6, 5, 7, 8], [0, 0, 0, 3, 1], "ngram")
    assert _texts(tree) == [(0,), (0, 5), (0, 6), (0, 5, 7), (0, 5, 8)]


@pytest.mark.parametrize("parent", [1, 2, -1])
def test_draft_tree_node_before_its_parent_is_refused(parent):
    with pytest.raises(ValueError, match="parents must come before their children"):
        DraftTree.from_nodes(0, [5], [parent], "ngram")


def test_draft_tree_child_is_found_by_its_token(seed):
    generator = np.random.default_rng(seed)
    for _ in range(200):
        tree, _, _ = _random_tree(generator)
        texts = _texts(tree)
        for node, text in enumerate(texts):
            for token in range(5):
                child = tree.child(node, token)
                assert (None if child is None else texts[child]) == ((*text, token) if (*text, token) in texts else None)


def test_trimmed_draft_tree_is_a_subset_within_the_limits(seed):
    generator = np.random.default_rng(seed)
    for _ in range(500):
        tree, _, _ = _random_tree(generator, vocab_size=6)
        vocab_size, max_depth, max_rows = int(generator.integers(1, 8)), int(generator.integers(0, 7)), int(generator.integers(1, 20))
        trimmed = tree.trim(vocab_size=vocab_size, max_depth=max_depth, max_rows=max_rows)
        _check_shape(trimmed)
        assert set(_texts(trimmed)) <= set(_texts(tree))
        assert trimmed.token_ids[0] == 99
        assert all(token < vocab_size for token in trimmed.token_ids[1:])
        assert trimmed.tree_depth <= max_depth
        assert len(trimmed.parents) <= max_rows


def test_trimming_a_draft_tree_drops_nothing_that_fits(seed):
    generator = np.random.default_rng(seed)
    for _ in range(200):
        tree, _, _ = _random_tree(generator, vocab_size=6)
        assert tree.trim(**UNLIMITED) is tree
        exact = {"vocab_size": 6, "max_depth": tree.tree_depth, "max_rows": len(tree.parents)}
        trimmed = tree.trim(**exact)
        assert set(_texts(trimmed)) == set(_texts(tree))
        kept = [text for text in _texts(tree) if len(text) <= 3 and all(token < 4 for token in text[1:])]
        assert _texts(tree.trim(vocab_size=4, max_depth=2, max_rows=1_000)) == kept


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        pytest.param({"vocab_size": 6}, [5], id="an id past the vocabulary and what follows it"),
        pytest.param({"max_depth": 2}, [5, 6], id="too deep"),
        pytest.param({"max_rows": 2}, [5], id="over budget"),
        pytest.param({"max_rows": 0}, [], id="no budget"),
        pytest.param({"vocab_size": 0}, [], id="no vocabulary"),
    ],
)
def test_draft_chain_is_cut_at_the_first_unusable_token(limits, kept):
    trimmed = DraftTree.chain(99, [5, 6, 2], "ngram").trim(**{**UNLIMITED, **limits})
    assert list(trimmed.token_ids) == [99, *kept]
    assert list(trimmed.sources) == ["", *["ngram"] * len(kept)]


def test_draft_chain_is_cut_at_a_negative_id():
    assert DraftTree.chain(99, [-1, 5], "ngram").trim(**UNLIMITED).num_draft_tokens == 0


def _drawn_tree(generator: np.random.Generator, vocab_size: int = 6) -> DraftTree:
    """A tree in which every node's children are drawn; the distribution of each node is identified by its first value."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(int(generator.integers(1, 8))):
        fresh = generator.permutation(vocab_size)[: int(generator.integers(0 if node else 1, 4))]
        if node <= len(tokens):
            tokens.extend(fresh.tolist())
            parents.extend([node] * len(fresh))
    draft_probs = {}
    for parent in set(parents):
        values = generator.random(vocab_size) + 0.1
        draft_probs[parent] = TokenProbs(values / values.sum())
    return DraftTree.from_nodes(99, tokens, parents, "draft_model", draft_probs)


def test_trimmed_sampled_tree_keeps_the_first_draws_of_each_node(seed):
    generator = np.random.default_rng(seed)
    num_cut = 0
    for _ in range(300):
        tree = _drawn_tree(generator)
        tree.check()
        limits = {"vocab_size": 6, "max_depth": int(generator.integers(0, 5)), "max_rows": int(generator.integers(1, 16))}
        trimmed = tree.trim(**limits)
        trimmed.check()
        num_cut += trimmed is not tree
        texts = _texts(tree)
        for node, text in enumerate(_texts(trimmed)):
            drawn = [trimmed.token_ids[child] for child in trimmed.children(node)]
            before = texts.index(text)
            assert drawn == [tree.token_ids[child] for child in tree.children(before)][: len(drawn)]
            assert trimmed.draft_probs.get(node) is (tree.draft_probs[before] if drawn else None)
    assert num_cut > 50


def test_draft_probs_beyond_the_vocabulary_are_dropped():
    short, long = TokenProbs(np.array([0.5, 0.5, 0.0])), TokenProbs(np.array([0.25, 0.25, 0.5]))
    listed = TokenProbs(np.array([0.5, 0.5]), np.array([1, 7]))
    tree = DraftTree.from_nodes(9, [0, 1, 1], [0, 1, 2], "draft_model", {0: short, 1: long, 2: listed})
    trimmed = tree.trim(**{**UNLIMITED, "vocab_size": 2})
    assert list(trimmed.token_ids) == [9, 0, 1, 1]
    assert trimmed.draft_probs == {0: short}


def test_proposal_kind_of_a_draft_tree_follows_from_its_draft_probs():
    distribution = TokenProbs(np.array([0.5, 0.25, 0.25]))
    assert DraftTree.chain(9, [0, 1], "ngram").draft_sampling is DraftSampling.DETERMINISTIC
    assert DraftTree.root_only(9).draft_sampling is DraftSampling.DETERMINISTIC
    assert (
        DraftTree.from_nodes(9, [0, 1], [0, 1], "draft_model", {0: distribution, 1: distribution}).draft_sampling is DraftSampling.SAMPLED
    )
    assert DraftTree.from_nodes(9, [0, 1], [0, 0], "draft_model", {0: distribution}).draft_sampling is DraftSampling.WITHOUT_REPLACEMENT


def test_draft_probs_follow_their_nodes_when_sorted():
    draft_probs = {node: TokenProbs(np.array([0.25, 0.25, 0.5])) for node in (0, 1, 3)}
    tree = DraftTree.from_nodes(9, [0, 1, 2, 1], [0, 1, 0, 3], "draft_model", draft_probs)
    assert list(tree.token_ids) == [9, 0, 2, 1, 1]
    assert tree.draft_probs == {0: draft_probs[0], 1: draft_probs[1], 2: draft_probs[3]}


def test_equal_sampled_siblings_are_refused():
    distribution = TokenProbs(np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="not sampled without replacement"):
        DraftTree.from_nodes(9, [1, 1], [0, 0], "draft_model", {0: distribution})


@pytest.mark.parametrize(
    ("values", "token", "node"),
    [
        pytest.param([0.5, 0.5, 0.0], 2, 0, id="a token of probability 0"),
        pytest.param([0.5, 0.5], 2, 0, id="a token outside of the distribution"),
        pytest.param([0.5, 0.6], 1, 0, id="a sum that is not 1"),
        pytest.param([1.5, -0.5], 0, 0, id="a negative probability"),
        pytest.param([float("nan"), 1.0], 1, 0, id="no number"),
        pytest.param([0.5, 0.5], 1, 1, id="a node without children"),
        pytest.param([0.5, 0.5], 1, 5, id="a node that is not there"),
        pytest.param([[0.5, 0.5]], 0, 0, id="two dimensions"),
    ],
)
def test_sampled_tokens_impossible_under_their_draft_probs_are_refused(values, token, node):
    tree = DraftTree((9, token), (-1, 0), (0, 1), ("", "draft_model"), {node: TokenProbs(np.array(values))})
    with pytest.raises(ValueError, match="cannot come from its draft_probs"):
        tree.check()


@pytest.mark.parametrize("ids", [[3, 3, 5], [5, 3, 4], [-1, 3, 5], [3, 5], [3.0, 4.0, 5.0], [[3, 4, 5]]], ids=str)
def test_token_ids_that_are_not_ascending_ids_are_refused(ids):
    probs = np.array([0.25, 0.5, 0.25])
    for token_ids, is_valid in (([3, 4, 5], True), (ids, False)):
        assert TokenProbs(probs, np.array(token_ids)).is_valid() is is_valid
