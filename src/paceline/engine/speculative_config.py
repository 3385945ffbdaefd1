"""vLLM's dictionary `speculative_config`, in our settings."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError

_OWN_NAMES = {"ngram": "ngram", "[ngram]": "ngram", "suffix": "suffix", "medusa": "medusa", "mtp": "mtp"}
"""Methods that need no model of their own, and our drafters."""
_OF_MODEL = ("draft_model", "medusa", "mtp", "eagle", "eagle3", "dflash", "dspark", "p_eagle", "pard")
_SERVED = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


def from_speculative_config(given: object) -> dict[str, Any]:
    """Return the settings `drafter` and `num_speculative_tokens` of a dictionary.

    `prompt_lookup_max` and `prompt_lookup_min` are taken and not used: our n-gram drafter compares matches of all lengths.

    Args:
        given: {"method", "model", "num_speculative_tokens"}; keys whose value is None count as absent.

    Raises:
        ConfigError: it is no such dictionary, or names a method that there is not.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f'speculative_config is {given!r}: give a dictionary such as {{"method": "ngram", "num_speculative_tokens": 4}}')
    values = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in values if name not in _SERVED]:
        raise ConfigError(f"speculative_config has {unknown[0]!r}, which is not served: use {', '.join(_SERVED)}, or our drafter=...")
    settings: dict[str, Any] = {"drafter": _drafter(values.get("method"), values.get("model"))}
    if "num_speculative_tokens" in values:
        settings["num_speculative_tokens"] = values["num_speculative_tokens"]
    return settings


def _drafter(method: object, model: object) -> str:
    if isinstance(model, str) and model in ("ngram", "[ngram]") and method is None:
        return "ngram"
    name = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    if name in ("ngram", "[ngram]", "suffix") or (model is None and name in _OWN_NAMES):
        return _OWN_NAMES[str(name)]
    if name is not None and name not in _OF_MODEL:
        known = ", ".join(dict.fromkeys((*_OWN_NAMES, *_OF_MODEL)))
        raise ConfigError(f"speculative_config: method is {method!r}, which there is not: use one of {known}")
    if not isinstance(model, str) or not model:
        raise ConfigError("speculative_config needs a model: give the directory or id of a draft model or of heads, or the method 'ngram'")
    return model
