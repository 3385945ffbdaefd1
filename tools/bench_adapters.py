"""Times passes of decoding requests with and without LoRA adapters, in turns, on one checkpoint.

    python tools/bench_adapters.py --model DIR --quantization int8 --rank 16

Adapters are random, on all projections of attention, MLPs and experts, in values that bfloat16 holds and in others. A ratio is the speed
with adapters over that without, of the medians; passes have one row a request behind 64 cached ones.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench_machine import describe_machine
from paceline import LLM
from paceline.kv_cache.cache import CachedSequence
from paceline.models.adapters.adapter import Adapter, LowRank
from paceline.models.adapters.modules import target_modules
from paceline.models.config import ModelConfig
from paceline.runtimes.base import assemble

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CACHED_LEN, MOST = 64, 8
SPREAD = 7919  # from row to row another token: rows of one would all choose the same experts


def random_adapter(name: str, config: ModelConfig, *, rank: int, seed: int, is_narrow: bool) -> Adapter:
    random = np.random.default_rng(seed)

    def factor(outputs: int, columns: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        values = random.standard_normal((outputs, columns)).astype(np.float32) * np.float32(0.02)
        if is_narrow:
            values.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
        return values

    shapes = {one: module.shape for module in target_modules(config).values() for one, rows in module.parts.items() if rows is None}
    products = {
        one: LowRank(factor(rank, columns), factor(outputs, rank))
        for one, (outputs, columns) in shapes.items()
        if one.rpartition(".")[2] in PARTS
    }
    return Adapter(name, name.encode(), products, {}, {})


def time_pass(llm: LLM, sequences: Sequence[CachedSequence], adapters: Sequence[int]) -> float:
    cache, count = llm.engine.cache, len(adapters)
    start = time.perf_counter()
    plans = [cache.reserve(sequence, [-1]) for sequence in sequences[:count]]
    tokens = [[SPREAD * (1 + row) % llm.runtime.config.vocab_size] for row in range(count)]
    llm.runtime.forward(*assemble(plans, tokens, [[0]] * count, adapters))
    seconds = time.perf_counter() - start
    for sequence in sequences[:count]:
        cache.cancel(sequence)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    llm = LLM(options.model, quantization=options.quantization, drafter="none", max_model_len=512, kv_cache_gb=0.5, max_num_seqs=MOST)
    cache = llm.engine.cache
    sequences = [cache.new_sequence() for _ in range(MOST)]
    for sequence in sequences:
        cache.reserve(sequence, range(-1, CACHED_LEN - 1))
        cache.keep_path(sequence, CACHED_LEN - 1)
    print(describe_machine())
    for kind in ("bfloat16", "float32"):
        made = [
            random_adapter(f"{kind} {seed}", llm.runtime.config, rank=options.rank, seed=seed, is_narrow=kind == "bfloat16")
            for seed in range(4)
        ]
        numbers = [llm.runtime.load_adapter(adapter) for adapter in made]
        cases = {
            "8 without": [0] * 8, "8, four adapters and none": [*numbers, 0, *numbers[:3]], "8, one adapter": [numbers[0]] * 8,
            "1 without": [0], "1, one adapter": [numbers[0]],
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, adapters in cases.items():
                times[name].append(time_pass(llm, sequences, adapters))
        medians = {name: statistics.median(own) for name, own in times.items()}
        for name, seconds in medians.items():
            print(f"{kind}: {name}: {1e3 * seconds:.2f} ms, {medians[f'{name[0]} without'] / seconds:.3f}")
        for number in numbers:
            llm.runtime.unload_adapter(number)


if __name__ == "__main__":
    main()
