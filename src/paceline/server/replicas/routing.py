"""Choice of a replica for a request: the one that probably has its prefix cached, unless it has too much load."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

DEFAULT_MAX_LEAD = 4
PROMPT_CHARS = 512
PROMPT_TOKENS = 128
"""Length of the hashed beginning of a prompt."""
_MASK = 2**64 - 1


def choose_replica(loads: Mapping[str, int], key: int, *, max_lead: int = DEFAULT_MAX_LEAD) -> str:
    """The name of the replica for a request.

    Rendezvous hashing assigns a replica to every key as long as that replica runs, so requests with the same beginning share cached rows.
    If it has more than `max_lead` requests more than the least loaded one, the least loaded one with the highest weight is chosen.

    Args:
        loads: requests that each replica has now.
        key: of the request's beginning; of a request without one any number, with `max_lead` 0.

    Raises:
        ValueError: there is no replica.

    Source: D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates" (1998), for the rendezvous.
    """
    least = min(loads.values())
    affine = _affine(tuple(loads), key)
    if loads[affine] - least <= max_lead:
        return affine
    return max((name for name, load in loads.items() if load == least), key=lambda name: _weight(name, key))


def prefix_key(body: bytes) -> int | None:
    """Return a hash of the beginning of a request, so that requests with the same beginning get the same replica; None = it has none.

    For a chat: the messages up to the user's first one, which all later turns contain. For a prompt: its first characters or tokens.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, Mapping):
        return None
    prefix = _prefix(fields)
    return None if prefix is None else int.from_bytes(hashlib.blake2b(json.dumps(prefix).encode(), digest_size=8).digest(), "big")


def _prefix(fields: Mapping[str, Any]) -> Any:
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(given := fields.get("input"), list):  # a request to /v1/responses
        messages = given
    elif isinstance(given, str):
        prompt = given
    if isinstance(messages, list) and messages:
        users = (place for place, one in enumerate(messages) if isinstance(one, Mapping) and one.get("role") == "user")
        return [fields.get("system"), messages[: next(users, 0) + 1]]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt[:PROMPT_CHARS]
    return prompt[:PROMPT_TOKENS] if isinstance(prompt, list) and prompt else None


@lru_cache(maxsize=4096)
def _affine(names: tuple[str, ...], key: int) -> str:
    """The replica of a key; cached, since the choice among a thousand takes a millisecond."""
    return max(names, key=lambda name: _weight(name, key))


def _weight(name: str, key: int) -> int:
    """The weight of a replica for a key: 64 well-mixed bits of both.

    Source: the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood 2014).
    """
    mixed = (key ^ (_name_hash(name) * 0x9E3779B97F4A7C15)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


@lru_cache(maxsize=4096)
def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
