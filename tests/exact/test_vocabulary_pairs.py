"""Promise 1 with draft models of another vocabulary: whatever they draft, the tokens are the target's."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint, write_tokenizer
from harness.vocabulary_pairs import reorder_vocabulary
from paceline import LLM, SamplingParams
from paceline.outputs import RequestOutput
from paceline.speculation.draft_length.policy import FixedDraftLength

MAX_TOKENS = 16
PROMPTS = [
    "Once upon a time, there was a little girl named Lily. She",
    'def mean(values):\n    """The mean."""\n    return',
    'Die Straße führt über das café 😺 你好 "',
    "x",
]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.8, top_p=0.95, seed=6),
    "everything": SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.3, repetition_penalty=1.2, banned_token_ids=(9, 11), min_tokens=4, seed=7
    ),
}


def open_llm(target: Path, drafter: str, **options: object) -> LLM:
    llm = LLM(str(target), drafter=drafter, threads=2, max_model_len=512, kv_cache_gb=0.2, offline=True, **options)  # type: ignore[arg-type]
    if drafter != "none":
        llm.engine.speculator.policy = FixedDraftLength(4, max_rows=13)
    return llm


@pytest.fixture(scope="module")
def drafts(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Draft models for the mini by what their vocabulary is to the mini's."""
    root = tmp_path_factory.mktemp("drafts")
    random = np.random.default_rng(2)
    orders = {
        "reordered": random.permutation(4096).tolist(),
        "mostly": [int(token) for token in random.permutation(4096) if token < 3900],
        "first ids": list(range(3900)),
        "byte-level of another size": list(range(700)),  # special tokens, bytes and the first merges
    }

    def directory(kind: str) -> Path:
        path = root / kind.replace(" ", "-")
        return path if path.is_dir() else reorder_vocabulary(mini_dir / "draft", path, orders[kind])

    return directory


@pytest.fixture(scope="module")
def plain(mini_dir: Path) -> dict[str, list[RequestOutput]]:
    llm = open_llm(mini_dir, "none")
    return {name: [llm.generate(prompt, params)[0] for prompt in PROMPTS] for name, params in SAMPLINGS.items()}


@pytest.mark.spread(0.5)
@pytest.mark.parametrize(
    ("kind", "way", "width"),
    [
        ("reordered", "overlapping", 1),
        ("mostly", "overlapping", 3),
        ("first ids", "padded", 1),
        ("byte-level of another size", "disjoint", 1),
    ],
)
def test_draft_models_with_other_vocabularies_change_no_token(
    mini_dir: Path,
    drafts: Callable[[str], Path],
    plain: dict[str, list[RequestOutput]],
    kind: str,
    way: str,
    width: int,
    tally: "Counter[str]",
) -> None:
    llm = open_llm(mini_dir, str(drafts(kind)), tree_width=width)
    assert f"{way} vocabularies" in llm.banner
    accepted = 0
    for name, params in SAMPLINGS.items():
        outputs = [*llm.generate(PROMPTS[0], params), *llm.generate(PROMPTS, params)]
        expected_of = [plain[name][0], *plain[name]]
        for index, output in enumerate(outputs):
            assert output.token_ids == expected_of[index].token_ids, f"{name}, prompt {index - 1}"
            accepted += output.speculation.num_accepted_tokens
            assert "the drafter failed" not in str(output.speculation.as_dict()["skip_counts"])
            tally["token ids compared with plain decoding, drafts of another vocabulary"] += len(output.token_ids)
    assert accepted > 0
    llm.engine.cache.check_consistency()
    drafter_cache = getattr(llm.drafter, "model", llm.drafter).cache  # type: ignore[union-attr]
    drafter_cache.check_consistency()
    assert drafter_cache.pool.num_free == drafter_cache.pool.num_blocks


def test_draft_model_with_permuted_ids_has_equal_acceptance(mini_dir: Path, drafts: Callable[[str], Path]) -> None:
    """The detour through pieces loses nothing, sampled neither."""
    own, other = open_llm(mini_dir, str(mini_dir / "draft")), open_llm(mini_dir, str(drafts("reordered")))
    for params in SAMPLINGS.values():
        one, two = (llm.generate(PROMPTS[0], params)[0].speculation for llm in (own, other))
        assert (one.num_draft_tokens, one.num_accepted_tokens) == (two.num_draft_tokens, two.num_accepted_tokens)


@pytest.mark.parametrize(("target_rows", "draft_rows", "draft_ids"), [(97, 128, 97), (128, 97, 97), (128, 160, 97), (128, 160, 120)])
def test_padding_ids_of_a_vocabulary_are_neither_emitted_nor_drafted(
    tmp_path: Path, target_rows: int, draft_rows: int, draft_ids: int
) -> None:
    """The largest logits are those of padding: matrices of random numbers have no quiet rows."""
    target = write_checkpoint(tmp_path / "target", "llama", vocab_size=target_rows, num_hidden_layers=1)
    draft = write_checkpoint(tmp_path / "draft", "llama", vocab_size=draft_rows, num_hidden_layers=1, seed=1)
    write_tokenizer(target, 97)
    write_tokenizer(draft, draft_ids)
    prompts = [[5, 6, 7], [96] * 40]
    without, llm = open_llm(target, "none"), open_llm(target, str(draft), tree_width=3)
    proposed: set[int] = set()
    propose = llm.drafter.propose  # type: ignore[union-attr]

    def watched(*arguments: object) -> object:
        trees = propose(*arguments)  # type: ignore[arg-type]
        proposed.update(token for tree in trees if tree is not None for token in tree.token_ids)
        return trees

    llm.drafter.propose = watched  # type: ignore[assignment, method-assign, union-attr]
    for params in SAMPLINGS.values():
        for one, two in zip(without.generate(prompts, params), llm.generate(prompts, params), strict=True):
            assert one.token_ids == two.token_ids
            assert max(one.token_ids) < 97
    assert proposed
    assert max(proposed) < 97
