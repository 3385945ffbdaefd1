"""The speedups that `doctor --probe` measures: of the same texts with drafts and without."""

from pathlib import Path

from harness.quick_profiles import quick_profiles
from paceline import LLM, SamplingParams
from paceline.proof.measured_speedup import COPYING, NEW_PROSE, _generate_twice, measure_speedups


def test_speedup_compares_equal_sampled_texts(mini_dir: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        pairs = _generate_twice(llm, ["The old", "In the spring", "A dog"], params)
    assert [plain.token_ids for plain, _ in pairs] == [drafted.token_ids for _, drafted in pairs]


def test_speedup_of_copying_counts_texts_that_were_copied(mini_dir: Path) -> None:
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        prose, copying = measure_speedups(llm)
    assert (prose.kind, copying.kind) == (NEW_PROSE, COPYING)
    assert copying.num_tokens == 112
    assert copying.speedup > 0
