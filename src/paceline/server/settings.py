"""Settings of a server."""

import ipaddress
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError

MIN_KEY_LEN = 8
SAFE_KEY_LEN = 16
MAX_KEY_LEN = 512
MAX_KEY_FILE_BYTES = 1_000_000
MAX_HEAD_BYTES = 16_384
"""Bytes of a request's target and headers."""
MAX_HEADERS = 100
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_COUNTS = (
    "max_messages", "max_prompt_chars", "max_prompts", "max_n", "max_stop", "max_stop_chars", "max_grammar_chars", "max_tools",
    "max_connections", "max_loaded",
)  # fmt: skip
_BOUNDS = {
    "port": (0, 65_535), "max_queue": (0, 100_000), **dict.fromkeys(_COUNTS, (1, 2**31 - 1)), "max_body_mb": (0, 4096),
    **dict.fromkeys(("head_timeout_s", "body_timeout_s", "send_timeout_s", "drain_s"), (0, 86_400)),
    "request_timeout_s": (0, 604_800), "grammar_timeout_s": (0, 3600),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address, access and limits of a server.

    Attributes:
        host, port: address to listen on; port 0 = any free one.
        served_model_name: the model's name in requests and answers; None = "mini", the Hub's id, or the last part of a path.
        api_keys: keys that are accepted; none = no key is needed.
        allowed_hosts: names that a Host header may have in addition to localhost; checked only on a loopback address.
        allow_origin: origins of web pages whose scripts may use the server (CORS); "*" = all.
        insecure: allow to listen on other addresses than the loopback without a key.
        adapter_loading: whether requests may load LoRA adapters from directories of this machine, and remove them; needs a key.
        tool_call_parser, reasoning_parser: format of tool calls and reasoning; "auto" = from the chat template, "none" = they are text,
            otherwise a name of the table in `parsing/registry.py`.
        max_loaded: models that are loaded at a time, of several that are served.
        unload_after: time without requests after which a model is unloaded, such as "10m"; "never" = only to make room for another.
        unknown_fields: what becomes of fields of a request that no API has: "ignore" = the log and a header of the answer name them,
            "refuse" = 400.
        max_queue: waiting samples; more are refused with 429.
        max_body_mb: megabytes of a body.
        max_messages: messages of a conversation.
        max_prompt_chars: characters of a prompt or conversation.
        max_prompts, max_n: prompts of a request, samples of each.
        max_stop, max_stop_chars: stop texts of a request, characters of each.
        max_grammar_chars: characters of a schema, grammar or tool.
        max_tools: functions of a request.
        max_connections: open connections; one more replaces the oldest idle one, or is refused.
        head_timeout_s: seconds for a request's head to arrive.
        body_timeout_s, request_timeout_s: seconds for a body to arrive, and for the answer.
        send_timeout_s: seconds that a client may read nothing of a response.
        grammar_timeout_s: seconds to compile a schema.
        drain_s: seconds for running requests at shutdown.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allow_origin: tuple[str, ...] = ()
    insecure: bool = False
    adapter_loading: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_loaded: int = 1
    unload_after: str = "never"
    unknown_fields: str = "ignore"
    max_queue: int = 64
    max_body_mb: float = 8.0
    max_messages: int = 4096
    max_prompt_chars: int = 4_000_000
    max_prompts: int = 64
    max_n: int = 16
    max_stop: int = 16
    max_stop_chars: int = 1000
    max_grammar_chars: int = 1_000_000
    max_tools: int = 256
    max_connections: int = 512
    head_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    send_timeout_s: float = 60.0
    grammar_timeout_s: float = 5.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.host or not isinstance(self.host, str):
            raise ConfigError(f"host is {self.host!r}: use an address or a name, such as 127.0.0.1")
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}: use a number from {low} to {high}")
        if self.unknown_fields not in ("ignore", "refuse"):
            raise ConfigError(f"unknown_fields is {self.unknown_fields!r}: use ignore or refuse")
        for key in self.api_keys:
            check_key(key)
        for origin in self.allow_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allow_origin is {origin!r}: use an origin without a path, such as http://localhost:3000, or *")
        if self.unload_after_s < math.inf and self.adapter_loading:
            raise ConfigError(f"unload_after is {self.unload_after!r}, and adapters that requests load would be lost: leave it out")
        if self.adapter_loading and not self.api_keys:
            raise ConfigError("adapter_loading lets requests read directories of this machine and needs a key: give --api-key-file")
        if not self.is_loopback and not self.api_keys and not self.insecure:
            raise ConfigError(
                f"host {self.host} can be reached from other machines and there is no key: give --api-key-file, listen on 127.0.0.1, "
                "or allow it with --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def notices(self) -> list[str]:
        """Lines for the person who starts the server."""
        shortest = min(map(len, self.api_keys), default=SAFE_KEY_LEN)
        if shortest >= SAFE_KEY_LEN:
            return []
        return [f"a key has {shortest} characters: use {SAFE_KEY_LEN} or more where others can reach the server"]

    @property
    def unload_after_s(self) -> float:
        """Return `unload_after` in seconds; infinite = never.

        Raises:
            ConfigError: it is no duration.
        """
        try:
            return math.inf if self.unload_after == "never" else seconds_of(self.unload_after)
        except ValueError:
            raise ConfigError(f"unload_after is {self.unload_after!r}: use a time such as 10m, 1h30m or 300s, or never") from None

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1_000_000)


def seconds_of(duration: str | float) -> float:
    """Return the seconds of a duration as Ollama and Go write it: 300, "300", "5m" or "1h30m"; negative = infinite.

    Raises:
        ValueError: it is none.
    """
    text = str(duration).strip()
    size = text.removeprefix("-")
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(size)) if _DURATION.fullmatch(size) else float(size)
    if math.isnan(seconds):
        raise ValueError(text)
    return math.inf if seconds < 0 or (seconds and size != text) else seconds


def read_keys(path: Path) -> tuple[str, ...]:
    """Read keys from a file, one a line, without lines that begin with #; ConfigError if it has none."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read ({error.strerror}): give a text file with a key on each line") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"the key file {path} has more than {MAX_KEY_FILE_BYTES} bytes: give a text file with a key on each line")
    keys = keys_in(content.decode("utf-8", "replace"), f"of the key file {path}")
    if not keys:
        raise ConfigError(f"the key file {path} has no key: write one on each line")
    return keys


def keys_in(text: str, origin: str) -> tuple[str, ...]:
    """Read keys from a text, one a line.

    Args:
        origin: source of the lines, for errors.

    Raises:
        ConfigError: one cannot be used.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if (key := line.strip()) and not key.startswith("#"):
            check_key(key, f"line {number} {origin}")
            keys.append(key)
    return tuple(keys)


def check_key(key: str, place: str = "api_keys") -> None:
    """Check that a header can hold a key and that it is long enough; the error does not repeat it.

    Args:
        place: source of the key, for errors.

    Raises:
        ConfigError: it cannot be used.
    """
    if not key.isascii() or not key.isprintable() or " " in key or not MIN_KEY_LEN <= len(key) <= MAX_KEY_LEN:
        allowed = f"use {MIN_KEY_LEN} to {MAX_KEY_LEN} printable ASCII characters without spaces"
        raise ConfigError(f"{place} holds a key of {len(key)} characters, which cannot be used: {allowed}")
