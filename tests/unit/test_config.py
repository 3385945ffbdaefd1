"""Settings are checked when they are created; errors name what is allowed."""

import math
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.cli.options import Settings
from paceline.config import EngineConfig, SpeculationConfig, cache_directory
from paceline.drafters import LoadedTarget
from paceline.errors import ConfigError
from paceline.machine import performance_processors, usable_processors


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numerics", "EXACT"),
        ("numerics", None),
        ("dtype", "int8"),
        ("dtype", ""),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", None),
        ("device", "gpu"),
        ("threads", 0),
        ("threads", 1.0),
        ("threads", True),
        ("threads", 1025),
        ("max_model_len", 1),
        ("max_model_len", -5),
        ("max_model_len", "512"),
        ("max_num_seqs", 0),
        ("max_num_seqs", None),
        ("prefill_chunk_size", 0),
        ("prefill_chunk_size", 4097),
        ("kv_cache_gb", 0),
        ("kv_cache_gb", -1.0),
        ("kv_cache_gb", math.inf),
        ("kv_cache_gb", math.nan),
        ("kv_cache_gb", "2"),
        ("kv_cache_gb", True),
    ],
)
def test_invalid_engine_setting_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig(**{name: value})
    assert repr(value) in str(caught.value)
    assert ": use " in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("revision", 5), ("hf_token", b"hf_x"), ("offline", "x"), ("enable_prefix_caching", None)])
def test_setting_of_the_wrong_type_is_refused_without_showing_the_hf_token(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*: use ") as caught:
        EngineConfig(**{name: value})
    assert "hf_x" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 65),
        ("num_speculative_tokens", True),
        ("num_speculative_tokens", 4.0),
        ("num_speculative_tokens", "4"),
        ("num_speculative_tokens", None),
        ("tree_width", 0),
        ("tree_width", 9),
        ("drafter", ""),
        ("drafter", ()),
        ("drafter", ("ngram", "")),
        ("drafter", ("ngram", 5)),
        ("drafter", 5),
        ("drafter", None),
        ("acceptance", "typical"),
    ],
)
def test_invalid_speculation_setting_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SpeculationConfig(**{name: value})
    assert repr(value) in str(caught.value)


def test_valid_settings_are_kept_unchanged() -> None:
    config = EngineConfig(
        threads=1, max_model_len=2, kv_cache_gb=0.001, max_num_seqs=1024, prefill_chunk_size=4096, dtype="bf16", device="cuda"
    )
    assert (config.num_threads, config.kv_cache_gb) == (1, 0.001)
    assert EngineConfig(kv_cache_gb=2).kv_cache_gb == 2
    for count in ("auto", 1, 64):
        assert SpeculationConfig(num_speculative_tokens=count, drafter=("ngram", "a/b"), tree_width=8).num_speculative_tokens == count


def test_threads_default_to_the_performance_processors() -> None:
    assert 1 <= EngineConfig().num_threads == performance_processors() <= usable_processors()


def test_threads_are_capped_at_the_usable_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.config.usable_processors", lambda: 3)
    monkeypatch.setattr("paceline.config.performance_processors", lambda: 2)
    assert [EngineConfig(threads=count).num_threads for count in (None, 1, 3, 64)] == [2, 1, 3, 3]
    (notice,) = EngineConfig(threads=64).notices
    assert "threads is 64, but only 3 are used" in notice
    for settled in (EngineConfig(), EngineConfig(threads=3)):
        assert settled.notices == ()


def test_cache_directory_follows_the_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/a/b")
    assert cache_directory() == Path("/a/b")
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_directory() == Path("/c/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/someone")
    assert cache_directory() == Path("/someone/.cache/paceline")


def test_cache_directory_of_a_user_without_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PACELINE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory() is None


def test_repr_of_settings_does_not_show_the_hf_token() -> None:
    engine, nothing = EngineConfig(hf_token="hf_secret"), cast(Any, None)
    target = LoadedTarget(
        directory=Path("model"), runtime=nothing, cache=nothing, tokenizer=nothing, vocab_size=8, max_model_len=8, engine=engine,
        speculation=SpeculationConfig(),
    )  # fmt: skip
    for record in (engine, target, Settings(engine, nothing, nothing, False)):
        assert "hf_secret" not in repr(record)
        assert "hf_secret" not in str(record)
