import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from harness.always_drafts import draft_always
from harness.fake_llm import FakeLLM
from harness.quick_profiles import quick_profiles


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """A fresh class, so that a test may change how it fails; in place of the real one."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")  # the command sets it if it is unset; monkeypatch restores it
    fake = type("ThisTestsLLM", (FakeLLM,), {"made": []})
    module = ModuleType("paceline.llm")
    module.LLM = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.llm", module)
    return fake


@pytest.fixture
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny target is too fast for drafting to pay."""
    draft_always(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def profiles_are_quick() -> Iterator[None]:
    """Tests of profiles themselves are tests/unit/runtimes/test_cost.py."""
    with quick_profiles():
        yield
