"""Gemma 4 assistants equal those of transformers after a prompt, over three steps of their recurrence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.exact_targets import skip_without_kernels
from harness.gemma4_assistants import CLUSTERS, VOCAB_SIZE, mended, write_assistant, write_target
from harness.gemma4_checkpoints import FULL, SLIDING, WINDOW
from paceline.drafters.gemma4_assistant.checkpoint import load_assistant
from paceline.drafters.gemma4_assistant.network import FEATURE, AssistantNetwork, TreeLevelInput
from paceline.drafters.head_files import HeadFiles
from paceline.models.config import WeightType
from paceline.runtimes.base import FloatArray, Numerics, assemble_pass
from paceline.runtimes.load import RuntimeOptions, load_network

torch = pytest.importorskip("torch")

STEPS = 3
BOUND = 1e-4
KINDS = {"e2b": False, "unified": True}
HEADS: dict[str, dict[str, Any]] = {"dense": {}, "clusters": CLUSTERS}


@dataclass(frozen=True)
class Pair:
    target: Path
    assistant: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    @cache
    def pair(kind: str, head: str) -> Pair:
        folder, is_unified = tmp_path_factory.mktemp(f"{kind}-{head}"), KINDS[kind]
        target = write_target(folder / "target", is_unified=is_unified)
        return Pair(target, write_assistant(folder / "assistant", is_unified=is_unified, **HEADS[head]))

    return pair


@cache
def of_transformers(
    pair: Pair, prompt: tuple[int, ...], root: int, *, sees_causal_window: bool
) -> list[tuple[int, FloatArray, FloatArray]]:
    """Each step's token, the logits after it [V], and what is fed to the next step [E]."""
    from transformers import AutoModelForCausalLM

    with mended(), torch.inference_mode():
        target, assistant = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in (pair.target, pair.assistant))
        if sees_causal_window:  # that code sees two rows more
            hidden = torch.zeros(1, 1, 1, len(prompt))
            hidden[..., : len(prompt) - WINDOW + 1] = -torch.inf
            assistant.create_attention_masks = lambda *_: {FULL: torch.zeros_like(hidden), SLIDING: hidden}
        output = target(torch.tensor([list(prompt)]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        feature, token, steps = output.hidden_states[-1][:, -1:], root, list[tuple[int, FloatArray, FloatArray]]()
        for _ in range(STEPS):
            embedding = target.get_input_embeddings()(torch.tensor([[token]]))
            said = assistant(
                inputs_embeds=torch.cat([embedding, feature], -1),
                position_ids=torch.tensor([[len(prompt)]]),
                shared_kv_states=output.shared_kv_states,
            )
            feature = said.last_hidden_state
            steps.append((token, said.logits[0, 0].numpy(), feature[0, 0].numpy()))
            token = int(said.logits[0, 0].argmax())
    return steps


def opened(pair: Pair, backend: str, prompt: list[int]) -> tuple[AssistantNetwork, Any, FloatArray]:
    """An assistant, the cached prompt, and the target's final hidden state after it [1, E].

    A longer text came before, so that the blocks of windows are others than those of the whole text.
    """
    skip_without_kernels(backend)
    options = RuntimeOptions(numerics=Numerics.FAST, dtype=WeightType.F32, device="cpu", backend=backend)
    runtime = load_network(pair.target, options).network
    network = AssistantNetwork(load_assistant(HeadFiles.open(pair.assistant), runtime.config), runtime, max_model_len=512)
    cache = runtime.new_cache(32)
    other, sequence = cache.new_sequence(), cache.new_sequence()
    for one, token_ids in ((other, [5] * 200), (other, [6] * 200), (sequence, prompt)):
        plan = cache.reserve_rows(one, range(-1, len(token_ids) - 1))
        output = runtime.forward(*assemble_pass([plan], [token_ids], [[len(token_ids) - 1]]))
        cache.keep_path(one, len(token_ids) - 1)
    return network, sequence, output.hidden_states[-1:].copy()


def logits_of(network: AssistantNetwork, output: Any, row: int) -> FloatArray:
    """[V], -inf for tokens that are not looked at."""
    if network.assistant.config.clusters is None:
        return output.logits[row].copy()
    ids, scores = network.cluster_candidates(output, row, VOCAB_SIZE)
    assert len(ids) == len(np.unique(ids)) == 4 * VOCAB_SIZE // 12
    whole = np.full(VOCAB_SIZE, -np.inf, np.float32)
    whole[ids] = scores
    return whole


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("length", [WINDOW - 4, 75])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_gemma4_assistant_drafts_equal_those_of_transformers(
    pairs: Callable[[str, str], Pair], kind: str, head: str, length: int, backend: str
) -> None:
    pair, prompt = pairs(kind, head), np.random.default_rng(3).integers(0, VOCAB_SIZE, length).tolist()
    network, sequence, feature = opened(pair, backend, prompt)
    for token, expected, fed in of_transformers(pair, tuple(prompt), 7, sees_causal_window=length > WINDOW):
        output = network.forward([TreeLevelInput((token,), feature, sequence)], None, None)
        found, feature = logits_of(network, output, 0), output.results[FEATURE].copy()
        assert np.abs(feature[0] - fed).max() <= BOUND
        seen = np.isfinite(found)
        assert np.abs(found[seen] - expected[seen]).max() <= BOUND
        assert (expected[~seen] < expected[seen].min()).all()
        assert found.argmax() == expected.argmax()
        wrong = network.forward([TreeLevelInput((token,), feature * 1.5 + 0.3, sequence)], None, None).results[FEATURE]
        assert np.abs(wrong[0] - fed).max() > 0.1, "what it is fed matters"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_gemma4_assistant_rows_in_one_pass_are_independent(pairs: Callable[[str, str], Pair], backend: str) -> None:
    """Several nodes of several texts in one pass; the cache is as it was."""
    pair, prompt = pairs("e2b", "dense"), np.random.default_rng(4).integers(0, VOCAB_SIZE, 60).tolist()
    network, sequence, feature = opened(pair, backend, prompt)
    features = np.concatenate([feature, feature * 0.5, -feature])
    alone = [
        network.forward([TreeLevelInput((token,), features[row : row + 1], sequence)], None, None).logits[0].copy()
        for row, token in enumerate((5, 6, 7))
    ]
    nodes = [TreeLevelInput((5, 6), features[:2], sequence), TreeLevelInput((7,), features[2:], sequence)]
    together = network.forward(nodes, None, None).logits
    assert np.allclose(together, alone, rtol=0, atol=1e-5 if backend == "torch" else 0.0)


def test_gemma4_assistant_layers_read_the_last_target_kv_of_their_kind(pairs: Callable[[str, str], Pair]) -> None:
    for kind, local, whole in (("e2b", 4, 3), ("unified", 6, 7)):
        runtime = load_network(pairs(kind, "dense").target, RuntimeOptions(numerics=Numerics.FAST, device="cpu", backend="torch")).network
        config = load_assistant(HeadFiles.open(pairs(kind, "dense").assistant), runtime.config).config
        assert [layer.mixer.kv_source_layer for layer in config.layers.layers] == [local, local, local, whole]
        assert [layer.mixer.window for layer in config.layers.layers] == [WINDOW - 1] * 3 + [None]
        assert [layer.mixer.num_kv_heads for layer in config.layers.layers] == [2, 2, 2, 1]
