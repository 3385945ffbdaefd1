"""The chunked loss equals its definition, in value and gradients."""

import pytest
import torch
from torch import Tensor

from paceline.training import losses
from paceline.training.losses import Predicted, Targets, vocabulary_loss


def eager_loss(x: Tensor, matrix: Tensor, targets: Targets, index: Tensor, weights: Tensor) -> Predicted:
    """Compute what `vocabulary_loss` computes, by its definition."""
    logits = (x @ matrix.T).float()
    logs = logits.log_softmax(-1)
    if targets.probs is not None:
        losses = -(targets.probs[index].float() * logs).sum(-1)
    else:
        losses = -logs.gather(1, targets.labels[index].clamp(min=0)[:, None])[:, 0]
    return Predicted((losses * weights).sum(), logits.argmax(-1))


@pytest.mark.parametrize("is_soft", [True, False])
def test_vocabulary_loss_equals_definition(is_soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", 5)  # several chunks, the last one short
    generator = torch.Generator().manual_seed(1)
    x, matrix = torch.randn(13, 6, generator=generator), torch.randn(9, 6, generator=generator)
    labels = torch.randint(-1, 9, (7,), generator=generator)
    probs = torch.randn(7, 9, generator=generator).softmax(-1) if is_soft else None
    index = torch.randint(0, 7, (13,), generator=generator)
    targets, weights = Targets(labels, probs), (labels[index] >= 0).float() * torch.rand(13, generator=generator)
    results = []
    for compute in (eager_loss, lambda *given: vocabulary_loss(*given, torch.float32)):
        own_x, own_matrix = x.clone().requires_grad_(), matrix.clone().requires_grad_()
        loss, best = compute(own_x, own_matrix, targets, index, weights)
        (3.0 * loss).backward()
        results.append((loss.detach(), best, own_x.grad, own_matrix.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert results[0][2] is not None
    assert results[0][2].abs().sum() > 0


def test_vocabulary_loss_frozen_matrix_gets_no_gradient() -> None:
    x, matrix = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss, _ = vocabulary_loss(x, matrix, Targets(torch.tensor([1]), None), torch.zeros(3, dtype=torch.long), torch.ones(3), torch.float32)
    loss.backward()
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ matrix.T, torch.ones(3, dtype=torch.long), reduction="sum"), x)
    torch.testing.assert_close(x.grad, expected[0])
