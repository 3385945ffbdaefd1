"""LoRA adapters made of random numbers, by the names that checkpoints have, and requests for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from harness.engine_traffic import check_engine
from paceline import LLM
from paceline.engine.inputs import RequestOptions
from paceline.models.adapters.adapter import Adapter, LowRankUpdate
from paceline.models.adapters.modules import target_modules
from paceline.models.config import ModelConfig
from paceline.outputs import RequestOutput
from paceline.runtimes.base import Numerics
from paceline.sampling.params import SamplingParams
from paceline.speculation.request import Request

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj", "out_proj")


@dataclass(frozen=True)
class Asked:
    """One request, and what it gets alone, decoded plainly."""

    prompt: list[int]
    params: SamplingParams
    adapter: str | None
    answer: RequestOutput
    beyond: list[int]  # what drafters may draft


def make_adapter(
    name: str,
    config: ModelConfig,
    *,
    seed: int,
    rank: int = 4,
    strength: float = 0.5,
    parts: Sequence[str] = PROJECTIONS,
    embedding: bool = False,
    lm_head: bool = False,
    saves: Sequence[str] = (),
    biases: Sequence[str] = (),
    experts: bool = False,
) -> Adapter:
    """An adapter of a target that makes other tokens likely.

    Args:
        strength: of what it adds to a row, compared with the row.
        parts: last parts of the names of what it changes.
        embedding, lm_head: whether low-rank factors change them.
        saves: "embed_tokens" and "lm_head" taken whole.
        biases: parts that get one besides.
        experts: whether those of a mixture are changed too.
    """
    random = np.random.default_rng(seed)
    shapes = {
        name: module.shape for module in target_modules(config).values() for name, rows in module.rows_by_matrix.items() if rows is None
    }

    def normal(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.standard_normal(shape).astype(np.float32)

    def low_rank(outputs: int, columns: int) -> LowRankUpdate:
        return LowRankUpdate(normal(rank, columns) / np.float32(columns**0.5), normal(outputs, rank) * np.float32(strength / rank**0.5))

    products, offsets = dict[str, LowRankUpdate](), {}
    for own, shape in shapes.items():
        part, in_layer = own.rpartition(".")[2], own.startswith("layers.") and (experts or ".experts." not in own)
        if in_layer and part in parts:
            products[own] = low_rank(*shape)
        if in_layer and part in biases:
            offsets[own] = normal(shape[0]) * np.float32(0.1)
    vocab_size, hidden = shapes["embed_tokens"]
    if embedding:
        products["embed_tokens"] = LowRankUpdate(normal(rank, vocab_size), normal(hidden, rank) * np.float32(0.01))
    if lm_head:
        products["lm_head"] = low_rank(vocab_size, hidden)
    saved = {name: normal(vocab_size, hidden) * np.float32(0.05) for name in saves}
    return Adapter(name, blake2b(repr((name, seed, rank, strength, parts)).encode()).digest(), products, offsets, saved)


def run_together(llm: LLM, asked: Sequence[Asked], *, preempt_every: int | None = None) -> list[Request]:
    """Run all requests at once, checked step by step.

    Args:
        preempt_every: steps after which the newest request is preempted.
    """
    engine, requests = llm.engine, list[Request]()
    for one in asked:
        options: RequestOptions = {"adapter": one.adapter, "namespace": "one"}
        if engine.speculator.uses_predicted_outputs:
            options["prediction"] = one.beyond
        requests += llm._loaded.make_requests([one.prompt], one.params, options, is_streamed=False)
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        if preempt_every is not None and engine.stats.num_steps % preempt_every == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        check_engine(engine)
    return requests


def assert_equal(llm: LLM, requests: Sequence[Request], asked: Sequence[Asked]) -> None:
    """Check that requests got what each gets alone; with exact numerics their logprobs too."""
    for request, one in zip(requests, asked, strict=True):
        assert request.error is None
        found = llm._loaded.make_output(request)
        assert found.token_ids == one.answer.token_ids, one.adapter
        if llm.runtime.capabilities.numerics is Numerics.EXACT:
            assert found.logprobs == one.answer.logprobs, one.adapter
