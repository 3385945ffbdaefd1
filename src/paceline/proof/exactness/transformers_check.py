"""Compare our logits with those of transformers in float32 for the same tokens (teacher forcing)."""

import importlib.util
import math
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import is_interrupt
from paceline.machine import available_memory_bytes
from paceline.models.checkpoint import is_gguf, read_model_config
from paceline.models.config import WeightType
from paceline.models.families.table import FAMILIES
from paceline.models.multimodal import text_model_fields
from paceline.models.quantized_formats.table import find_quantized_format
from paceline.models.tensor_names import tensor_shapes
from paceline.proof.exactness.compare import finite
from paceline.proof.exactness.engine_under_test import EngineUnderTest, RowRecorder, max_abs_difference
from paceline.runtimes.base import FloatArray
from paceline.sampling.params import SamplingParams
from paceline.small_files import read_json

NUM_TEXTS = 3
_TOKENS = 24
_TOLERANCE = {WeightType.F32: 1e-3, WeightType.F16: 2e-2, WeightType.BF16: 1e-1}
"""Standard deviations of a row that a logit may be off by, by the type that weights are stored or computed in."""
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True, slots=True)
class OutputRows:
    """A greedy output and the row of logits that each of its tokens was chosen from, [V] float32."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    rows: Sequence[FloatArray]


@dataclass(frozen=True, slots=True)
class TransformersComparison:
    """Result of the comparison with transformers.

    Attributes:
        status: "agrees", "differs" or "not_compared".
        reason: why it was not compared.
        positions: rows compared.
        argmax_equal: of them, those whose most probable token is the same.
        near_ties: those where it is another one, and transformers' two scores are closer than the tolerance.
        differing: the others.
        max_abs_difference: of any logit; logits are compared as they are, before any processor.
        largest_margin: of transformers' scores, where the most probable token is another one.
        tolerance: standard deviations of a row.
    """

    status: str
    reason: str = ""
    positions: int = 0
    argmax_equal: int = 0
    near_ties: int = 0
    differing: int = 0
    max_abs_difference: float = 0.0
    largest_margin: float = 0.0
    tolerance: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {one.name: finite(getattr(self, one.name)) for one in fields(self)}


def reason_not_comparable(directory: Path, engine: EngineConfig) -> str | None:
    """Return why transformers cannot run this target; None = it can."""
    if is_gguf(directory):
        return "a GGUF file is not the model that transformers would load"
    if engine.quantization != "none":
        return "quantised weights are another model"
    stored = _quantised_as(directory)
    if stored is not None:
        return f"its weights are stored quantised ({stored}), which transformers multiplies otherwise"
    if engine.merge_adapter is not None:
        return "with an adapter merged it is another model"
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    needed = 4 * sum(map(math.prod, tensor_shapes(read_model_config(directory)).values()))
    if needed > _SHARE_OF_MEMORY * available_memory_bytes():
        return f"its float32 weights take {needed / 1e9:.3g} GB, which are not free"
    return None


def _quantised_as(directory: Path) -> str | None:
    """Return the quantisation of a checkpoint's matrices; None = they are not quantised."""
    path, family = directory / "config.json", FAMILIES[read_model_config(directory).family]
    values = text_model_fields(read_json(path) or {})
    quantized_format = find_quantized_format(values, path, family)
    if quantized_format is not None:
        return quantized_format.name
    return "MXFP4" if family.has_mxfp4_experts and values.get("quantization_config") else None


def decode_with_rows(engine_under_test: EngineUnderTest, prompts: Sequence[Sequence[int]]) -> list[OutputRows]:
    """Decode a few prompts greedily and keep the rows."""
    found: list[OutputRows] = []
    for prompt in dict.fromkeys(map(tuple, prompts)):
        if len(found) == NUM_TEXTS:
            break
        recorder = RowRecorder(kept=frozenset(range(_TOKENS)))
        output = engine_under_test.decode_plain(prompt, SamplingParams(max_tokens=_TOKENS, ignore_eos=True), recorder)
        found.append(OutputRows(prompt, output.token_ids, [recorder.rows[index] for index in range(len(output.token_ids))]))
    return found


def compare_with_transformers(directory: Path, texts: Sequence[OutputRows], weight_type: WeightType) -> TransformersComparison:
    """Load the target in transformers and compare rows. The caller has freed its own weights.

    Args:
        weight_type: the narrower of the types that weights are stored and computed in.
    """
    try:
        theirs = _rows_of_transformers(directory, texts)
    except BaseException as error:  # another library's, for whatever reason
        if is_interrupt(error):
            raise
        return TransformersComparison("not_compared", f"transformers could not load or run it ({type(error).__name__}: {error})")
    return compare_rows([(one.rows, rows) for one, rows in zip(texts, theirs, strict=True)], _TOLERANCE[weight_type])


def compare_rows(pairs: Sequence[tuple[Sequence[FloatArray], FloatArray]], tolerance: float) -> TransformersComparison:
    """Compare two sets of rows.

    Args:
        pairs: for each text our rows, and theirs [rows, V or more].
        tolerance: standard deviations of a row.
    """
    positions = equal = near = 0
    largest, worst_margin = 0.0, 0.0
    for ours, theirs in pairs:
        for own, other in zip(ours, theirs, strict=True):
            row = other[: len(own)]
            positions += 1
            largest = max(largest, max_abs_difference(own, row))
            margin = float(row.max() - row[int(own.argmax())])
            worst_margin = max(worst_margin, margin)
            equal += margin <= 0.0
            near += 0.0 < margin < tolerance * float(row.std())
    differing = positions - equal - near
    status = "differs" if differing else "agrees"
    return TransformersComparison(status, "", positions, equal, near, differing, largest, worst_margin, tolerance)


def _rows_of_transformers(directory: Path, texts: Sequence[OutputRows]) -> list[FloatArray]:
    """Return the rows of logits before each output token, [rows, V] for each text."""
    import torch
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # progress of loading
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        model.train(mode=False)
    found = []
    for text in texts:
        ids = [*text.prompt_token_ids, *text.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        start = len(text.prompt_token_ids) - 1
        found.append(np.asarray(logits[start : start + len(text.token_ids)].float().numpy(), np.float32))
    return found
