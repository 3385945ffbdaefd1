"""Times drafting heads: a pass beside the time its bytes take to be read, and a proposal's time on the host.

    python tools/bench_heads.py --out heads.json

Passes: random heads of the shape that a target of 1 B parameters has (hidden 2048, MLP 8192, 32 heads, 8 key heads, bf16), one row, in
turns; medians over rounds. Their bytes over the read bandwidth measured in the same rounds is what they cannot be faster than.
Proposals: the same drafters on small heads with a whole vocabulary, one request, as the engine calls them; time of the calling thread less
that in the kernels, which run on it alone here: whoever else uses the processor does not count.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from bench_machine import describe_machine, markdown_table
from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.eagle.network import drafted_pairs, true_pairs
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.checkpoint import MedusaHeads
from paceline.drafters.medusa.drafter import MedusaDrafter
from paceline.drafters.medusa.network import MedusaNetwork
from paceline.drafters.mtp import mtp_pairs
from paceline.drafters.pairs.cache import TrueRows
from paceline.drafters.pairs.config import PairConfig
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.head import DraftedRows, MaskedPair, PairHead
from paceline.drafters.pairs.parallel import ParallelDrafter
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import AttentionConfig, DenseMLP, LayerConfig
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import AnyTensor, Tensor, Weights
from paceline.runtimes.base import RowRange
from paceline.runtimes.load import open_head
from paceline.runtimes.native import execution
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter
from paceline.speculation.request import Request

DEPTH, TREE_WIDTH, TREE_ROWS, PROMPT = 4, 3, 13, 64
BANDWIDTH_BYTES = 1 << 30
BOUNDARIES = (2, 8, 13)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a head and of its target's vocabulary."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    scale: float = 0.02  # of its weights: the larger, the more its logits differ

    def config(self) -> ModelConfig:
        head_size = self.hidden // self.heads
        attention = AttentionConfig(
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_size=head_size, rope=RopeConfig(), scale=head_size**-0.5
        )
        return ModelConfig(
            family="llama", vocab_size=self.vocab, hidden_size=self.hidden, norm_eps=1e-5, max_positions=2048, weight_type=WeightType.BF16,
            layers=(LayerConfig(mixer=attention, mlp=DenseMLP(intermediate_size=self.inner)),),
        )  # fmt: skip


LARGE = Shape(2048, 8192, 32, 8, 32_000)


class KernelClock:
    """The compiled kernels, with a clock at the pass.

    Attributes:
        seconds: of the calling thread in passes.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def paceline_run(self, *arguments: Any) -> None:
        start = thread_time()
        self._kernels.paceline_run(*arguments)
        self.seconds += thread_time() - start


class RandomWeights:
    """bf16 matrices cut from one random pool, each with pages of its own."""

    def __init__(self, scale: float) -> None:
        values = np.random.default_rng(0).normal(0.0, scale, 1 << 20).astype(np.float32)
        self._pool = (values.view(np.uint32) >> 16).astype(np.uint16)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return Tensor(np.resize(self._pool, (rows, columns)), WeightType.BF16, (rows, columns))

    def norm(self, size: int) -> Tensor:
        return Tensor(np.ones(size, np.float32), WeightType.F32, (size,))

    def layer(self, shape: Shape, columns: int) -> dict[str, AnyTensor]:
        hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
        sizes = {"q_proj": (hidden, columns), "k_proj": (kv, columns), "v_proj": (kv, columns), "o_proj": (hidden, hidden)}
        sizes |= {"gate_proj": (shape.inner, hidden), "up_proj": (shape.inner, hidden), "down_proj": (hidden, shape.inner)}
        norms = ("attention_norm", "mlp_norm", "hidden_norm")
        tensors: dict[str, AnyTensor] = {f"layers.0.{name}.weight": self.matrix(*size) for name, size in sizes.items()}
        return tensors | {f"layers.0.{name}.weight": self.norm(hidden) for name in norms}


def pair_head(method: str, shape: Shape, threads: int) -> tuple[PairHead, int]:
    """A random head, and the bytes that a pass of it over drafted pairs reads."""
    random = RandomWeights(shape.scale)
    layers, hidden = shape.config(), shape.hidden
    is_parallel = method == "P-EAGLE"
    is_eagle3 = is_parallel or method == "EAGLE-3"
    tensors = random.layer(shape, 2 * hidden if is_eagle3 else hidden)
    tensors |= {"fc.weight": random.matrix(hidden, len(BOUNDARIES) * hidden if is_eagle3 else 2 * hidden)}
    tensors |= {"lm_head.weight": random.matrix(shape.vocab, hidden), "final_norm.weight": random.norm(hidden)}
    tensors |= {f"{half}_norm.weight": random.norm(hidden) for half in ("embedding", "feature")}
    config: PairConfig
    if method == "MTP":
        config = PairConfig(kind=HeadKind.MTP, layers=layers, feature_size=hidden)
        true = drafted = mtp_pairs(config)
    else:
        config = EagleConfig(
            kind=HeadKind.PEAGLE if is_parallel else HeadKind.EAGLE3 if is_eagle3 else HeadKind.EAGLE,
            layers=layers,
            feature_size=hidden,
            boundaries=BOUNDARIES if is_eagle3 else (),
            norms_embedding=is_eagle3,
            has_final_norm=is_eagle3,
        )
        true, drafted = true_pairs(config), drafted_pairs(config)
    runtime = open_head(true, layers, Weights(tensors), num_threads=threads, max_model_len=2048, backend="native")
    behind = runtime.sibling(drafted) if is_eagle3 else runtime
    is_read = {name: is_parallel or not is_eagle3 or name != "fc.weight" for name in tensors}
    num_bytes = sum(tensor.array.nbytes for name, tensor in tensors.items() if is_read[name])  # type: ignore[union-attr]
    masked = MaskedPair(7, np.ones(len(BOUNDARIES) * hidden, np.float32)) if is_parallel else None
    return PairHead(config, runtime, behind, random.matrix(shape.vocab, hidden), target_ids=None, masked=masked), num_bytes


def medusa_network(shape: Shape, threads: int, *, is_shared: bool) -> tuple[MedusaNetwork, int]:
    """Four random heads, and the bytes that a pass of all reads."""
    random = RandomWeights(shape.scale)
    tensors: dict[str, AnyTensor] = {f"heads.{head}.blocks.0.weight": random.matrix(shape.hidden, shape.hidden) for head in range(DEPTH)}
    names = ["lm_head.weight"] if is_shared else [f"heads.{head}.lm_head.weight" for head in range(DEPTH)]
    tensors |= {name: random.matrix(shape.vocab, shape.hidden) for name in names}
    heads = MedusaHeads(DEPTH, 1, Weights(tensors), is_shared, shape.vocab)
    num_bytes = sum(tensor.array.nbytes for tensor in tensors.values())  # type: ignore[union-attr]
    return MedusaNetwork(heads, shape.config(), num_threads=threads, backend="native"), num_bytes


def time_passes(options: argparse.Namespace) -> list[list[str]]:
    """Rows of the table of passes."""
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    for method in ("EAGLE-1", "EAGLE-3", "MTP"):
        head, num_bytes = pair_head(method, LARGE, options.threads)
        head.runtime.allocate_kv(8)
        rows = RowRange(0, 1, PROMPT, np.arange(1, 5, dtype=np.int32), None, 1)
        draft = DraftedRows([7], np.ones((1, LARGE.hidden), np.float32), [PROMPT], rows, [0])
        calls[method] = (lambda head=head, draft=draft: head.run_drafted([draft])), num_bytes  # type: ignore[misc]
    head, num_bytes = pair_head("P-EAGLE", LARGE, options.threads)
    head.runtime.allocate_kv(8)
    rows = RowRange(0, 1, PROMPT, np.arange(1, 5, dtype=np.int32), None, 1)
    true = TrueRows(np.array([7], np.int32), np.ones((1, len(BOUNDARIES) * LARGE.hidden), np.float32), rows)
    calls["P-EAGLE, 4 positions"] = partial(head.run_true, [true], wants_logits=True, num_masked=[DEPTH - 1]), num_bytes
    for name, is_shared in (("Medusa, 4 heads", False), ("Medusa, 4 heads, one vocabulary matrix", True)):
        network, num_bytes = medusa_network(LARGE, options.threads, is_shared=is_shared)
        feature = np.ones((1, LARGE.hidden), np.float32)
        calls[name] = (lambda network=network, feature=feature: network.forward(feature, DEPTH)), num_bytes  # type: ignore[misc]
    memory = np.ones(BANDWIDTH_BYTES // 8, np.uint64)
    times: dict[str, list[float]] = {name: [] for name in ("", *calls)}
    with ThreadPoolExecutor(options.threads) as pool:
        for repeat in range(options.repeats + 1):
            start = perf_counter()
            list(pool.map(np.max, np.array_split(memory, options.threads)))
            seconds = {"": perf_counter() - start}
            for name, (call, _) in calls.items():
                call()
                start = perf_counter()
                call()
                seconds[name] = perf_counter() - start
            if repeat:  # the first round warms up
                for name, value in seconds.items():
                    times[name].append(value)
            print(f"round {repeat} of {options.repeats} done", file=sys.stderr)
    bandwidth = BANDWIDTH_BYTES / min(times[""])
    table = []
    for name, (_, num_bytes) in calls.items():
        own, least = times[name], num_bytes / bandwidth
        ratio = statistics.median(own) / least
        table.append([name, f"{num_bytes / 1e6:.0f}", f"{least * 1e3:.1f}", _middle(own, 1e3), f"{ratio:.2f}"])
    print(f"read bandwidth of {options.threads} threads: {bandwidth / 1e9:.1f} GB/s (best of {options.repeats})\n")
    return table


class Proposer:
    """One request that drafts again and again, one token being committed between."""

    def __init__(self, drafter: Callable[[KVCache], Drafter], shape: Shape, params: SamplingParams) -> None:
        self._cache = KVCache([], 64, TreeLayout.MASK)
        self._drafter = drafter(self._cache)
        random = np.random.default_rng(1)
        token_ids = random.integers(1, shape.vocab, PROMPT).tolist()
        processor = LogitsProcessor(params, shape.vocab, token_ids)
        self._request = Request(token_ids, PROMPT, params, processor, self._cache.new_sequence(), 5, 0, 10_000)
        self._random, self._hidden, self._vocab = random, shape.hidden, shape.vocab
        self._commit(PROMPT - 1)

    def propose(self, budget: DraftBudget) -> float:
        """Seconds of one proposal."""
        start = thread_time()
        (tree,) = self._drafter.propose([self._request], [budget])
        seconds = thread_time() - start
        if tree is None or tree.num_draft_tokens < DEPTH:
            raise RuntimeError(f"{self._drafter.name} proposed {tree}")
        self._request.token_ids.append(int(self._random.integers(1, self._vocab)))
        self._commit(1)
        return seconds

    def _commit(self, count: int) -> None:
        sequence = self._request.sequence
        start = sequence.committed_len
        self._cache.reserve(sequence, range(-1, count - 1))
        self._cache.keep_path(sequence, count - 1)
        rows = self._random.normal(0, 1, (count, self._hidden)).astype(np.float32)
        collected = np.stack([rows] * len(self._drafter.needs.layers)) if self._drafter.needs.layers else None
        self._drafter.observe([CommittedRows(self._request, start, count, rows, collected)])


def time_proposals(options: argparse.Namespace) -> list[list[str]]:
    """Rows of the table of proposals."""
    kernels = KernelClock(execution.kernels())
    execution.kernels = lambda: kernels  # type: ignore[assignment]
    small = Shape(256, 512, 4, 2, options.vocab, scale=3.0 / 16.0)  # logits differ by 3
    medusa, _ = medusa_network(small, 1, is_shared=False)
    makers: dict[str, Callable[[KVCache, int], Drafter]] = {}
    for method in ("EAGLE-1", "EAGLE-3", "P-EAGLE", "MTP"):
        head, _ = pair_head(method, small, 1)
        makers[method] = partial(_pair_drafter, head, vocab_size=small.vocab)
    makers["Medusa"] = lambda cache, width: MedusaDrafter(medusa, vocab_size=small.vocab)
    chain = DraftBudget(DEPTH + 1, DEPTH, TreeLayout.MASK)
    tree = DraftBudget(TREE_ROWS, DEPTH, TreeLayout.MASK)
    table = []
    for name, maker in makers.items():
        for kind, budget, width in (("chain", chain, 1), ("tree", tree, TREE_WIDTH)):
            for temperature in (0.0, 1.0):
                proposer = Proposer(partial(maker, width=width), small, SamplingParams(temperature=temperature))
                host: list[float] = []
                for number in range(options.proposals + 20):
                    kernels.seconds = 0.0
                    seconds = proposer.propose(budget) - kernels.seconds
                    if number >= 20:  # the first ones warm up
                        host.append(seconds)
                table.append([name, kind, "sampled" if temperature else "greedy", _middle(host, 1e6)])
    return table


def _pair_drafter(head: PairHead, cache: KVCache, width: int, *, vocab_size: int) -> Drafter:
    drafter = PairDrafter if head.masked is None else ParallelDrafter
    return drafter(head, cache, vocab_size=vocab_size, tree_width=width)


def _middle(seconds: Sequence[float], unit: float) -> str:
    """Median, and the middle half."""
    low, median, high = statistics.quantiles(seconds, n=4)
    digits = 0 if unit > 1e3 else 1
    return f"{median * unit:.{digits}f} ({low * unit:.{digits}f} to {high * unit:.{digits}f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="rounds of passes")
    parser.add_argument("--proposals", type=int, default=300, help="of each kind")
    parser.add_argument("--vocab", type=int, default=LARGE.vocab, help="of the heads whose proposals are timed")
    parser.add_argument("--only", choices=("passes", "proposals"), help="leave the others out")
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}\n")
    result: dict[str, Any] = {"machine": machine}
    for name, head, measure in (
        ("passes", ["head", "MB read", "ms at the bandwidth", "ms a pass (middle half)", "times"], time_passes),
        ("proposals", ["head", "shape", "request", "host µs a proposal (middle half)"], time_proposals),
    ):
        if options.only in (None, name):
            rows = measure(options)
            result[name] = [head, *rows]
            print(markdown_table(head, rows) + "\n")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
