"""Calls as users of other libraries write them: they work, or one error gives paceline's name."""

import asyncio
import copy
import dataclasses
import gc
import inspect
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from harness.checkpoints import write_checkpoint
from paceline import LLM, AsyncEngine, ConfigError, RequestError, SamplingParams
from paceline.config import EngineConfig, SpeculationConfig
from paceline.engine.loader import parse_settings

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "the cat"}]
OPTIONS: dict[str, Any] = {"threads": 2, "device": "cpu", "kv_cache_gb": 0.02, "drafter": "ngram"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), **OPTIONS) as llm:
        yield llm


Ask = Callable[..., list[list[int]]]


@pytest.fixture(params=["LLM", "AsyncEngine"])
def ask(request: pytest.FixtureRequest, llm: LLM, directory: Path) -> Ask:
    """The token ids that a method returns, of either class."""
    if request.param == "LLM":

        def ask_llm(method: str, *arguments: Any, **named: Any) -> list[list[int]]:
            outputs = getattr(llm, method)(*arguments, **named)
            return [output.token_ids for output in (outputs if isinstance(outputs, list) else [outputs])]

        return ask_llm

    def ask_engine(method: str, *arguments: Any, **named: Any) -> list[list[int]]:
        async def work() -> list[list[int]]:
            engine = AsyncEngine(llm._loaded)
            async with engine:
                return [output.token_ids for output in await getattr(engine, method)(*arguments, **named)]

        return asyncio.run(work())

    return ask_engine


def test_sampling_params_are_accepted_by_keyword(ask: Ask, llm: LLM) -> None:
    expected = [llm.generate("the cat", SAMPLED)[0].token_ids]
    assert ask("generate", "the cat", sampling_params=SAMPLED) == expected
    assert ask("chat", MESSAGES, sampling_params=GREEDY) == [llm.chat(MESSAGES, GREEDY).token_ids]
    assert [chunk.output for chunk in llm.stream("the cat", sampling_params=SAMPLED)][-1].token_ids == expected[0]  # type: ignore[union-attr]
    with pytest.raises(RequestError, match=r"params is no argument of generate: did you mean sampling_params\?"):
        ask("generate", "the cat", params=SAMPLED)


def test_each_prompt_may_have_its_own_sampling_params(ask: Ask, llm: LLM) -> None:
    prompts = ["the cat", "a dog"]
    expected = [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(prompts, (SAMPLED, GREEDY), strict=True)]
    assert ask("generate", prompts, [SAMPLED, GREEDY]) == expected
    assert ask("generate", prompts, sampling_params=(SAMPLED, GREEDY)) == expected
    assert ask("generate", "the cat", [SAMPLED]) == expected[:1]
    with pytest.raises(RequestError, match="3 sampling_params for 2 prompts: give one for all of them, or one for each"):
        ask("generate", prompts, [SAMPLED] * 3)
    with pytest.raises(RequestError, match=r"sampling_params is \{'temperature': 1\}: give SamplingParams"):
        ask("generate", prompts, {"temperature": 1})
    assert ask("generate", prompts, [dataclasses.replace(SAMPLED, n=2), GREEDY])[2] == expected[1]


def test_prompt_may_be_a_mapping_with_text_or_token_ids(ask: Ask, llm: LLM) -> None:
    text, ids = "the cat", llm.tokenizer.encode("the cat")
    expected = [llm.generate(text, GREEDY)[0].token_ids]
    assert ask("generate", {"prompt": text}, GREEDY) == expected
    assert ask("generate", {"prompt_token_ids": ids}, GREEDY) == expected
    assert ask("generate", [{"prompt_token_ids": ids}, {"prompt": text}, text], GREEDY) == expected * 3
    for wrong, says in (
        ({}, "give one of prompt and prompt_token_ids"),
        ({"prompt": text, "prompt_token_ids": ids}, "give one of prompt and prompt_token_ids"),
        ({"prompt": text, "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompt": 5}, "prompt is 5"),
    ):
        with pytest.raises(RequestError, match=says):
            ask("generate", wrong, GREEDY)


def test_stop_none_and_top_k_minus_1_mean_off() -> None:
    assert SamplingParams(stop=None, top_k=-1) == SamplingParams()
    with pytest.raises(RequestError, match="top_k: -2 is out of range"):
        SamplingParams(top_k=-2)


def test_message_content_may_be_a_list_of_text_parts(ask: Ask, llm: LLM) -> None:
    expected = [llm.chat([{"role": "user", "content": "the cat\nsat"}], GREEDY).token_ids]
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    assert ask("chat", [{"role": "user", "content": parts}], GREEDY) == expected
    for part, says in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url': this model reads text only"),
        ({"type": "input_audio"}, "'input_audio': this model reads text only"),
        ({"text": "the"}, r"no type: give \{'type': 'text', 'text': ...\}"),
        ({"type": "text", "text": 5}, "text is 5"),
        (7, "part 7"),
    ):
        with pytest.raises(RequestError, match=says) as error:
            ask("chat", [{"role": "user", "content": [parts[0], part]}], GREEDY)
        assert error.value.parameter == "messages"


def test_closed_llm_frees_its_memory_and_refuses_further_calls(directory: Path) -> None:
    with LLM(str(directory), **OPTIONS) as llm:
        held = [weakref.ref(llm.runtime), weakref.ref(llm.engine.cache)]
        llm.generate("the cat", GREEDY)
    assert [one() for one in held] == [None, None]
    for use in (
        lambda: llm.generate("the cat"),
        lambda: llm.chat(MESSAGES),
        lambda: llm.stream("the cat"),
        lambda: llm.stream_chat(MESSAGES),
        lambda: llm.requantize("int8"),
        lambda: llm.stats(),
        lambda: llm.tokenizer,
        lambda: llm.__enter__(),
    ):
        with pytest.raises(ConfigError, match="this LLM is closed: open another one"):
            use()
    llm.close()


def test_open_stream_of_a_closed_llm_raises(directory: Path) -> None:
    llm = LLM(str(directory), **OPTIONS)
    held, stream = weakref.ref(llm.runtime), llm.stream("the cat", GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(ConfigError, match="this LLM is closed: open another one"):
        next(stream)
    assert list(stream) == []
    gc.collect()
    assert held() is None


def test_call_in_another_thread_ends_when_the_llm_is_closed(directory: Path) -> None:
    llm, errors = LLM(str(directory), **OPTIONS), list[BaseException]()
    is_running, goes_on = threading.Event(), threading.Event()

    def processor(token_ids: object, scores: Any) -> Any:
        is_running.set()
        assert goes_on.wait(30)
        return scores

    def generate() -> None:
        try:
            llm.generate("the cat", SamplingParams(max_tokens=8, ignore_eos=True, processors=[processor]))
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert is_running.wait(30)
    llm.close()
    goes_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert "this LLM is closed" in str(errors[0])


def test_request_output_asdict_is_json(llm: LLM) -> None:
    (output,) = llm.generate("the cat sat", dataclasses.replace(SAMPLED, logprobs=2, prompt_logprobs=1))
    record = json.loads(json.dumps(dataclasses.asdict(output)))
    assert record["speculation"]["skip_counts"]["prompt"] == 1
    assert sum(record["speculation"]["skip_counts"].values()) == output.speculation.plain_steps
    assert record["origins"][0] == "plain"
    assert len(record["origins"]) == len(record["token_ids"]) == len(record["logprobs"])
    stats = json.loads(json.dumps(dataclasses.asdict(llm.stats())))
    assert stats["speculation"]["skip_counts"]["prompt"] == llm.stats().num_finished


def names_in(value: Any) -> set[str]:
    """Of all fields and properties of a record and of those inside it."""
    if not dataclasses.is_dataclass(value):
        return set()
    own = {name for name in dir(value) if not name.startswith("_") and not callable(getattr(value, name))}
    return own.union(*(names_in(getattr(value, name)) for name in own))


def keys_in(value: Any) -> set[str]:
    return set(value).union(*(keys_in(one) for one in value.values())) if isinstance(value, dict) else set()


def test_json_records_use_the_attribute_names_of_python(llm: LLM) -> None:
    (output,) = llm.generate("the cat", GREEDY)
    record = output.as_dict(model="m", version="1")
    plain = set(record["speculation"]["skip_counts"])  # reasons, no names
    assert keys_in(record) - plain - names_in(output) == {"model", "version"}
    stats = llm.stats()
    assert keys_in(stats.as_dict()) - set(stats.as_dict()["speculation"]["skip_counts"]) <= names_in(stats)


def test_dir_of_the_package_lists_the_public_names() -> None:
    assert dir(paceline) == sorted(paceline.__all__)


# Names we do not have.

SAMPLING_NAMES = {
    "max_new_tokens": "max_tokens",
    "topk": "top_k",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "temperatur": "temperature",
    "include_stop_str_in_output": "include_stop",
    "logits_processors": "processors",
}
LLM_NAMES = {
    "gpu_memory_utilization": "kv_cache_gb",
    "speculative_model": "drafter",
    "num_assistant_tokens": "num_speculative_tokens",
    "n_ctx": "max_model_len",
    "thread": "threads",
    "enable_prefix_cache": "enable_prefix_caching",
}


@pytest.mark.parametrize(("given", "meant"), SAMPLING_NAMES.items())
def test_sampling_parameter_of_another_library_gets_our_name_as_hint(given: str, meant: str) -> None:
    with pytest.raises(RequestError, match=rf"{given} is no argument of SamplingParams: did you mean {meant}\?") as error:
        SamplingParams(**{given: 1})
    assert error.value.parameter == given


@pytest.mark.parametrize("open_it", [LLM, AsyncEngine.open], ids=["LLM", "AsyncEngine"])
@pytest.mark.parametrize(("given", "meant"), LLM_NAMES.items())
def test_llm_option_of_another_library_gets_our_name_as_hint(open_it: Callable[..., object], given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{given} is no argument of LLM: did you mean {meant}\?"):
        open_it("mini", **{given: 1})


def test_unknown_argument_error_lists_all_arguments() -> None:
    with pytest.raises(ConfigError, match=r"zzz is no argument of LLM: it takes .*drafter.*threads"):
        LLM("mini", zzz=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"zzz is no argument of SamplingParams: it takes .*top_k"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "meant"), [("max_tokens", "max_tokens"), ("max_new_tokens", "max_tokens"), ("temperature", "temperature")]
)
def test_sampling_parameter_passed_to_generate_gets_a_hint(ask: Ask, given: str, meant: str) -> None:
    with pytest.raises(RequestError, match=rf"{given} is no argument of generate: give sampling_params=SamplingParams\({meant}=...\)"):
        ask("generate", "the cat", **{given: 5})
    with pytest.raises(
        ConfigError, match=rf"{given} is no argument of LLM: give sampling_params=SamplingParams\({meant}=...\) to generate or chat"
    ):
        LLM("mini", **{given: 5})


def test_every_engine_setting_is_an_argument_of_llm() -> None:
    settings = {field.name: field.default for kind in (EngineConfig, SpeculationConfig) for field in dataclasses.fields(kind)}
    arguments = {name: one.default for name, one in inspect.signature(LLM).parameters.items()}
    assert arguments == settings | {"drafter_options": None, "adapters": None, "speculative_config": None}
    assert "prefill_chunk_size" in arguments


def test_names_suggested_for_other_libraries_exist() -> None:
    from paceline.spelling import OTHER_NAMES

    ours = {name for one in (LLM, SamplingParams, LLM.generate, LLM.chat) for name in inspect.signature(one).parameters}
    assert set(OTHER_NAMES.values()) <= ours
    assert not set(OTHER_NAMES) & ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("get_tokenizer", ".tokenizer"),
        ("create_chat_completion", ".chat(messages"),
        ("create_completion", ".generate(prompt"),
        ("nonsense", ""),
    ],
)
def test_method_of_another_library_gets_our_method_as_hint(llm: LLM, name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=rf"^an LLM has no {name}") as raised:
        getattr(llm, name)
    assert ours in str(raised.value)
    assert hasattr(llm, name) is False


def test_from_pretrained_and_calling_an_llm_get_a_hint(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r'an LLM has no from_pretrained: use LLM\("owner/name"\)'):
        LLM.from_pretrained("mini")
    with pytest.raises(RequestError, match=r"use llm\.generate\(prompt"):
        llm("the cat")


def test_generate_of_no_prompts_returns_an_empty_list(ask: Ask) -> None:
    assert ask("generate", [], GREEDY) == []
    assert ask("generate", [], []) == []


@pytest.mark.parametrize(("given", "ours"), [("float16", "f16"), ("bfloat16", "bf16"), ("torch.float32", "f32"), ("half", "f16")])
def test_pytorch_dtype_name_gets_our_name_as_hint(given: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"dtype is {given!r}: did you mean {ours!r}\? use one of auto"):
        LLM("mini", dtype=given)


@pytest.mark.parametrize(
    ("given", "drafter", "count"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}, "ngram", 4),
        ({"model": "[ngram]"}, "ngram", "auto"),
        ({"method": "suffix"}, "suffix", "auto"),
        ({"model": "path/to/draft", "num_speculative_tokens": 5}, "path/to/draft", 5),
        ({"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 3}, "owner/head", 3),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp", 1),
        ({"method": "medusa", "model": "owner/heads"}, "owner/heads", "auto"),
    ],
)
def test_speculative_config_of_vllm_is_accepted(given: dict[str, object], drafter: str, count: object) -> None:
    _, speculation, _ = parse_settings("mini", {"speculative_config": given, "drafter": "auto", "num_speculative_tokens": "auto"})
    assert (speculation.drafter, speculation.num_speculative_tokens) == (drafter, count)


@pytest.mark.parametrize(
    ("given", "more", "says"),
    [
        ("ngram", {}, "give a dictionary such as"),
        ({"draft_tensor_parallel_size": 2}, {}, "unknown key 'draft_tensor_parallel_size': use method, model"),
        ({"method": "frog"}, {}, "unknown method 'frog': use one of ngram"),
        ({"num_speculative_tokens": 3}, {}, "needs a model"),
        ({"method": "eagle"}, {}, "needs a model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, {}, "num_speculative_tokens is 0"),
        ({"method": "ngram"}, {"drafter": "suffix"}, "speculative_config and drafter are both given"),
    ],
)
def test_unsupported_speculative_config_is_refused_with_its_reason(given: object, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("mini", speculative_config=given, **more)  # type: ignore[arg-type]


def test_output_attribute_of_another_library_gets_a_hint(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    with pytest.raises(AttributeError, match=r"a RequestOutput has no outputs: it is one output itself, use \.text"):
        _ = output.outputs
    with pytest.raises(AttributeError, match=r"a RequestOutput has no nonsense$"):
        _ = output.nonsense
    assert copy.deepcopy(output) == pickle.loads(pickle.dumps(output)) == output


def test_async_engine_constructor_with_a_model_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not 'mini': use AsyncEngine\.open\(model\)"):
        AsyncEngine("mini")  # type: ignore[arg-type]
    for model in (None, b"mini", ["mini"]):
        with pytest.raises(ConfigError, match=r"^model is .*: give 'mini', a directory"):
            LLM(model)  # type: ignore[arg-type]
