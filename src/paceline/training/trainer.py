"""The training loop: AdamW, warm-up and cosine, estimates of the acceptance, checkpoints that continue bit for bit.

Everything random is a function of the seed and the number of the step or epoch, so a checkpoint needs no state of a random generator. The
number of steps of a time budget is planned from the measured time of a step every few steps, and the plan is part of the checkpoint.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.errors import CheckpointError, shortened
from paceline.training.batches import epoch_batches, make_batch
from paceline.training.drafter import StepResult, TrainableDrafter
from paceline.training.memory import MemoryWatch
from paceline.training.prompts import PrintLine
from paceline.training.saving import saved_file
from paceline.training.settings import TrainSettings
from paceline.training.shards import SequenceData

CHECKPOINT = "checkpoint.pt"
WARMUP_STEPS = 30
PLAN_STEPS = 16  # between two plans, and two entries of the history
WEIGHT_DECAY, CLIP = 0.05, 1.0
_SAVE_S, _ESTIMATE_S, _SAY_S = 120.0, 90.0, 20.0


@dataclass(slots=True)
class Progress:
    """Progress of a training run.

    Attributes:
        step: steps done.
        epoch, index: the next batch.
        elapsed_s: seconds of training, without estimates and checkpoints.
        total_steps: planned; 0 = not yet.
        history: one entry for every few steps.
        estimates: acceptance on held-out texts.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    elapsed_s: float = 0.0
    total_steps: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    estimates: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated acceptance on a set of texts: greedy chains after each token, walked as decoding would walk them.

    Attributes:
        mean_acceptance_length: tokens of a step, as `SpeculationStats` counts them: the prompt's last pass is a step.
        accuracy: share of first draft tokens that are right, after every token.
        num_tokens: of the answers.
    """

    mean_acceptance_length: float
    accuracy: float
    num_tokens: int


def count_steps(hits: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the steps and tokens of a text.

    Args:
        hits: [N, depth] whether each draft token is right; row i drafts after the token before the i-th of the answer.
    """
    runs = np.cumprod(hits, axis=1).sum(1)
    steps = position = 1  # the prompt's last pass emits the first token
    while position < len(hits):
        position += int(runs[position]) + 1
        steps += 1
    return steps, len(hits)


class Trainer:
    """Trains a drafter on recorded data.

    Args:
        directory: of the checkpoint.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        data: SequenceData,
        heldout: SequenceData,
        settings: TrainSettings,
        directory: Path,
        print_line: PrintLine,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter, self.settings, self.directory, self.progress = drafter.to(device), settings, directory, Progress()
        self._data, self._heldout, self._print_line, self._device, self._clock = data, heldout, print_line, device, clock
        matrices = [one for one in drafter.parameters() if one.dim() > 1]
        vectors = [one for one in drafter.parameters() if one.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
        self._batches: list[list[int]] = []
        self._memory = MemoryWatch()

    def run(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until `is_stopped`; save a checkpoint and return whether the end is reached."""
        self._print_line(
            f"training takes about {self.measure_memory_bytes() / 1e9:.1f} GB of memory; recorded data are read from disk and not counted"
        )
        with MemoryWatch() as self._memory:
            return self._train(is_stopped)

    def _train(self, is_stopped: Callable[[], bool]) -> bool:
        progress = self.progress
        saved_s = estimated_s = said_s = progress.elapsed_s
        results: list[tuple[float, list[int], list[int]]] = []
        while not self._is_finished():
            if is_stopped():
                self.save()
                return False
            start = self._clock()
            results.append(self._step())
            progress.elapsed_s += self._clock() - start
            if progress.step % PLAN_STEPS == 0 or self._is_finished():
                self._plan()
                progress.history.append(self._entry(results))
                results = []
                if progress.elapsed_s - said_s >= _SAY_S or len(progress.history) == 1:
                    said_s = progress.elapsed_s
                    self._print_progress()
            if progress.elapsed_s - estimated_s >= max(_ESTIMATE_S, 6 * self.settings.minutes):
                estimated_s = progress.elapsed_s
                self._estimate()
            if progress.elapsed_s - saved_s >= _SAVE_S:
                saved_s = progress.elapsed_s
                self.save()
        self._estimate()
        self.save()
        return True

    def _is_finished(self) -> bool:
        progress = self.progress
        return 0 < (self.settings.steps or progress.total_steps) <= progress.step

    def _entry(self, results: Sequence[tuple[float, list[int], list[int]]]) -> dict[str, Any]:
        """Return the entry of the history for the results of the steps since the previous one."""
        progress = self.progress
        seconds = max(1e-9, progress.elapsed_s - (progress.history[-1]["elapsed_s"] if progress.history else 0.0))
        losses, hits, rows = zip(*results, strict=True)
        num_hits, num_rows = (np.sum(counts, axis=0).tolist() for counts in (hits, rows))
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "elapsed_s": round(progress.elapsed_s, 2),
            "loss": round(sum(losses) / len(losses), 4),
            "accuracy": [round(right / max(1, count), 4) for right, count in zip(num_hits, num_rows, strict=True)],
            "tokens_per_s": round(num_rows[0] / seconds, 1),
            "learning_rate": self._learning_rate(),
        }

    def _plan(self) -> None:
        """Set the number of steps to what fits into the budget."""
        progress, budget_s = self.progress, 60 * self.settings.minutes
        left_s = max(0.0, budget_s - progress.elapsed_s)
        recent = progress.history[-4:]  # other programs come and go
        since = recent[0] if len(recent) == 4 else {"step": 0, "elapsed_s": 0.0}
        step_s = (progress.elapsed_s - since["elapsed_s"]) / max(1, progress.step - since["step"])
        progress.total_steps = self.settings.steps or progress.step + int(left_s / (step_s + 1e-9))

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step: a linear warm-up, then a cosine to zero."""
        step, total = self.progress.step, self.settings.steps or self.progress.total_steps
        warmup = WARMUP_STEPS if total == 0 else min(WARMUP_STEPS, max(1, total // 10))
        factor = min(1.0, (step + 1) / warmup)
        if total > warmup and step > warmup:
            factor = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        return factor * (self.settings.learning_rate or 1e-3)

    def _step(self) -> tuple[float, list[int], list[int]]:
        """Train on the next batch; return its loss, and hits and rows by depth."""
        progress, settings = self.progress, self.settings
        if not self._batches:
            self._batches = epoch_batches(self._data, settings.seed, progress.epoch, settings.batch_tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        result = self._compute_gradients(self._batches[progress.index], progress.step)
        nn.utils.clip_grad_norm_(self.drafter.parameters(), CLIP)
        self._optimizer.step()
        progress.step, progress.index = progress.step + 1, progress.index + 1
        if progress.index >= len(self._batches):
            progress.epoch, progress.index, self._batches = progress.epoch + 1, 0, []
        return float(result.loss.detach()), result.num_hits, result.num_rows

    def _compute_gradients(self, indices: list[int], step: int) -> StepResult:
        """Compute the loss of one batch and its gradients, which replace earlier ones."""
        batch = make_batch(self._data, indices, self.drafter.vocabulary, self.drafter.target.config.hidden_size, self._device)
        generator = torch.Generator().manual_seed(self.settings.seed * 2**32 + step)
        with torch.autocast(self._device, torch.bfloat16, enabled=self.drafter.dtype is torch.bfloat16):
            result = self.drafter.step(batch, generator)
        self._optimizer.zero_grad(set_to_none=True)
        result.loss.backward()  # type: ignore[no-untyped-call]
        return result

    def measure_memory_bytes(self) -> int:
        """Return the memory of this process that training will take, without mapped files and that of a GPU.

        It is the peak while gradients are computed, which are not applied, of the batches of the first epoch with the most attention scores
        and those with the most positions, two of each. AdamW's two moments of each value are added, unless they are there already.
        """

        data = self._data

        def num_positions(indices: list[int]) -> int:
            return len(indices) * max(len(data.token_ids[index]) for index in indices)

        def num_scores(indices: list[int]) -> int:
            """Return the number of attention scores, answer tokens times positions, padding included."""
            return num_positions(indices) * max(int(data.is_answer[index].sum()) for index in indices)

        batches = epoch_batches(data, self.settings.seed, 0, self.settings.batch_tokens)
        with MemoryWatch() as watch:
            for indices in [*sorted(batches, key=num_scores)[-2:], *sorted(batches, key=num_positions)[-2:]]:
                self._compute_gradients(indices, 0)
        self._optimizer.zero_grad(set_to_none=True)
        if self._device != "cpu":
            return watch.peak_bytes
        without_moments = [one for one in self.drafter.parameters() if one.requires_grad and one not in self._optimizer.state]
        return watch.peak_bytes + sum(2 * one.numel() * one.element_size() for one in without_moments)

    def _estimate(self) -> None:
        """Estimate the acceptance on held-out texts."""
        if not len(self._heldout):
            return
        found = self.estimates()
        self.progress.estimates.append(
            {
                "elapsed_s": round(self.progress.elapsed_s, 1),
                "step": self.progress.step,
                **{name: asdict(one) for name, one in found.items()},
            }
        )
        parts = [f"{name} {one.mean_acceptance_length:.2f} (first {one.accuracy:.0%})" for name, one in found.items()]
        self._print_line(f"held out, tokens a step: {', '.join(parts)}")

    @torch.no_grad()
    def estimates(self) -> dict[str, Estimate]:
        """Return the estimate for the held-out texts of each source, and for all of them as "all"."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        data, drafter = self._heldout, self.drafter
        for indices in epoch_batches(data, 0, 0, max(1, self.settings.batch_tokens // 2)):
            batch = make_batch(data, indices, drafter.vocabulary, drafter.target.config.hidden_size, self._device)
            with torch.autocast(self._device, torch.bfloat16, enabled=drafter.dtype is torch.bfloat16):
                hits = drafter.hits(batch)
            for row, index in enumerate(indices):
                own = hits[row][batch.is_root[row]].cpu().numpy()
                if len(own):
                    found.setdefault(data.sources[index], []).append((*count_steps(own), int(own[:, 0].sum())))
        found["all"] = [one for parts in found.values() for one in parts]
        sums = {source: [sum(column) for column in zip(*parts, strict=True)] for source, parts in found.items() if parts}
        return {source: Estimate(tokens / steps, right / tokens, tokens) for source, (steps, tokens, right) in sums.items()}

    def _print_progress(self) -> None:
        progress, last = self.progress, self.progress.history[-1]
        left_s = (progress.total_steps - progress.step) * progress.elapsed_s / progress.step
        accuracy = " ".join(f"{one:.2f}" for one in last["accuracy"])
        where = f"step {progress.step:,} of {progress.total_steps:,}, epoch {progress.epoch + 1}"
        rate, memory = f"{last['tokens_per_s']:,.0f} tokens/s", f"peak {self._memory.peak_bytes / 1e9:.1f} GB of memory"
        self._print_line(f"{where}: loss {last['loss']:.3f}, accuracy {accuracy}, {rate}, {memory}, {left_s / 60:.1f} minutes left")

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the one before it."""
        state = {"drafter": self.drafter.state_dict(), "optimizer": self._optimizer.state_dict(), "progress": asdict(self.progress)}
        with saved_file(self.directory / CHECKPOINT) as unfinished:
            torch.save(state, unfinished)

    def load(self) -> None:
        """Continue from the checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is another drafter's.
        """
        path = self.directory / CHECKPOINT
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            self.drafter.load_state_dict(state["drafter"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
        except Exception as error:  # a damaged pickle may raise anything
            reason = shortened(next(iter(str(error).splitlines()), type(error).__name__))
            raise CheckpointError(f"{path} cannot be continued ({reason}): delete it to train from the beginning") from error
