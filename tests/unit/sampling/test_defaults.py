"""Sampling parameters that a model recommends, and those of requests that leave them open."""

import pytest

from paceline.sampling.defaults import CHAT_TEMPERATURE, SamplingDefaults
from paceline.sampling.params import SamplingParams

OWN = SamplingDefaults({"temperature": 0.6, "top_p": 0.95})


def test_a_conversation_has_the_recommended_parameters_or_one_temperature() -> None:
    assert OWN.chat == {"temperature": 0.6, "top_p": 0.95}
    assert SamplingDefaults().chat == {"temperature": CHAT_TEMPERATURE}
    assert SamplingDefaults({"top_p": 0.9}).chat == {"temperature": CHAT_TEMPERATURE, "top_p": 0.9}


def test_a_text_has_the_recommended_parameters_or_the_documented_ones() -> None:
    documented = {"temperature": 0.8, "top_k": 40}
    assert OWN.completion(documented) == {"temperature": 0.6, "top_p": 0.95}
    assert SamplingDefaults().completion(documented) == documented
    assert SamplingDefaults({"min_p": 0.1}).completion(documented) == {"temperature": 0.8, "min_p": 0.1}


def test_given_parameters_are_kept() -> None:
    params = OWN.fill_chat(SamplingParams(temperature=0.0, max_tokens=5), given={"temperature"})
    assert params == SamplingParams(temperature=0.0, top_p=0.95, max_tokens=5)


@pytest.mark.parametrize("pair", [("temperature", -1.0), ("top_p", 0.0), ("min_p", 7.0), ("top_k", 0.5), ("unknown", 1.0)])
def test_a_recommendation_that_no_parameter_may_have_is_left_out(pair: tuple[str, float]) -> None:
    assert SamplingDefaults.from_recommended([pair, ("repetition_penalty", 1.1)]).recommended == {"repetition_penalty": 1.1}


def test_a_line_says_what_is_used_and_whether_it_is_the_models_own() -> None:
    assert OWN.describe(OWN.fill_chat(SamplingParams(), ())) == "sampling: temperature 0.6, top_p 0.95 (the model's own)"
    assert OWN.describe(SamplingParams()) == "sampling: greedy"
    assert SamplingDefaults().describe(SamplingParams(temperature=0.7, top_k=5)) == "sampling: temperature 0.7, top_k 5"
