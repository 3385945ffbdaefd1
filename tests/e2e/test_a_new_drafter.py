"""A new drafter is one class and one line of the table."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.checkpoints import write_checkpoint
from paceline import LLM, SamplingParams, drafters
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import ConfigError
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter, DrafterTraits
from paceline.speculation.request import TokenOrigin

TOY = '''
"""Guess that the last token is said again."""

from paceline.speculation.drafter import Drafter
from paceline.speculation.tree import DraftTree


class EchoDrafter(Drafter):
    name = "echo"

    def __init__(self):
        self.seen = set()
        self.rows = 0

    def propose(self, requests, budgets):
        self.seen.update(map(id, requests))
        last = [request.token_ids[-1] for request in requests]
        return [DraftTree.chain(token, [token] * budget.max_depth, self.name) for token, budget in zip(last, budgets)]

    def observe(self, rows):
        self.rows += sum(one.num_rows for one in rows)

    def release(self, request):
        self.seen.discard(id(request))
'''
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={7: 30.0, 9: 28.0}, frequency_penalty=0.3)  # runs of two tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=1)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module written just now, and its line in the table."""
    path = tmp_path / "echo.py"
    path.write_text(TOY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("echo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(drafters.MODEL_FREE_DRAFTERS, "echo", module.EchoDrafter)
    return module


def open_llm(directory: Path, drafter: str | list[str]) -> LLM:
    return LLM(str(directory), threads=2, device="cpu", kv_cache_gb=0.02, drafter=drafter)


def test_new_drafter_is_selected_by_name_and_changes_no_token(directory: Path, toy: ModuleType) -> None:
    prompts = [[5, 6, 7], [8] * 40]
    plain = open_llm(directory, "none").generate(prompts, PARAMS)
    llm = open_llm(directory, "echo")
    llm.engine.speculator.policy = FixedDraftLength(3)
    assert isinstance(llm.drafter, toy.EchoDrafter)
    assert "drafter echo" in llm.banner
    outputs = llm.generate(prompts, PARAMS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert all(output.drafter == "echo" for output in outputs)
    assert any(TokenOrigin.ACCEPTED in output.origins for output in outputs)
    assert llm.drafter.seen == set()
    assert llm.drafter.rows == sum(len(prompt) + len(output.token_ids) - 1 for prompt, output in zip(prompts, outputs, strict=True))


def test_new_drafter_works_combined_with_others(directory: Path, toy: ModuleType) -> None:
    plain = open_llm(directory, "none").generate([[5, 6, 7]], PARAMS)
    llm = open_llm(directory, ["suffix", "echo", "ngram"])
    (output,) = llm.generate([[5, 6, 7]], PARAMS)
    assert output.token_ids == plain[0].token_ids
    assert output.drafter == "suffix+echo+ngram"


class Late(Drafter):
    """Its properties can be read at load, and raise once it has drafted."""

    is_broken = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._read("late")

    @property
    def traits(self) -> DrafterTraits:  # type: ignore[override]
        return self._read(DrafterTraits())

    def _read(self, value: Any) -> Any:
        if self.is_broken:
            raise ValueError("too late")
        return value

    def propose(self, requests: Any, budgets: Any) -> Any:
        self.is_broken = True
        return [None] * len(requests)


def test_drafter_properties_that_raise_after_load_fail_no_request() -> None:
    params = SamplingParams(max_tokens=12)
    plain = LLM("mini", drafter="none", threads=1).generate("The old man", params)[0].token_ids
    llm = LLM("mini", drafter=[Late(), NgramDrafter()], threads=1)
    for options in ({}, {}, {"enabled": False}, {"drafter": "late"}):
        assert llm.generate("The old man", params, speculation=options)[0].token_ids == plain
    assert llm.drafter_name == "late+ngram"


def named(name: object = "own", **members: Any) -> Any:
    def propose(self: Any, requests: Any, budgets: Any) -> Any:
        return [None] * len(requests)

    return type("Own", (Drafter,), {"name": name, "propose": propose, **members})()


@pytest.mark.parametrize(
    ("drafter", "text"),
    [
        (named(""), "the drafter Own has the name ''"),
        (named(["a"]), r"the drafter Own has the name \['a'\]"),
        (named("none"), "that is none of none, auto, grammar"),
        (named("a+b"), "without '\\+'"),
        (named("a\nb"), "use a printable text"),
        (named(property(lambda self: 1 / 0)), r"cannot be read \(ZeroDivisionError"),
        (named(needs="x"), "needs of the drafter 'own' is 'x': use DrafterNeeds"),
        (named(traits=7), "traits of the drafter 'own' is 7: use DrafterTraits"),
        (named(traits=DrafterTraits(notices="abc")), "a list of texts"),
        ([named(), named()], "two drafters are named 'own'"),
        ([named(), "ngram"], "drafter contains Own and 'ngram'"),
    ],
)
def test_invalid_drafter_object_is_one_error_at_load(drafter: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("mini", drafter=drafter, threads=1)
