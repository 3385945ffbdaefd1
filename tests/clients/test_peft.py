"""Adapters written by PEFT, compared with PEFT's results, in a separate environment (make test-clients)."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness import expert_checkpoints, gemma4_checkpoints, hybrid_checkpoints
from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.parity import difference, prompt_logits
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.merge import MergedWeights, merged_config
from paceline.models.adapters.read import read_adapter
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import WeightType
from paceline.models.weights import as_float32
from paceline.runtimes.base import FloatArray, Network, assemble_pass
from paceline.runtimes.decoder import decoder

pytest.importorskip("torch")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    **{name: (name, {}) for name in ("mistral", "qwen2", "qwen3", "phi3", "glm4", "olmo2", "exaone4", "granite", "seed_oss", "smollm3")},
    **{name: (name, {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}) for name in ("gemma2", "gemma3_text")},
    "gemma4": ("gemma4_text", gemma4_checkpoints.GEMMA4),
    **expert_checkpoints.CASES,
    **hybrid_checkpoints.CASES,
}
WEIGHTS, LOGITS = 1e-6, 1e-4


@pytest.fixture(scope="module")
def written(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The folder of a model, once its adapters are there."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, (family, values) in MODELS.items():
        write_checkpoint(folder / name / "base", family, **values)
    script = Path(__file__).with_name("write_adapters.py")
    with (folder / "errors").open("w+b") as errors:
        process = subprocess.Popen([clients / "peft" / "bin" / "python", script, folder], stdout=subprocess.DEVNULL, stderr=errors)

        def of(model: str) -> Path:
            while not (folder / model / "done").exists():
                assert process.poll() in (None, 0), (folder / "errors").read_text()[-2000:]
                time.sleep(0.1)
            return folder / model

        yield of
        process.kill()
        process.wait()


def logits_beside(network: Network, adapter: Adapter, ids: Sequence[int]) -> FloatArray:
    """Logits of all rows of a text, with an unmerged adapter."""
    number, cache = network.load_adapter(adapter), network.new_cache(8)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, len(ids) - 1), len(ids))
    return network.forward(*assemble_pass([plan], [ids], [range(len(ids))], [number])).logits.copy()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_merged_weights_and_logits_equal_those_of_peft(written: Callable[[str], Path], model: str) -> None:
    from paceline.runtimes.native.network import NativeNetwork
    from paceline.runtimes.torch.network import TorchNetwork

    skip_without_kernels("native")
    folder = written(model)
    base = folder / "base"
    config, adapters = read_model_config(base), sorted(path.parent for path in folder.glob("*/adapter_config.json"))
    assert adapters
    for adapter in adapters:
        weights = open_weights(base, config)
        read = read_adapter(adapter, name=adapter.name, config=config, weights=weights)
        own, merged = merged_config(config, read), MergedWeights(weights, config, read, weight_type=WeightType.F32)
        if (adapter / "merged").exists():
            theirs = open_weights(adapter / "merged", read_model_config(adapter / "merged"))
            assert max(np.abs(as_float32(merged[name]) - as_float32(theirs[name])).max() for name in theirs) <= WEIGHTS, adapter.name
        expected = load_file(adapter / "expected.safetensors")
        network = NativeNetwork(decoder(own), own, merged, num_threads=1, max_model_len=64, compute_type=WeightType.F32, packed=None)
        assert difference(prompt_logits(network, expected["ids"].tolist()), expected["logits"]) <= LOGITS, adapter.name
        for beside in (
            NativeNetwork(
                decoder(config), config, weights, num_threads=1, max_model_len=64, compute_type=WeightType.F32, supports_adapters=True
            ),
            TorchNetwork(decoder(config), config, weights),
        ):
            logits = logits_beside(beside, read, expected["ids"].tolist())
            assert difference(logits, expected["logits"]) <= LOGITS, (adapter.name, type(beside).__name__)
