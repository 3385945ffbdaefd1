"""A GGUF file that is quantised further: one matrix at a time, and not converted at all where the cache has the result."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.gguf_checkpoints import write_gguf
from paceline.config import QuantOptions
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.gguf import stored_tensor
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.storage.quantized_cache import CACHE_FOLDER, quantized_weights
from paceline.models.weights import GroupedTensor, Weights, as_float32, half_split_order

pytest.importorskip("gguf")

INT4 = QuantOptions(bits=4, embedding_bits=4, lm_head_bits=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(write_checkpoint(tmp_path / "hf", "llama"), tmp_path / "model.gguf", "Q8_0")


def opened(path: Path, *, regroup: bool = False) -> Weights:
    return open_weights(path, read_model_config(path), regroup=regroup)


def test_quantised_gguf_cache_is_separate_for_regrouped_weights(path: Path, tmp_path: Path) -> None:
    for regroup in (False, True, False, True):
        weights = opened(path, regroup=regroup)
        found = quantized_weights(weights, INT4, tmp_path, files=[path])
        assert not weights._tensors
        expected = quantized_weights(weights, INT4, None)
        for name in found:
            assert np.array_equal(as_float32(found[name]), as_float32(expected[name]))
        assert isinstance(found["layers.0.q_proj.weight"], GroupedTensor)
    assert len(list((tmp_path / CACHE_FOLDER).iterdir())) == 2


def test_cached_quantised_gguf_is_not_converted_again(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized_weights(opened(path), INT4, tmp_path, files=[path])

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a matrix was converted again")

    monkeypatch.setattr(stored_tensor, "convert_to_grouped_matrix", fail)
    found = quantized_weights(opened(path), INT4, tmp_path, files=[path])
    assert {found.tensor_info(name).bits for name in found} == {None, 4}
    assert all(found[name].shape == found.tensor_info(name).shape for name in found)


@pytest.mark.parametrize("block_type", ["BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("regroup", [False, True])
def test_gguf_tensor_sizes_are_known_before_conversion(tmp_path: Path, block_type: str, regroup: bool) -> None:
    path = write_gguf(write_checkpoint(tmp_path / "hf", "phi3"), tmp_path / "model.gguf", block_type)
    weights = opened(path, regroup=regroup)
    expected = {name: weights.tensor_info(name) for name in weights}
    assert not weights._tensors
    assert expected == {name: Weights(weights).tensor_info(name) for name in weights}


def test_gguf_cache_key_depends_on_block_type_and_head_layout(path: Path) -> None:
    """Blocks of Q4_0 and IQ4_NL have the same size, and heads of other widths another order of rows."""
    weights = opened(path)
    name = "layers.0.q_proj.weight"
    source = weights._sources[name]
    before = [array.tobytes() for array in weights.source_arrays(name)]
    for changed in (
        replace(source, row_order=partial(half_split_order, 64, 8, 8)),
        replace(source, row_order=partial(half_split_order, 64, 16, 8)),
        replace(source, column_order=partial(half_split_order, 64, 16, 8)),
        replace(source, tensor=replace(source.tensor, block_type=BLOCK_TYPES[20])),
    ):
        weights._sources[name] = changed
        assert [array.tobytes() for array in weights.source_arrays(name)] != before
