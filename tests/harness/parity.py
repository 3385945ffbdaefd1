"""Networks beside transformers': what it computes for a prompt, and whether ours computes the same.

Bounds on max |Δlogit| in float32 are for logits with a standard deviation of about 1.3; a pass of one row uses other kernels than
transformers' whole prompt, hence three times that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.checkpoints import VOCAB_SIZE, auto_causal_lm
from harness.exact_targets import skip_without_kernels
from harness.model_changes import Change
from paceline import LLM, SamplingParams
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.models.checkpoint import open_weights
from paceline.models.config import ModelConfig, WeightType, read_config
from paceline.models.layers import ExpertMLP
from paceline.runtimes.base import FloatArray, Network, Numerics, assemble_pass
from paceline.runtimes.decoder import decoder
from paceline.runtimes.load import RuntimeOptions, load_network

PROMPT_LEN = 300
ONE_ROW_FACTOR = 3
BOUNDS = {"torch": 1e-5, "native": 5e-5}


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one prompt."""

    directory: Path
    token_ids: list[int]
    logits: FloatArray
    hidden_states: tuple[FloatArray, ...]  # every boundary; the last one after the final norm
    rounding: float  # how far its logits are from what it computes in float64

    def allowed(self, backend: str) -> float:
        """How far the logits of its whole prompt may be from it: the bound, or its own rounding where that is larger.

        Native kernels add in another order, so both round: twice that.
        """
        return max(BOUNDS[backend], self.rounding * (1 if backend == "torch" else 2))


References = Callable[[str], Reference]
"""By the name of a case."""


def transformers_output(directory: Path, token_ids: list[int], dtype: str = "float32") -> tuple[FloatArray, tuple[FloatArray, ...]]:
    import torch

    # transformers 5.20 lets gemma2 take an attention that does not cap its scores
    config = read_config(directory)
    plain = {} if config.attention.soft_cap is None and not config.attention.has_sinks else {"attn_implementation": "eager"}
    if any(isinstance(layer.mlp, ExpertMLP) for layer in config.layers):
        plain["experts_implementation"] = "eager"  # the others know no float64
    model = auto_causal_lm().from_pretrained(directory, dtype=getattr(torch, dtype), **plain).eval()
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), output_hidden_states=True)
    return output.logits[0].float().numpy(), tuple(states[0].float().numpy() for states in output.hidden_states)


def open_backend(
    directory: Path,
    backend: str,
    *,
    max_model_len: int | None = None,
    weight_type: WeightType | None = WeightType.F32,
    collect_layers: Sequence[int] = (),
) -> Network:
    skip_without_kernels(backend)
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        dtype=weight_type,
        num_threads=2,
        device="cpu",
        backend=backend,
        max_model_len=max_model_len,
        collect_layers=collect_layers,
    )
    return load_network(directory, options).network


def append(runtime: Network, cache: KVCache, sequence: CachedSequence, token_ids: Sequence[int]) -> FloatArray:
    """The logits of one pass over `token_ids`, which become committed."""
    plan = cache.reserve_rows(sequence, range(-1, len(token_ids) - 1))
    output = runtime.forward(*assemble_pass([plan], [list(token_ids)], [list(range(len(token_ids)))]))
    cache.keep_path(sequence, len(token_ids) - 1)
    return output.logits


def prompt_logits(runtime: Network, token_ids: Sequence[int]) -> FloatArray:
    cache = runtime.new_cache(64)
    return append(runtime, cache, cache.new_sequence(), token_ids).copy()


def torch_logits(config: ModelConfig, reference: Reference) -> FloatArray:
    """What the torch runtime makes of a reference's checkpoint if it were the one `config` describes."""
    from paceline.runtimes.torch.network import TorchNetwork

    weights = open_weights(reference.directory, read_config(reference.directory))
    return prompt_logits(TorchNetwork(decoder(config), config, weights), reference.token_ids)


def difference(found: FloatArray, expected: FloatArray) -> float:
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    return float(np.abs(found - expected).max())


def make_reference(directory: Path) -> Reference:
    """A random prompt and what transformers makes of it."""
    token_ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, PROMPT_LEN).tolist()
    logits, hidden_states = transformers_output(directory, token_ids)
    wide, _ = transformers_output(directory, token_ids, "float64")
    return Reference(directory, token_ids, logits, hidden_states, difference(logits, wide))


def check_change_matters(reference: Reference, change: Change, max_model_len: int | None = None) -> None:
    """Assert that a comparison with the reference fails by far more than its bound where a part is computed differently."""
    config = read_config(reference.directory).for_context(max_model_len)
    changed = change(config)
    assert changed != config
    assert difference(torch_logits(changed, reference), reference.logits) > 0.1


def check_a_prompt(reference: Reference, backend: str, *, max_model_len: int | None = None, bound: float | None = None) -> None:
    """One pass, chunks and single rows give the logits of transformers, within `bound` or the backend's."""
    runtime = open_backend(reference.directory, backend, max_model_len=max_model_len)
    cache = runtime.new_cache(64)
    for chunk_lens in ([PROMPT_LEN], [1, 31, 33, 64, 100, 71], [15, 16, 17, *[1] * 20], [40, *[1] * 4]):
        sequence, begin = cache.new_sequence(), 0
        for chunk_len in chunk_lens:
            logits = append(runtime, cache, sequence, reference.token_ids[begin : begin + chunk_len])
            one_row = ONE_ROW_FACTOR * BOUNDS[backend] if chunk_len == 1 else 0.0
            allowed = bound or max(reference.allowed(backend), one_row)
            assert difference(logits, reference.logits[begin : begin + chunk_len]) <= allowed, (chunk_lens, begin)
            begin += chunk_len
        cache.release_sequence(sequence)


def greedy_margin(llm: LLM, token_ids: list[int]) -> float:
    """Return by how much the logit of the best next token is above that of the second."""
    (output,) = llm.generate([token_ids], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2))
    assert output.logprobs is not None
    (_, best), (_, second) = output.logprobs[0].top
    return best - second


def count_equal_texts(
    llm: LLM, prompts: Sequence[list[int]], others: Sequence[Sequence[dict[str, float]]], num_tokens: int, near_tie: float
) -> int:
    """Return how many greedy texts are another program's to their ends; all others must first differ at a near tie of either program.

    Args:
        others: for each prompt the other program's tokens, each with its margin over the second best.
    """
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    num_equal = 0
    for prompt, output, other in zip(prompts, llm.generate(list(prompts), params), others, strict=True):
        own = list(output.token_ids)
        at = next((at for at, (token, theirs) in enumerate(zip(own, other, strict=True)) if token != theirs["token"]), None)
        num_equal += at is None
        if at is not None:
            assert max(greedy_margin(llm, prompt + own[:at]), other[at]["margin"]) < near_tie, (prompt, at)
    return num_equal
