"""Ways of sampling that are compared: temperatures 0, 0.7 and 1, some with restrictions, penalties, log-probabilities and ends."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.sampling.params import SamplingParams

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "T=0": {"logprobs": 2},
    "T=0, penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 0},
    "T=0, no repeats": {"no_repeat_ngram_size": 3, "logprobs": 1},
    "T=0, stop": {"logprobs": 0},
    "T=0.7": {"temperature": 0.7, "logprobs": 1},
    "T=0.7, top-k 20": {"temperature": 0.7, "top_k": 20, "logprobs": 0},
    "T=0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "logprobs": 0},
    "T=1": {"temperature": 1.0, "logprobs": 1},
    "T=1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05, "logprobs": 0},
    "T=1, top-k, top-p, penalties": {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logprobs": 0,
    },
    "T=1, processed logprobs": {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3, "logprobs": 2, "logprobs_mode": "processed"},
    "T=1, stop, prompt logprobs": {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": 1},
}
"""By name, what differs from the defaults."""

WITH_STOP = frozenset(name for name in SAMPLINGS if "stop" in name)
"""Those that end at a token of the text itself."""

_NOT_DATA = ("processors", "grammar")


def sampling(name: str, *, seed: int, max_tokens: int) -> SamplingParams:
    """The parameters of a request. It goes on behind the model's own end, so that short answers do not leave little to compare."""
    return SamplingParams(**SAMPLINGS[name], seed=seed, max_tokens=max_tokens, ignore_eos=True)


def params_as_dict(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, for JSON."""
    plain = SamplingParams()
    given = {one.name: getattr(params, one.name) for one in fields(params) if one.name not in _NOT_DATA}
    return {name: value for name, value in given.items() if value != getattr(plain, name)}
