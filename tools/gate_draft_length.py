"""Compare the draft-length policy with every fixed draft length and with plain decoding, on the simulated clock.

    python tools/gate_draft_length.py --json after.json --compare before.json

Each cell of the grid is one replay of several texts; a ratio above 1 means slower. "over best fixed" divides by the seconds of the fixed
draft length, 0 included, that is best for the cell. "over plain" divides by the seconds of plain decoding. "mean of texts over plain"
compares the geometric means of what each text takes. The seeds differ from those of the tests, so that no constant of the policy is
fitted to these texts.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from reporting import REPOSITORY, describe_machine, dict_table

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from harness.fixed_draft_length import FixedLength, fixed_lengths  # noqa: E402
from harness.recorded_traces import load_traces  # noqa: E402
from harness.replay import Costs, Trace, controller, made_up, replay  # noqa: E402

SEEDS = (101, 102, 103)
CHANCES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
CONFIDENCE: dict[str, Callable[[float], float] | None] = {"none": None, "too_high": lambda chance: min(0.98, max(0.02, chance**0.5))}
"""What the drafter reports about a token that is right with a chance."""
MACHINES = {
    "cheap_rows": Costs(lambda rows: 0.040 * (1 + 0.03 * (rows - 1)), (2e-5, 0.0)),
    "costly_rows": Costs(lambda rows: 0.040 * (1 + 0.15 * (rows - 1)), (2e-5, 0.0)),
    "stairs": Costs(lambda rows: 0.030 * (1 + 0.5 * ((rows - 1) // 4)), (2e-5, 0.0)),
    "draft_model": Costs(lambda rows: 0.040 * (1 + 0.04 * (rows - 1)), (1e-3, 4e-3)),
    "costly_draft_model": Costs(lambda rows: 0.040 * (1 + 0.04 * (rows - 1)), (1e-3, 12e-3)),
    "tiny_target": Costs(lambda rows: 0.0010 * (1 + 0.06 * (rows - 1)), (1e-5, 1e-4), (1e-4, 2e-5)),
}
MILLISECOND_PASS = Costs(lambda rows: 0.0010 * (1 + 0.12 * (rows - 1)), (3e-4, 3e-4), (8e-5, 2e-5), 1e-4)
PASS_TABLES: dict[str, tuple[float, float, dict[int, float]]] = {
    "5_ms": (0.005, 0.002, {1: 1.0, 8: 1.87, 16: 3.6, 32: 7.1}),  # int4, AVX-512
    "20_ms": (0.020, 0.003, {1: 1.0, 8: 2.79, 16: 5.2, 32: 10.4}),  # Q4_K_M, AVX2
    "60_ms": (0.060, 0.004, {1: 1.0, 8: 1.14, 16: 1.76, 32: 3.5}),  # bf16, AVX-512
}
"""Seconds of a pass of one row, seconds of one token of a draft model, and how many times as long more rows take: measured with 1.04 B
parameters, see docs/dev/findings.md. From 16 rows on a row takes the same time again."""
PASSAGES = ((0.95, 0.05), (0.7, 0.2))
PASSAGE_TOKENS = 64
RECORDED_TOKENS = 1_000, 500
"""Recorded texts are repeated until a cell has so many tokens, and so many for each text of a batch: in fewer, what is drafted before
anything is known decides."""
RATIOS = {"over_best": "worst over best fixed", "over_plain": "worst over plain", "mean_over_plain": "worst mean of texts over plain"}
STALL_SHARE, STALL_FACTORS = 0.1, (5.0, 50.0)


@dataclass(frozen=True)
class Cell:
    """One replay.

    Attributes:
        stall_seed: seed of the stalls of measured times; None = none.
        forgets: whether each text gets a new policy, as in a process that answers once.
    """

    group: str
    name: str
    traces: Callable[[], list[Trace]]
    costs: Costs
    batch_size: int = 1
    stall_seed: int | None = None
    forgets: bool = False


Result = dict[str, float | str]


class Stalls:
    """A factor for each measured time: 1, but one in ten is 5 to 50 times too long."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self) -> float:
        return float(self._random.uniform(*STALL_FACTORS)) if self._random.random() < STALL_SHARE else 1.0


@cache
def made_up_texts(chances: tuple[float, ...], confidence: str, seed: int, count: int, length: int) -> list[Trace]:
    """Texts whose passages of `PASSAGE_TOKENS` have these chances in turn."""
    random = np.random.default_rng(seed)

    def chance(position: int) -> float:
        return chances[position // PASSAGE_TOKENS % len(chances)]

    return [made_up(length, chance, random, confident=CONFIDENCE[confidence]) for _ in range(count)]


def grid_cells(group: str, *, batch_size: int, count: int, length: int, is_stalled: bool = False) -> Iterator[Cell]:
    """Every chance, machine and confidence."""
    for chance, machine, confidence, seed in product(CHANCES, MACHINES, CONFIDENCE, SEEDS):
        cell = made_up_cell(group, (chance,), confidence, seed, (count, length), machine, batch_size)
        yield replace(cell, stall_seed=seed if is_stalled else None)


def made_up_cell(
    group: str, chances: tuple[float, ...], confidence: str, seed: int, texts: tuple[int, int], machine: str, batch_size: int
) -> Cell:
    """A cell of texts made up, by their number and length."""
    count, length = texts
    own = f"chance {'/'.join(map(str, chances))}, confidence {confidence}, seed {seed}, {count} texts of {length}"
    traces = partial(made_up_texts, chances, confidence, seed, count, length)
    return Cell(group, f"{machine}, batch {batch_size}, {own}", traces, MACHINES.get(machine, MILLISECOND_PASS), batch_size)


def passage_cells(group: str) -> Iterator[Cell]:
    for chances, machine, confidence, seed in product(PASSAGES, MACHINES, CONFIDENCE, SEEDS):
        for count, batch_size in ((8, 1), (16, 4)):
            yield made_up_cell(group, chances, confidence, seed, (count, 256), machine, batch_size)


def useless_cells(group: str) -> Iterator[Cell]:
    """A draft model of 0.6 ms for one token on passes of 1 ms, right at most once in twenty tokens."""
    for chance, confidence, seed, batch_size in product((0.0, 0.02, 0.05), CONFIDENCE, SEEDS, (1, 4, 16)):
        texts = 8 if batch_size == 1 else 32, 192
        yield made_up_cell(group, (chance,), confidence, seed, texts, "millisecond_pass", batch_size)


def recorded_costs(table: str, drafter: str) -> Costs:
    """Costs of a target whose pass times were measured."""
    one_row_s, draft_token_s, ratios = PASS_TABLES[table]
    slope = (ratios[32] - ratios[16]) / 16
    rows = list(ratios)

    def pass_s(num_rows: int) -> float:
        ratio = float(np.interp(num_rows, rows, list(ratios.values()))) + slope * max(0, num_rows - 32)
        return one_row_s * ratio

    draft_s = (5e-4, draft_token_s) if drafter == "draft_model" else (2e-5, 0.0)
    return Costs(cache(pass_s), draft_s, (1e-4, 2e-5), 3e-5)


def recorded_cells() -> Iterator[Cell]:
    """Each kind of text of each target, drafter and temperature, and all kinds in turns."""
    texts: dict[str, list[Trace]] = {}
    kinds: dict[str, list[list[Trace]]] = {}
    for name, traces in load_traces().items():
        texts[name] = traces
        kinds.setdefault(name.rsplit("/", 1)[0], []).append(traces)
    texts |= {f"{name}/mixed": [trace for four in zip(*own, strict=True) for trace in four] for name, own in kinds.items()}
    costs = {(table, name): recorded_costs(table, name) for table in PASS_TABLES for name in ("ngram", "suffix", "draft_model")}
    for batch_size, table, (name, traces) in product((1, 4, 8), PASS_TABLES, texts.items()):
        label, own = f"{name}, {table} pass, batch {batch_size}", costs[table, name.split("/")[1]]
        least = max(RECORDED_TOKENS[0], batch_size * RECORDED_TOKENS[1])
        times = math.ceil(least / sum(len(trace.token_ids) for trace in traces))
        yield Cell(f"recorded_{batch_size}", f"{label}, {times} times", partial(list, times * traces), own, batch_size)
        if batch_size == 1:
            yield Cell("recorded_first", label, partial(list, traces), own, forgets=True)


def all_cells() -> list[Cell]:
    return [
        *grid_cells("grid", batch_size=1, count=24, length=128),
        *grid_cells("batch_8", batch_size=8, count=24, length=96),
        *grid_cells("stalled_1", batch_size=1, count=24, length=128, is_stalled=True),
        *grid_cells("stalled_4", batch_size=4, count=24, length=96, is_stalled=True),
        *passage_cells("passages"),
        *useless_cells("useless_draft_model"),
        *recorded_cells(),
    ]


def run_cell(cell: Cell) -> Result:
    traces, (best, best_s, plain) = cell.traces(), best_and_plain(cell)
    noise = {} if cell.stall_seed is None else {"noise": Stalls(cell.stall_seed), "other_noise": Stalls(cell.stall_seed + 1000)}
    parts = [[trace] for trace in traces] if cell.forgets else [traces]
    outcomes = [replay(controller(cell.costs), part, cell.costs, batch_size=cell.batch_size, **noise) for part in parts]
    mean_s = math.exp(fmean(math.log(seconds) for outcome in outcomes for seconds in outcome.lasted_s))
    seconds = sum(one.seconds for one in outcomes)
    ratios = {"over_best": seconds / best_s, "over_plain": seconds / plain.seconds, "mean_over_plain": mean_s / plain.mean_s}
    counts = {name: sum(getattr(one, name) for one in outcomes) for name in ("steps", "num_draft_tokens", "num_accepted_tokens")}
    return {"group": cell.group, "name": cell.name, "seconds": seconds, "best_length": best, **ratios, **counts}


def best_and_plain(cell: Cell, known: dict[str, tuple[int, float, FixedLength]] = {}) -> tuple[int, float, FixedLength]:  # noqa: B006
    """The best fixed draft length, its seconds, and plain decoding; kept in `known` for cells that differ in stalls only."""
    if cell.name not in known:
        times = fixed_lengths(cell.traces(), cell.costs, batch_size=cell.batch_size)
        best = min(range(len(times)), key=lambda length: times[length].seconds)
        known[cell.name] = best, times[best].seconds, times[0]
    return known[cell.name]


CELLS: list[Cell] = []  # before processes are forked, so that they share it


def _run_number(number: int) -> Result:
    return run_cell(CELLS[number])


def run_cells(cells: Sequence[Cell], num_processes: int) -> list[Result]:
    if num_processes == 1:
        return list(map(run_cell, cells))
    CELLS[:] = cells
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        return pool.map(_run_number, range(len(cells)), chunksize=8)


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(str(result["group"]) for result in results)
    return {name: [result for result in results if result["group"] == name] for name in names}


def summary(results: Sequence[Result]) -> list[dict[str, object]]:
    """One row for each group of cells, and one for all of them."""
    rows = []
    for group, own in [*groups(results).items(), ("all", results)]:
        worst = {name: round(max(float(one[name]) for one in own), 4) for name in RATIOS}
        mean = round(fmean(float(one["over_best"]) for one in own), 4)
        rows.append({"group": group, "cells": len(own), "mean over best fixed": mean, **{RATIOS[name]: worst[name] for name in RATIOS}})
    return rows


def with_changes(rows: Sequence[dict[str, object]], before: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The rows, each number followed by the earlier one."""
    earlier, changed = {row["group"]: row for row in before}, []
    for row in rows:
        old = earlier.get(row["group"], {})
        changed.append({key: value if key in ("group", "cells") else f"{value} ({old.get(key, '-')})" for key, value in row.items()})
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", help="run these groups only")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the table and all cells")
    parser.add_argument("--compare", type=Path, help="file of an earlier run; its numbers are printed in brackets")
    options = parser.parse_args()
    cells = [cell for cell in all_cells() if options.groups is None or cell.group in options.groups]
    if not cells:
        parser.error(f"--groups: no cells, the groups are {', '.join(dict.fromkeys(cell.group for cell in all_cells()))}")
    start_s = time.monotonic()
    results = run_cells(cells, options.processes)
    rows = summary(results)
    shown = rows if options.compare is None else with_changes(rows, json.loads(options.compare.read_text(encoding="utf-8"))["summary"])
    print(dict_table(shown))
    for ratio, (group, own) in product(("over_best", "over_plain"), groups(results).items()):
        worst = max(own, key=lambda one: float(one[ratio]))
        print(f"{RATIOS[ratio]} in {group}: {worst[ratio]:.4f}, {worst['name']} (best length {worst['best_length']})")
    print(f"\n{len(cells)} cells in {time.monotonic() - start_s:.0f} s")
    if options.json is not None:
        found = {"machine": describe_machine(), "summary": rows, "cells": results}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
