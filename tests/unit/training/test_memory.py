"""What a run says about its memory: the watch sees short peaks, and training counts the optimizer's moments."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.live_server import until
from harness.training_runs import record_tiny
from paceline.machine import private_memory_bytes
from paceline.training import trainer
from paceline.training.memory import MemoryWatch

SIZE = 256 << 20  # far more than what other tests' objects may free meanwhile


def test_memory_watch_sees_an_array_that_is_freed_again() -> None:
    gc.collect()
    before = private_memory_bytes()
    with MemoryWatch() as watch:
        array = np.ones(SIZE, np.uint8)
        until(lambda: watch.peak_bytes > before + SIZE // 2)
        del array
    assert watch.peak_bytes < before + 2 * SIZE


class WatchOfTests(MemoryWatch):
    def _sample(self) -> None:
        self.peak_bytes = 1000


def test_expected_memory_of_training_counts_the_moments_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record_tiny(tmp_path).make_trainer("medusa", steps=2)
    monkeypatch.setattr(trainer, "MemoryWatch", WatchOfTests)
    before = {name: values.clone() for name, values in made.drafter.state_dict().items()}
    assert made.measure_memory_bytes() == 1000 + 2 * 4 * made.drafter.num_parameters()  # two float32 numbers for each value
    assert all((values == before[name]).all() for name, values in made.drafter.state_dict().items())
    assert all(one.grad is None for one in made.drafter.parameters())
    assert made.run()
    assert made.measure_memory_bytes() == 1000  # a resumed run has the moments already


def test_batches_of_new_shapes_do_not_take_more_and_more_memory() -> None:
    """torch and oneDNN would keep a prepared product for each of 50 shapes: 70 MB instead of 23, on a processor with bfloat16."""
    code = """
import paceline.training, torch
from paceline.machine import private_memory_bytes
torch.set_num_threads(1)
layer = torch.nn.Linear(512, 512)
def step(rows):
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(rows, 512)).float().sum().backward()
step(1000)
before = private_memory_bytes()
for rows in range(800, 1000, 4):
    step(rows)
print(private_memory_bytes() - before)
"""
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 45_000_000
