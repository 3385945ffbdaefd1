"""X-LoRA adapters written by PEFT, compared with PEFT's results, in a separate environment (make test-clients)."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from clients.run_foreign import run_foreign
from harness.checkpoints import write_checkpoint
from harness.parity import difference
from paceline import LLM, CheckpointError, SamplingParams
from paceline.models.adapters.xlora import read_any_adapter
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.runtimes.base import assemble_pass
from paceline.runtimes.decoder import decoder

pytest.importorskip("torch")
MODELS = {"llama": {"attention_bias": True}, "qwen3": {"tie_word_embeddings": True}, "gemma3_text": {"query_pre_attn_scalar": 24}}
BOUND = 1e-4


@pytest.fixture(scope="module")
def written(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with their adapters."""
    folder = tmp_path_factory.mktemp("xlora")
    for family, values in MODELS.items():
        write_checkpoint(folder / family / "base", family, num_hidden_layers=2, **values)
    run_foreign(clients / "peft", "write_xlora.py", folder)
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_x_lora_logits_and_tokens_equal_those_of_peft(written: Path, model: str) -> None:
    from paceline.runtimes.torch.network import TorchNetwork

    base = written / model / "base"
    config = read_model_config(base).for_context(None)
    adapters = {path.parent.name: path.parent for path in sorted((written / model).glob("*/expected.safetensors"))}
    assert len(adapters) > 10
    llm = LLM(
        str(base), drafter="suffix", num_speculative_tokens=4, backend="torch", device="cpu", dtype="f32", threads=1, kv_cache_gb=0.02,
        adapters={name: str(path) for name, path in adapters.items()},
    )  # fmt: skip
    answers = set()
    for name, directory in adapters.items():
        expected = load_file(directory / "expected.safetensors")
        ids = expected["ids"].tolist()
        network = TorchNetwork(decoder(config), config, open_weights(base, config))
        cache = network.new_cache(4)
        network.enable_xlora(cache)
        number = network.load_adapter(read_any_adapter(directory, name=name, config=config))
        plan = cache.reserve_rows(cache.new_sequence(), range(-1, len(ids) - 1), len(ids))
        logits = network.forward(*assemble_pass([plan], [ids], [range(len(ids))], [number])).logits
        assert difference(logits, expected["logits"]) <= BOUND, name
        params = SamplingParams(max_tokens=len(expected["generated"]), ignore_eos=True)
        (output,) = llm.generate([ids], params, adapter=name)
        assert output.token_ids == expected["generated"].tolist(), name
        answers.add(tuple(output.token_ids))
        assert expected["cached_rows"].item() == 2 * len(ids)  # of either pass: what later rows see is not defined
    assert len(answers) > 2
    llm.close()
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight \[3, 64\] is missing.*PEFT 0\.21\.2 omits layers"):
        read_any_adapter(written / model / "saved", name="saved", config=config)
