"""The speedups that `doctor --probe` measures: of the same texts with drafts and without."""

from pathlib import Path

import pytest

from harness.quick_profiles import quick_profiles
from paceline import LLM, SamplingParams
from paceline.prompt_file import PromptLine
from paceline.proof.measured_speedup import COPYING, GIVEN_PROMPTS, NEW_PROSE, _Texts, measure_speedups


def test_speedup_compares_equal_sampled_texts(mini_dir: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        texts = _Texts.generate(llm, [(text, params) for text in ("The old", "In the spring", "A dog", "One", "Two")])
    assert [text.token_ids for text in texts.plain] == [text.token_ids for text in texts.drafted[2:3]]
    assert (len(texts.plain), len(texts.drafted)) == (1, 5)


def test_speedup_of_copying_counts_texts_that_were_copied(mini_dir: Path) -> None:
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        prose, copying = measure_speedups(llm)
    assert (prose.kind, copying.kind) == (NEW_PROSE, COPYING)
    assert copying.num_tokens == 112
    assert copying.speedup > 0


def test_speedup_of_given_prompts_has_an_interval_that_contains_it(mini_dir: Path) -> None:
    prompts = [PromptLine(text="one two one two"), PromptLine(token_ids=(5, 6, 7)), PromptLine(text="The dog"), PromptLine(text="A cat")]
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        (found,) = measure_speedups(llm, prompts)
    assert (found.kind, found.num_texts) == (GIVEN_PROMPTS, 2)
    assert found.interval[0] <= found.speedup <= found.interval[1]


def test_speedup_leaves_out_texts_of_one_token(mini_dir: Path) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (1, 8, 1)]
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        found = _Texts.generate(llm, [("The old", one) for one in params])
        assert [len(text.token_ids) for text in found.drafted] == [8]
        assert not _Texts.generate(llm, [("The old", params[0])]).drafted


def test_speedup_of_given_conversations_uses_the_sampling_of_conversations(mini_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = []
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        monkeypatch.setattr(
            llm, "generate", lambda prompt, params, **options: sampled.append(params) or generate(prompt, params, **options)
        )
        generate = type(llm).generate.__get__(llm)
        measure_speedups(llm, [PromptLine(messages=({"role": "user", "content": "hello"},)), PromptLine(text="hello")])
        expected = llm.sampling_defaults.chat["temperature"]
    assert {one.temperature for one in sampled} == {expected, 0.0}
