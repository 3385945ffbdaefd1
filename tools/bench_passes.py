"""Times one forward pass by its number of rows: paceline, transformers and llama.cpp in turns on one random Llama checkpoint.

    python tools/bench_passes.py --work DIR --llama-python PYTHON_WITH_LLAMA_CPP --out passes.json
    python tools/bench_passes.py --work DIR --memory --dtype f32

Every engine lives in a process of its own that keeps its weights and waits for orders (JSON lines on stdin and stdout). In each round
every case is run by all engines right after one another, in an order that rotates, each with an untimed pass in front; medians over
rounds are reported. A case is M new rows of one sequence, or B sequences of one new row, behind --cached rows each; the logits of all
new rows (of a prompt's, the last one's) are made, and the rows are dropped afterwards or kept. `--memory` reports what loading costs
instead.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_machine import describe_machine, markdown_table
from bench_models import Shape, write_llama
from bench_workers import ENGINES, VERIFIED, serve

LEVEL = "@"


class Worker:
    """An engine in its own process; `ask` sends an order and waits for the answer."""

    def __init__(self, engine: str, python: str, options: argparse.Namespace) -> None:
        self.engine = engine
        self._log = options.work / f"{engine}.log"
        name, _, level = engine.partition(LEVEL)
        command = [
            python,
            str(Path(__file__).resolve()),
            "--worker",
            name,
            "--work",
            str(options.work),
            *(["--level", level] if level else []),
        ]
        command += ["--checkpoint", str(options.checkpoint), "--threads", str(options.threads), "--dtype", options.dtype]
        command += ["--attention", options.attention, "--cached", str(options.cached), *(["--keep"] if options.keep else [])]
        command += [] if options.gguf is None else ["--gguf", str(options.gguf)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.pid = self._process.pid
        self.versions: dict[str, str] = self.ask({"do": "imported"})["versions"]

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"engine {self.engine} died; the end of {self._log}:\n" + self._log.read_text()[-1500:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def time_engines(options: argparse.Namespace) -> dict[str, Any]:
    """Start the engines, run all cases in turns, print and return the result."""
    workers, versions, loads = _start(options)
    cases = [(rows, 1) for rows in options.rows] + [(1, batch) for batch in options.batches if batch > 1]
    samples: dict[str, dict[str, list[float]]] = {worker.engine: {} for worker in workers}
    logits: dict[str, list[float]] = {}
    machine = describe_machine(versions)
    try:
        for repeat in range(options.repeats):
            for number, (rows, batch) in enumerate(cases):
                is_prompt = rows > VERIFIED
                if is_prompt and repeat >= (options.prompt_repeats or options.repeats):
                    continue
                turn = (repeat + number) % len(workers)
                for worker in workers[turn:] + workers[:turn]:
                    warm = 0 if is_prompt and repeat else options.warm
                    answer = worker.ask({"do": "pass", "rows": rows, "batch": batch, "warm": warm})
                    samples[worker.engine].setdefault(_label(rows, batch), []).append(answer["seconds"])
                    if (rows, batch) == (max(options.rows), 1):
                        logits[worker.engine] = answer["logits"]
            print(f"round {repeat + 1} of {options.repeats} done", file=sys.stderr)
    finally:
        for worker in workers:
            worker.close()
    machine["load_average_after"] = describe_machine({})["load_average"]
    _print_times(machine, options, loads, samples, logits)
    return {"machine": machine, "checkpoint": options.checkpoint.name, "loads": loads, "seconds": samples, "logits": logits}


def _start(options: argparse.Namespace) -> tuple[list[Worker], dict[str, str], dict[str, Any]]:
    workers: list[Worker] = []
    versions: dict[str, str] = {}
    loads: dict[str, Any] = {}
    for engine in options.engines:
        python = options.llama_python if engine.startswith("llama") else sys.executable
        if python is None:
            print(f"engine {engine} is left out: give --llama-python", file=sys.stderr)
            continue
        try:
            worker = Worker(engine, python, options)
            loads[engine] = worker.ask({"do": "load"})
            loads[engine].update(worker.ask({"do": "prepare", "batch": max([1, *options.batches]), "rows": max(options.rows)}))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            continue
        loads[engine]["memory_gb"] = {name: round(size / 1e9, 2) for name, size in _memory(worker.pid).items()}
        versions.update(worker.versions)
        workers.append(worker)
        print(f"{engine} is ready: {loads[engine]}", file=sys.stderr)
    if not workers:
        raise SystemExit("no engine could be started")
    return workers, versions, loads


def _label(rows: int, batch: int) -> str:
    return f"M={rows}" if batch == 1 else f"B={batch}"


def _print_times(
    machine: dict[str, Any], options: argparse.Namespace, loads: dict[str, Any], samples: dict[str, Any], logits: dict[str, Any]
) -> None:
    engines = list(samples)
    print(f"machine: {json.dumps(machine)}\n")
    print(
        f"checkpoint {options.checkpoint.name}, {options.threads} threads, {options.cached} cached rows, median of {options.repeats} rounds"
    )
    for engine in engines:
        print(f"- {engine}: " + ", ".join(f"{key} {value}" for key, value in loads[engine].items() if value))
    first = logits[engines[0]]
    spread = statistics.pstdev(first)
    for engine in engines[1:]:
        worst = max(abs(one - other) for one, other in zip(first, logits[engine], strict=True))
        print(f"- same network: {engine} differs from {engines[0]} by at most {worst / spread:.1e} of the logits' standard deviation")
    medians = {engine: {case: statistics.median(times) for case, times in samples[engine].items()} for engine in engines}
    cases = list(medians[engines[0]])
    print("\nmilliseconds a pass (fastest of all rounds in brackets)\n")
    rows = [[case, *(f"{1e3 * medians[e][case]:.4g} ({1e3 * min(samples[e][case]):.4g})" for e in engines)] for case in cases]
    print(markdown_table(["case", *engines], rows))
    print(f"\ncost against a pass of one row: t(case) / t({cases[0]})\n")
    rows = [[case, *(f"{medians[e][case] / medians[e][cases[0]]:.2f}" for e in engines)] for case in cases]
    print(markdown_table(["case", *engines], rows))


def _memory(pid: int) -> dict[str, int]:
    """Bytes of anonymous and file-backed memory a process holds now."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


class PeakSampler:
    """Highest anonymous memory of a process, sampled from outside it every 10 ms, so that no lock in it can hide a peak."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, _memory(self._pid)["RssAnon"])
            if self._stop.wait(0.01):
                return


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Load the checkpoint in fresh processes; print and return what it took."""
    results = []
    for engine, title in [(engine, f"{engine}, {which}") for engine in options.engines for which in ("first load", "later loads")]:
        if title.endswith("first load"):
            for path in [*(options.work / "facts").glob("**/*"), *(options.work / "quantised").glob("**/*")]:
                if path.is_file():
                    path.unlink()
        worker = Worker(engine, sys.executable, options)
        before = _memory(worker.pid)
        with PeakSampler(worker.pid) as loading:
            start = time.perf_counter()
            loaded = worker.ask({"do": "load"})
            seconds = time.perf_counter() - start
        after = _memory(worker.pid)
        cache = worker.ask({"do": "cache", "blocks": options.cache_blocks})
        with_cache = _memory(worker.pid)
        worker.ask({"do": "prepare", "batch": 1, "rows": 32})
        with PeakSampler(worker.pid) as running:
            worker.ask({"do": "pass", "rows": 32, "batch": 1, "warm": 1})
        worker.close()
        results.append({"title": title, "versions": worker.versions, **loaded, **cache, "load_s": seconds, "before": before})
        results[-1].update(load_peak=loading.peak, after_load=after, with_cache=with_cache, pass_peak=running.peak)
    machine = describe_machine(results[0]["versions"])
    print(f"machine: {json.dumps(machine)}\n\ncheckpoint {options.checkpoint.name}, dtype {options.dtype}, {options.threads} threads\n")
    _print_memory(results)
    return {"machine": machine, "checkpoint": options.checkpoint.name, "dtype": options.dtype, "memory": results}


def _print_memory(results: Sequence[dict[str, Any]]) -> None:
    """GB of anonymous memory above what the process had after its imports."""
    head = ["load", "s", "weights GB (type)", "peak / weights", "after / weights", "file-backed after, GB", "cache GB", "cache added, GB"]
    rows = []
    for item in results:
        base, weights = item["before"]["RssAnon"], item["weights_bytes"]
        rows.append(
            [
                item["title"],
                f"{item['load_s']:.1f}",
                f"{weights / 1e9:.3f} ({item['type']})",
                f"{(item['load_peak'] - base) / 1e9:.3f} = {(item['load_peak'] - base) / weights:.2f} ×",
                f"{(item['after_load']['RssAnon'] - base) / 1e9:.3f} = {(item['after_load']['RssAnon'] - base) / weights:.2f} ×",
                f"{item['after_load']['RssFile'] / 1e9:.3f}",
                f"{item['cache_bytes'] / 1e9:.3f}",
                f"{(item['with_cache']['RssAnon'] - item['after_load']['RssAnon']) / 1e9:.3f}",
            ]
        )
    print(markdown_table(head, rows))
    print("\nGB of anonymous memory, above what the process held after its imports; weights: all of them as the runtime keeps them")
    passes = max(item["pass_peak"] for item in results) / 1e9
    print(f"whole process during a 32-row pass: {passes:.3f} GB, after its imports: {results[0]['before']['RssAnon'] / 1e9:.3f} GB")


def _engine(name: str) -> str:
    """One of `ENGINES`, ours maybe with a level of kernels behind it."""
    if name.partition(LEVEL)[0] not in ENGINES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ENGINES)}")
    return name


_ENGINES_HELP = f"{', '.join(ENGINES)}; with {LEVEL}x86_64_v3 ours runs the kernels for AVX2, and so on"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for the checkpoint, the GGUF file, measured facts and logs")
    parser.add_argument("--checkpoint", type=Path, help="an untied bf16 Llama; default: one of the shape below in the work directory")
    defaults = {"hidden": 2048, "layers": 16, "heads": 32, "kv-heads": 8, "head-dim": 64, "ffn": 8192, "vocab": 32000}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gguf", type=Path, help="the file of the engines 'gguf' and 'llama-gguf', of any architecture")
    parser.add_argument("--cached", type=int, default=64, help="rows in the cache in front of the timed ones")
    parser.add_argument("--keep", action="store_true", help="keep the timed rows: llama.cpp cannot drop those of recurrent layers")
    parser.add_argument("--engines", nargs="+", type=_engine, default=["exact", "fast", "transformers", "llama"], help=_ENGINES_HELP)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python, gguf and numpy")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompt-repeats", type=int, help="rounds of cases of more than 16 rows; default: all")
    parser.add_argument("--warm", type=int, default=1, help="untimed passes in front of each timed one; of a prompt, in the first round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("auto", "f32", "bf16"), default="auto", help="paceline's; auto = as stored where the CPU can")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="transformers'")
    parser.add_argument("--memory", action="store_true", help="measure loading instead")
    parser.add_argument("--cache-blocks", type=int, default=128)
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--level", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.worker:
        serve(options)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    shape = Shape(options.hidden, options.layers, options.heads, options.kv_heads, options.head_dim, options.ffn, options.vocab)
    if options.checkpoint is None and set(options.engines) <= {"gguf", "llama-gguf"}:
        options.checkpoint = options.gguf
    elif options.checkpoint is None:
        options.checkpoint = options.work / f"llama-{shape.layers}x{shape.hidden}-{shape.vocab}"
        if not (options.checkpoint / "config.json").is_file():
            write_llama(options.checkpoint, shape)
    result = measure_memory(options) if options.memory else time_engines(options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
