"""The loop: resumed runs are bit-identical, the learning rate ends at zero, training lowers the loss."""

from dataclasses import replace

import pytest
import torch

from harness.training_runs import TinyRun, record_tiny
from paceline.errors import CheckpointError
from paceline.training.settings import METHODS
from paceline.training.trainer import CHECKPOINT, Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return record_tiny(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("method", METHODS)
def test_resumed_training_equals_an_uninterrupted_run(run: TinyRun, method: str) -> None:
    whole = run.make_trainer(method)
    start = {name: values.clone() for name, values in whole.drafter.state_dict().items()}
    assert whole.run()
    first = run.make_trainer(method)
    assert not first.run(lambda: first.progress.step == 7)  # in the middle of an epoch
    second = run.make_trainer(method, steps=12)
    torch.manual_seed(99)  # nothing depends on torch's own generator
    second.load()
    assert second.progress.step == 7
    assert second.run()
    expected = whole.drafter.state_dict()
    for name, values in second.drafter.state_dict().items():
        assert torch.equal(values, expected[name]), name
    assert any(not torch.equal(values, start[name]) for name, values in expected.items())


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("loss", ["soft", "hard"])
@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss(run: TinyRun, method: str, loss: str) -> None:
    trainer = run.make_trainer(method, loss=loss, steps=64)
    assert trainer.run()
    history = trainer.progress.history
    assert history[-1]["loss"] < history[0]["loss"] - 0.08  # a soft loss ends at the entropy of the target
    assert loss == "soft" or history[-1]["accuracy"][0] > history[0]["accuracy"][0]
    assert trainer.progress.estimates[-1]["all"]["mean_acceptance_length"] > 1.0


def test_training_time_budget_ends_with_a_learning_rate_of_zero(run: TinyRun) -> None:
    seconds = iter(range(10**6))
    settings = replace(run.settings, drafter="medusa", steps=None, minutes=100 / 60)  # a step takes one simulated second
    made = run.make_drafter(settings)
    data = run.data
    trainer = Trainer(made, data.train.open(), data.heldout.open(), settings, run.directory, lambda text: None, clock=lambda: next(seconds))
    assert trainer.run()
    assert trainer.progress.step in (99, 100)
    assert trainer.progress.history[-1]["learning_rate"] < 1e-3 * (settings.learning_rate or 0)
    assert max(entry["learning_rate"] for entry in trainer.progress.history) > 0.8 * (settings.learning_rate or 0)


def test_unreadable_training_checkpoint_is_refused(run: TinyRun) -> None:
    trainer = run.make_trainer("medusa")
    (run.directory / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises((CheckpointError,), match="cannot be continued"):
        trainer.load()
