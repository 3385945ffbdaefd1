"""How much two engines at once slow each other down: passes of one row a second, alone and beside the other, on the same processors.

python tools/bench_neighbours.py --rounds 3 --seconds 3
python tools/bench_neighbours.py --hog 1            # and beside a program that keeps a processor busy

Two processes open a random Llama, then take turns: the first alone, the second alone, both at once. Medians are printed, and what each
keeps of its speed alone.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_machine import describe_machine, markdown_table
from bench_models import Shape, write_llama

SHAPES = {"60M": Shape(512, 8, 8, 4, 64, 2048, 32000), "330M": Shape(1024, 20, 16, 8, 64, 3072, 32000)}
CACHED = 64


def serve(directory: Path, quantization: str) -> None:
    """A process with an engine: for each line with a number of seconds, passes a second in that time."""
    import numpy as np

    from paceline.config import EngineConfig, quant_options
    from paceline.runtimes.base import Numerics, assemble
    from paceline.runtimes.load import RuntimeOptions, load_runtime

    options = RuntimeOptions(
        numerics=Numerics.EXACT,
        num_threads=EngineConfig().num_threads,
        max_model_len=512,
        quantization=quant_options("quantization", quantization),
    )
    runtime = load_runtime(directory, options).runtime
    cache = runtime.new_cache(16)
    sequence = cache.new_sequence()
    prompt = np.arange(CACHED).tolist()
    runtime.forward(*assemble([cache.reserve(sequence, range(-1, CACHED - 1), CACHED)], [prompt], [[]]))
    cache.keep_path(sequence, CACHED - 1)
    print("ready", flush=True)
    for line in sys.stdin:
        end, start, count = time.perf_counter() + float(line), time.perf_counter(), 0
        while time.perf_counter() < end:
            runtime.forward(*assemble([cache.reserve(sequence, [-1])], [[count % 1000]], [[0]]))
            cache.cancel(sequence)
            count += 1
        print(count / (time.perf_counter() - start), flush=True)


def passes_a_second(engines: list[subprocess.Popen[str]], seconds: float) -> list[float]:
    """Of engines that run at once."""
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write(f"{seconds}\n")
        engine.stdin.flush()
    return [float(engine.stdout.readline()) for engine in engines if engine.stdout is not None]


def compare(directory: Path, options: argparse.Namespace) -> list[list[str]]:
    """A row for each engine and neighbour."""
    command = [sys.executable, __file__, "--serve", str(directory), "--quantization", options.quantization]
    engines = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all(engine.stdout is not None and engine.stdout.readline() for engine in engines)
    alone: list[list[float]] = [[], []]
    beside: list[list[float]] = [[], []]
    busy: list[float] = []
    for _ in range(options.rounds):
        for index, engine in enumerate(engines):
            alone[index] += passes_a_second([engine], options.seconds)
        for index, rate in enumerate(passes_a_second(engines, options.seconds)):
            beside[index].append(rate)
        if options.hog:
            hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.hog)]
            busy += passes_a_second(engines[:1], options.seconds)
            for hog in hogs:
                hog.kill()
                hog.wait()
    for engine in engines:
        engine.communicate()
    rows = [line(f"engine {index}", "the other engine", alone[index], beside[index]) for index in range(2)]
    return rows + ([line("engine 0", f"{options.hog} busy program(s)", alone[0], busy)] if busy else [])


def line(name: str, neighbour: str, alone: list[float], beside: list[float]) -> list[str]:
    rates = [one / other for one, other in zip(beside, alone, strict=True)]
    kept = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
    return [name, neighbour, f"{statistics.median(alone):.1f}", f"{statistics.median(beside):.1f}", kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="330M")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--hog", type=int, default=0, help="programs that keep a processor busy, each")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written, or lies already")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.quantization)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = (options.directory or Path(folder)) / options.shape
        if not (directory / "config.json").is_file():
            write_llama(directory, SHAPES[options.shape])
        print(describe_machine())
        print(markdown_table(["engine", "beside", "passes/s alone", "passes/s then", "kept"], compare(directory, options)))


if __name__ == "__main__":
    main()
