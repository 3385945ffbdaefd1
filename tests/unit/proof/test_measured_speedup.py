"""The speedups that `doctor --probe` measures: of the same texts with drafts and without."""

from pathlib import Path

import pytest

from harness.quick_profiles import quick_profiles
from paceline import LLM, SamplingParams
from paceline.prompt_file import PromptLine
from paceline.proof.measured_speedup import COPYING, GIVEN_PROMPTS, NEW_PROSE, PromptError, _Texts, measure_speedups


def test_plain_and_drafted_samples_are_equal(mini_dir: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        texts = _Texts.generate(llm, [(text, params, None) for text in ("The old", "In the spring", "A dog", "One", "Two", "Six")])
    assert [text.token_ids for text in texts.plain] == [texts.drafted[4].token_ids]
    assert len(texts.drafted) == 6


def test_speedup_of_copying_counts_texts_that_were_copied(mini_dir: Path) -> None:
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        prose, copying = measure_speedups(llm)
    assert (prose.kind, copying.kind) == (NEW_PROSE, COPYING)
    assert copying.num_tokens == 112
    assert copying.speedup > 0
    assert copying.interval is None  # of one text


def test_speedup_of_given_prompts_lies_within_its_confidence_interval(mini_dir: Path) -> None:
    prompts = [PromptLine(text="one two one two"), PromptLine(token_ids=(5, 6, 7)), PromptLine(text="The dog"), PromptLine(text="A cat")]
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        (found,) = measure_speedups(llm, prompts)
    assert (found.kind, found.num_texts) == (GIVEN_PROMPTS, 14)
    assert found.interval is not None
    assert found.interval[0] <= found.speedup <= found.interval[1]


def test_speedup_leaves_out_texts_of_one_token(mini_dir: Path) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (1, 8, 1)]
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        found = _Texts.generate(llm, [("The old", one, None) for one in params])
        assert [len(text.token_ids) for text in found.drafted] == [8]
        assert not _Texts.generate(llm, [("The old", params[0], None)]).drafted


def test_given_prompts_are_sampled_as_the_model_recommends(mini_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = []
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm:
        generate = llm.generate
        monkeypatch.setattr(llm, "generate", lambda prompt, params, **o: sampled.append(params) or generate(prompt, params, **o))
        measure_speedups(llm, [PromptLine(messages=({"role": "user", "content": "hello"},)), PromptLine(text="hello")])
        expected = llm.sampling_defaults.chat["temperature"]
    assert {one.temperature for one in sampled} == {expected}


def test_given_predictions_are_drafted(mini_dir: Path) -> None:
    with quick_profiles(), LLM(str(mini_dir), drafter="prediction", max_model_len=512) as llm:
        (found,) = measure_speedups(llm, [PromptLine(text="Once there was", prediction=" a boy" * 40)])
    assert found.draft_share > 0


def test_a_prompt_that_leaves_no_room_for_an_answer_is_a_wrong_prompt(mini_dir: Path) -> None:
    line = PromptLine(token_ids=(5,) * 512)
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm, pytest.raises(PromptError, match="512 tokens"):
        measure_speedups(llm, [line])


@pytest.mark.parametrize("line", [PromptLine(token_ids=(10**6,)), PromptLine(text="one " * 600)], ids=["unknown id", "too long"])
def test_error_identifies_the_prompt_that_the_model_rejects(mini_dir: Path, line: PromptLine) -> None:
    with quick_profiles(), LLM(str(mini_dir), drafter="ngram", max_model_len=512) as llm, pytest.raises(PromptError, match="prompt 2 of"):
        measure_speedups(llm, [PromptLine(text="fine"), line])
