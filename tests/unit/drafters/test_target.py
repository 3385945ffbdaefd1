"""How heads are quantised next to a target."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.target import LoadedTarget
from paceline.models.config import WeightType
from paceline.models.weights import Tensor, Weights


def loaded_target(weight_bits: float, draft_quantization: str, device: str = "cpu") -> LoadedTarget:
    absent: Any = None
    runtime: Any = SimpleNamespace(capabilities=SimpleNamespace(device=device))
    return LoadedTarget(
        directory=Path(), runtime=runtime, cache=absent, tokenizer=absent, vocab_size=32, max_model_len=64, weight_bits=weight_bits,
        engine=EngineConfig(), speculation=SpeculationConfig(draft_quantization=draft_quantization),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("weight_bits", "setting", "device", "bits"),
    [
        (4.5, "auto", "cpu", 4), (16.0, "auto", "cpu", 8), (32.0, "auto", "cpu", None), (4.5, "auto", "cuda", None),
        (4.5, "none", "cpu", None), (32.0, "int4", "cpu", 4), (4.5, "int8", "cpu", 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("uses_target_lm_head", [False, True])
def test_heads_are_quantised_as_draft_models_and_copy_the_lm_head_only_on_request(
    uses_target_lm_head: bool, weight_bits: float, setting: str, device: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", "0")
    values = np.ones((32, 64), np.float32)
    weights = Weights({name: Tensor(values, WeightType.F32, values.shape) for name in ("fc.weight", "lm_head.weight")})
    target = loaded_target(weight_bits, setting, device)
    found = target.quantize(weights, (), uses_target_lm_head=uses_target_lm_head)
    assert target.copies_lm_head == (setting.startswith("int"))
    is_kept = bits is None or (uses_target_lm_head and setting == "auto")
    assert (found.tensor_info("fc.weight").bits, found.tensor_info("lm_head.weight").bits) == (bits, None if is_kept else 8)
