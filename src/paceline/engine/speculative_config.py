"""Converts vLLM's dictionary `speculative_config` to our settings."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError

_DRAFTER_OF_METHOD = {"ngram": "ngram", "[ngram]": "ngram", "suffix": "suffix", "medusa": "medusa", "mtp": "mtp"}
"""Our names of methods that need no separate model."""
_METHODS_WITH_MODEL = ("draft_model", "medusa", "mtp", "eagle", "eagle3", "dflash", "dspark", "p_eagle", "pard")
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


def from_speculative_config(given: object) -> dict[str, Any]:
    """Return our settings `drafter` and `num_speculative_tokens` for the dictionary.

    `prompt_lookup_max` and `prompt_lookup_min` are accepted but ignored, because our n-gram drafter compares matches of all lengths.

    Args:
        given: {"method", "model", "num_speculative_tokens"}; a key whose value is None is ignored.

    Raises:
        ConfigError: `given` is not a dictionary, or has an unknown key or method.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f'speculative_config is {given!r}: give a dictionary such as {{"method": "ngram", "num_speculative_tokens": 4}}')
    values = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in values if name not in _KEYS]:
        raise ConfigError(f"speculative_config has {unknown[0]!r}, which is not served: use {', '.join(_KEYS)}, or our drafter=...")
    settings: dict[str, Any] = {"drafter": _drafter(values.get("method"), values.get("model"))}
    if "num_speculative_tokens" in values:
        settings["num_speculative_tokens"] = values["num_speculative_tokens"]
    return settings


def _drafter(method: object, model: object) -> str:
    if isinstance(model, str) and model in ("ngram", "[ngram]") and method is None:
        return "ngram"
    name = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    if name in ("ngram", "[ngram]", "suffix") or (model is None and name in _DRAFTER_OF_METHOD):
        return _DRAFTER_OF_METHOD[str(name)]
    if name is not None and name not in _METHODS_WITH_MODEL:
        known = ", ".join(dict.fromkeys((*_DRAFTER_OF_METHOD, *_METHODS_WITH_MODEL)))
        raise ConfigError(f"speculative_config: method is {method!r}, which there is not: use one of {known}")
    if not isinstance(model, str) or not model:
        raise ConfigError("speculative_config needs a model: give the directory or id of a draft model or of heads, or the method 'ngram'")
    return model
