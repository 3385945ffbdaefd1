"""Sampling parameters that a model recommends, and those of requests that leave them open."""

import pytest

from paceline.sampling.defaults import CHAT_TEMPERATURE, SamplingDefaults
from paceline.sampling.params import SamplingParams

OWN = SamplingDefaults({"temperature": 0.6, "top_p": 0.95})


def test_chat_defaults_are_recommended_values_or_temperature_0_7() -> None:
    assert OWN.chat == {"temperature": 0.6, "top_p": 0.95}
    assert SamplingDefaults().chat == {"temperature": CHAT_TEMPERATURE}
    assert SamplingDefaults({"top_p": 0.9}).chat == {"temperature": CHAT_TEMPERATURE, "top_p": 0.9}


def test_completion_defaults_are_recommended_or_documented_values() -> None:
    documented = {"temperature": 0.8, "top_k": 40}
    assert OWN.completion_defaults(documented) == {"temperature": 0.6, "top_p": 0.95}
    assert SamplingDefaults().completion_defaults(documented) == documented
    assert SamplingDefaults({"min_p": 0.1}).completion_defaults(documented) == {"temperature": 0.8, "min_p": 0.1}


def test_given_sampling_parameters_override_recommended_ones() -> None:
    params = OWN.apply_chat_defaults(SamplingParams(temperature=0.0, max_tokens=5), explicit={"temperature"})
    assert params == SamplingParams(temperature=0.0, top_p=0.95, max_tokens=5)


@pytest.mark.parametrize("pair", [("temperature", -1.0), ("top_p", 0.0), ("min_p", 7.0), ("top_k", 0.5), ("unknown", 1.0)])
def test_invalid_recommended_sampling_value_is_ignored(pair: tuple[str, float]) -> None:
    assert SamplingDefaults.from_recommended([pair, ("repetition_penalty", 1.1)]).recommended == {"repetition_penalty": 1.1}


def test_sampling_description_marks_the_values_of_the_model() -> None:
    assert OWN.describe(OWN.apply_chat_defaults(SamplingParams(), ())) == "sampling: temperature 0.6, top_p 0.95 (the model's own)"
    assert OWN.describe(SamplingParams()) == "sampling: greedy"
    assert SamplingDefaults().describe(SamplingParams(temperature=0.7, top_k=5)) == "sampling: temperature 0.7, top_k 5"
