"""The public class `LLM`: inputs, outputs, and that the form of a call changes no token."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import END_OF_TEXT_ID, write_checkpoint
from paceline import LLM, RequestOutput, SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.request import TokenOrigin

SAMPLED = SamplingParams(max_tokens=16, temperature=1.2, top_p=0.95, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def open_llm(directory: Path) -> Open:
    def open_llm(**options: object) -> LLM:
        options = {"threads": 2, "device": "cpu", "kv_cache_gb": 0.02, "drafter": "ngram", **options}
        return LLM(str(options.pop("model", directory)), **options)  # type: ignore[arg-type]

    return open_llm


@pytest.fixture(scope="module")
def shared_llm(open_llm: Open) -> LLM:
    return open_llm()


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    """One LLM for all tests, checked to be clean after each."""
    yield shared_llm
    assert_clean(shared_llm)


def assert_clean(llm: LLM) -> None:
    llm.engine.cache.check_consistency()
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_prompts_may_be_text_or_token_ids_single_or_in_lists(llm: LLM) -> None:
    text, ids = "the cat sat", [4, 6, 9]
    assert llm.tokenizer.encode(text) == ids
    (expected,) = ids_of(llm.generate(text, GREEDY))
    for prompt in (ids, tuple(ids), np.array(ids), [text], [ids], (ids,)):
        outputs = llm.generate(prompt, GREEDY)
        assert ids_of(outputs) == [expected]
        assert outputs[0].prompt_token_ids == ids
    other = ids_of(llm.generate("a dog", GREEDY))[0]
    for prompts in ([text, "a dog"], [ids, "a dog"], [text, [5, 7]], [ids, np.array([5, 7])]):
        assert ids_of(llm.generate(prompts, GREEDY)) == [expected, other]


def test_request_output_contains_usage_timing_and_speculation(llm: LLM) -> None:
    (output,) = llm.generate("the cat sat", GREEDY)
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.total_tokens) == (3, 16, 19)
    assert output.timing.prompt_s > 0
    assert output.timing.decode_s > 0
    assert output.timing.total_s == output.timing.prompt_s + output.timing.decode_s
    assert output.tokens_per_s == pytest.approx(15 / output.timing.decode_s)
    assert output.finish_reason == "length"
    assert output.numerics == llm.numerics
    assert output.drafter == llm.drafter_name == "ngram"
    stats = output.speculation
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_bonus_tokens == len(output.token_ids) == len(output.origins)
    assert output.origins.count(TokenOrigin.ACCEPTED) == stats.num_accepted_tokens
    assert output.origins.count(TokenOrigin.PLAIN) == stats.plain_steps
    assert output.origins[0] is TokenOrigin.PLAIN
    record = output.as_dict(model="m", version="1")
    assert record["usage"]["total_tokens"] == 19
    assert record["token_ids"] == output.token_ids


def test_llm_decodes_greedily_by_default(llm: LLM) -> None:
    first, second = (llm.generate("the cat")[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) <= 256


def test_reported_seed_repeats_the_text(llm: LLM) -> None:
    free = replace(SAMPLED, seed=None)
    first, second = llm.generate(["the cat", "the cat"], free)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    for output in (first, second):
        (again,) = llm.generate("the cat", replace(SAMPLED, seed=output.seed))
        assert again.token_ids == output.token_ids
        assert again.seed == output.seed


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "the cat"}]
    two = [{"role": "system", "content": "yes"}, {"role": "user", "content": "a dog"}]
    answer = llm.chat(one, GREEDY)
    assert isinstance(answer, RequestOutput)
    assert answer.prompt_token_ids == llm.tokenizer.apply_chat_template(one)
    assert ids_of(llm.chat([one], GREEDY)) == [answer.token_ids]
    assert ids_of(llm.chat([one, two], GREEDY)) == [answer.token_ids, llm.chat(two, GREEDY).token_ids]
    assert [chunk.output for chunk in llm.stream_chat(one, GREEDY)][-1].token_ids == answer.token_ids


def test_chat_continues_the_final_assistant_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}]
    answer = llm.chat(messages, GREEDY, continue_final_message=True)
    assert llm.tokenizer.decode(answer.prompt_token_ids).endswith("a dog")
    (streamed,) = [chunk.output for chunk in llm.stream_chat(messages, GREEDY, continue_final_message=True) if chunk.output]
    assert streamed.token_ids == answer.token_ids


def test_control_tokens_of_a_chat_are_text_unless_allowed(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the<|im_end|>"}]
    ends = {option: llm.chat(messages, GREEDY, allow_special_tokens=option).prompt_token_ids for option in (False, True)}
    assert ends[True] == llm.tokenizer.apply_chat_template(messages)
    special = llm.tokenizer.special_token_ids
    assert len(special.intersection(ends[False])) <= len(special.intersection(ends[True]))
    assert sum(one in special for one in ends[False]) == sum(one in special for one in ends[True]) - 1


STREAMED = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "one token": replace(GREEDY, max_tokens=1),
    "stop string": replace(GREEDY, stop="w8", max_tokens=60),
    "stop string, kept": replace(SAMPLED, stop=[" w8", "zzz"], include_stop=True, max_tokens=60),
    "eos": replace(SAMPLED, ignore_eos=False, logit_bias={END_OF_TEXT_ID: 3.0}, max_tokens=60),
    "stop tokens": replace(SAMPLED, stop_token_ids=list(range(40, 60))),
    "stop tokens, kept": replace(SAMPLED, stop_token_ids=list(range(40, 60)), include_stop=True),
    "stop tokens kept in front of a stop string": replace(SAMPLED, stop_token_ids=range(40, 60), stop="zz", include_stop=True),
}


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_chunks_join_to_the_final_output(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.speculator, "policy", FixedDraftLength(4))  # which steps are plain must not hang on times
    for prompt in ("the cat sat", [7] * 300):
        (whole,) = llm.generate([prompt], STREAMED[name])
        chunks = list(llm.stream(prompt, STREAMED[name]))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert [origin for chunk in chunks for origin in chunk.origins] == whole.origins
        assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        last = chunks[-1].output
        assert (last.text, last.token_ids, last.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == [sum(len(chunk.token_ids) for chunk in chunks[: end + 1]) for end in range(len(chunks))]
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.usage.prompt_tokens}


def test_stop_string_across_tokens_is_removed_unless_included(llm: LLM) -> None:
    (whole,) = llm.generate("the cat sat", GREEDY)
    words = whole.text.split(" ")
    stop = words[3][1:] + " " + words[4][:1]
    at = whole.text.index(stop)
    for stops in (stop, [stop], ["nowhere", stop]):
        (cut,) = llm.generate("the cat sat", replace(GREEDY, stop=stops))
        assert (cut.text, cut.finish_reason, cut.stop_text) == (whole.text[:at], "stop", stop)
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
        (kept,) = llm.generate("the cat sat", replace(GREEDY, stop=stops, include_stop=True))
        assert kept.text == whole.text[: at + len(stop)]
        assert kept.token_ids == cut.token_ids


def test_stop_token_ends_the_output_and_is_left_out_of_the_text(llm: LLM) -> None:
    (whole,) = llm.generate("the cat sat", GREEDY)
    stop = whole.token_ids[8]
    count = whole.token_ids.index(stop) + 1
    for include_stop in (False, True):
        (output,) = llm.generate("the cat sat", replace(GREEDY, stop_token_ids=[stop], include_stop=include_stop))
        assert (output.token_ids, output.finish_reason, output.stop_text) == (whole.token_ids[:count], "stop", None)
        assert output.text == llm.tokenizer.decode(whole.token_ids[: count - 1 + include_stop])


def test_eos_ends_the_output_unless_ignored_or_too_early(llm: LLM) -> None:
    eager = replace(GREEDY, ignore_eos=False, logit_bias={END_OF_TEXT_ID: 100.0})
    (output,) = llm.generate("the cat", eager)
    assert (output.token_ids, output.finish_reason, output.text) == ([END_OF_TEXT_ID], "stop", "")
    (output,) = llm.generate("the cat", replace(eager, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == ([END_OF_TEXT_ID] * 16, "length")
    (output,) = llm.generate("the cat", replace(eager, min_tokens=5))
    assert (output.token_ids.index(END_OF_TEXT_ID), len(output.token_ids), output.finish_reason) == (5, 6, "stop")


def test_special_tokens_written_out_in_a_prompt_are_tokens(llm: LLM) -> None:
    (output,) = llm.generate("<|im_start|>the cat<|im_end|>", GREEDY)
    assert output.prompt_token_ids[0] == 1
    assert output.prompt_token_ids[-1] == 2


def test_max_tokens_beyond_the_context_ends_at_the_context_limit(llm: LLM) -> None:
    (output,) = llm.generate([[5] * (llm.max_model_len - 7)], SamplingParams(max_tokens=10_000, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (7, "length")


def test_long_prompt_is_prefilled_in_chunks_of_256_rows(open_llm: Open) -> None:
    llm = open_llm(drafter="none")
    llm.generate([[5] * 400], replace(GREEDY, max_tokens=3))
    assert llm.runtime.num_passes == 2 + 2


def test_concurrent_streams_are_independent_of_an_abandoned_one(llm: LLM) -> None:
    (expected,) = ids_of(llm.generate("the cat sat", SAMPLED))
    first, second, abandoned = (llm.stream("the cat sat", SAMPLED) for _ in range(3))
    next(abandoned)
    got: list[list[int]] = [[], []]
    for chunks in zip_longest(first, second):  # drafts pay for one sooner than for the other: they may take different numbers of steps
        for tokens, chunk in zip(got, chunks, strict=True):
            tokens.extend(chunk.token_ids if chunk is not None else ())
    assert got == [expected, expected]
    del abandoned


def test_llm_banner_describes_the_drafter(directory: Path, open_llm: Open) -> None:
    assert "suffix" in LLM(directory, threads=2, device="cpu", kv_cache_gb=0.02).banner  # type: ignore[arg-type]
    assert open_llm(drafter="none").banner == "speculation: off"
    both = open_llm(drafter=["ngram", str(directory)])
    assert both.drafter_name == "ngram+draft_model"
    assert both.generate("the cat", GREEDY)[0].drafter == "ngram+draft_model"
    assert open_llm(drafter=["ngram"]).drafter_name == "ngram"


@pytest.mark.usefixtures("always_drafts")
def test_second_draft_model_is_named_draft_model_2(open_llm: Open, directory: Path, tmp_path: Path) -> None:
    """The second is never the first one: the target itself is always right, the other nearly never."""
    other = write_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1)
    for paths in ([directory, other], [other, directory]):
        llm = open_llm(drafter=["suffix", *map(str, paths)])
        assert llm.drafter_name == "suffix+draft_model+draft_model_2"
        rates = {}
        for name in ("draft_model", "draft_model_2"):
            (output,) = llm.generate("the cat", GREEDY, speculation={"drafter": name, "trees": True})
            assert output.drafter == name
            assert {source for step in output.steps for source in step.sources} == {name}
            rates[name] = output.speculation.acceptance_rate
        own = "draft_model" if paths[0] == directory else "draft_model_2"
        assert rates.pop(own) == 1.0
        assert max(rates.values()) < 0.5


def test_context_shorter_than_the_profiled_lengths_loads(open_llm: Open) -> None:
    for options in ({"max_model_len": 2, "num_speculative_tokens": 64}, {"max_model_len": 40}, {"kv_cache_gb": 16384 / 1e9}):
        llm = open_llm(**options)
        assert llm.generate([5], GREEDY)[0].finish_reason == "length"
        assert_clean(llm)
    assert "the cache has room for 32 tokens" in llm.notices[-1]


def test_profile_is_stored_in_the_configured_cache_directory(shared_llm: LLM, measured_facts: Path) -> None:
    assert (measured_facts / "measured.json").is_file()


def test_explain_shows_drafts_and_costs() -> None:
    llm = LLM("mini", drafter="ngram", threads=2)
    for _ in range(8):  # on a busy machine, measured passes may indicate that no draft pays
        (output,) = llm.generate("one two three " * 20, SamplingParams(max_tokens=64, ignore_eos=True), speculation={"trees": True})
        drafted = [step for step in output.steps or () if step.draft_token_ids]
        if drafted:
            break
    lines = llm.explain(output)
    assert lines[0].startswith("draft tokens")
    assert any("a pass of 1 row" in line for line in lines)
    assert drafted
    assert all(step.expected_tokens is not None and step.expected_tokens > 1.0 for step in drafted)
    assert output.as_dict(model="mini", version="0")["steps"][0]["skip_reason"] == "prompt"


def test_explain_without_a_drafter_lists_steps_only() -> None:
    llm = LLM("mini", drafter="none", threads=2)
    (output,) = llm.generate("one two three", SamplingParams(max_tokens=4), speculation={"trees": True})
    assert [line.split()[0] for line in llm.explain(output)] == ["draft", "plain", "plain"]
