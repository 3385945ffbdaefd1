import math

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.sampling.params import SamplingParams, resolve_seed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 3.0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101),
        ("temperature", 1e-7),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("seed", 1.0),
        ("stop", ("a", "")),
        ("stop", ("a", 3)),
        ("stop", ""),
        ("stop", b"a"),
        ("stop", 5),
        ("stop_token_ids", (1, -1)),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("stop_token_ids", (True,)),
        ("include_stop", 1),
        ("ignore_eos", "yes"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("presence_penalty", "1"),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [(1, 1.0)]),
        ("banned_token_ids", (1.0,)),
        ("n", 0),
        ("n", 65),
        ("n", 2.0),
        ("n", 2),  # greedy
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", "5"),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", False),
        ("logprobs_mode", "cooked"),
        ("logprobs_mode", None),
        ("bad_words", 5),
        ("bad_words", ("a", "")),
        ("bad_words", ("a", ())),
        ("bad_words", ("a", 3)),
        ("bad_words", ((1, -1),)),
        ("bad_words", ((1, "a"),)),
        ("bad_words", b"abc"),
        ("bad_words", (b"abc",)),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 1.0),
        ("processors", print),
        ("processors", (print, 5)),
        ("processors", "print"),
        ("grammar", "a+"),
        ("grammar", {"type": "object"}),
    ],
)
def test_invalid_sampling_parameter_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.parameter == name
    assert name in str(refusal.value)


def test_greedy_sampling_with_n_over_1_is_refused():
    assert SamplingParams(n=64, temperature=0.5).n == 64
    assert SamplingParams(n=1).n == 1
    with pytest.raises(RequestError, match="greedy"):
        SamplingParams(n=2, temperature=0)


def test_bad_words_may_be_texts_or_token_sequences():
    params = SamplingParams(bad_words=["one", [1, 2], np.array([3]), ("two")])
    assert params.bad_words == ("one", (1, 2), (3,), "two")
    assert SamplingParams(bad_words="one").bad_words == ("one",)


def test_sampling_parameter_types_are_normalised():
    params = SamplingParams(
        temperature=1, top_k=np.int64(5), top_p=np.float32(0.5), stop="end", stop_token_ids=[3, 4], logit_bias={np.int32(1): 2}
    )
    assert (type(params.temperature), type(params.top_k), type(params.top_p)) == (float, int, float)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}))


def test_sampling_params_copy_the_lists_they_are_given():
    bias, stops = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[2] = 5.0
    stops.append("b")
    assert params.logit_bias == {1: 1.0}
    assert params.stop == ("a",)


@pytest.mark.parametrize("name", ["logit_bias", "banned_token_ids", "stop_token_ids", "bad_words"])
def test_sampling_token_id_out_of_range_is_refused_by_name(name):
    params = SamplingParams(**{name: {"logit_bias": {10: 1.0}, "bad_words": ("text", (1, 10))}.get(name, (10,))})
    params.check_vocabulary(11)
    with pytest.raises(RequestError) as refusal:
        params.check_vocabulary(10)
    assert refusal.value.parameter == name


def test_sampling_params_are_greedy_at_temperature_0():
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.5).is_greedy


def test_unseeded_request_gets_a_random_63_bit_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_seed(SamplingParams(seed=7)) == 7
    assert resolve_seed(SamplingParams(seed=0)) == 0
    assert resolve_seed(SamplingParams()) != resolve_seed(SamplingParams())
    monkeypatch.setattr("secrets.randbits", lambda bits: bits)
    assert resolve_seed(SamplingParams()) == 63
