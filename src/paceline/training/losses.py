"""Cross-entropy over a draft vocabulary, with the tokens of the text or with the target's distribution.

The product with the vocabulary matrix, the softmax and both gradients are computed chunk by chunk, so that no logits are kept:
    loss = sum_r w_r (log sum_v exp z_rv - sum_v p_rv z_rv),   z = x W^T,   dz = w (softmax(z) - p).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ROWS = 512


class Targets(NamedTuple):
    """Training targets of the rows.

    Attributes:
        labels: [M] draft ids; -1 = the token has none.
        probs: [M, Vd] the target's distribution over the draft vocabulary; None = one-hot at the labels.
    """

    labels: Tensor
    probs: Tensor | None


class Predicted(NamedTuple):
    """Weighted sum of the losses, and the best draft id [R] of each row."""

    loss: Tensor
    best: Tensor


def vocabulary_loss(x: Tensor, matrix: Tensor, targets: Targets, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Predicted:
    """Return the loss of rows, with gradients of `x` and `matrix`.

    Args:
        x: [R, W] rows.
        matrix: [Vd, W] vocabulary matrix.
        targets: of M positions.
        index: [R] the position of each row.
        weights: [R] of each row; 0 leaves it out.
        dtype: of the products.
    """
    loss, best = _VocabularyLoss.apply(x, matrix, targets.labels, targets.probs, index, weights, dtype)  # type: ignore[no-untyped-call]
    return Predicted(loss, best)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, labels: Tensor, probs: Tensor | None, index: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        needs_gradient, trains_matrix = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        columns, of_matrix = matrix.to(dtype), torch.zeros_like(matrix) if trains_matrix else torch.empty(0)
        of_x, best = torch.empty_like(x), torch.empty(len(x), dtype=torch.long, device=x.device)
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            rows, own = x[part].to(dtype), index[part]
            logits = (rows @ columns.T).float()
            best[part] = logits.argmax(-1)
            if probs is not None:
                wanted = probs[own].float()
                score = (logits * wanted).sum(-1)
            else:
                picked = labels[own].clamp(min=0)[:, None]
                score = logits.gather(1, picked)[:, 0]
            most = logits.amax(-1, keepdim=True)
            exps = logits.sub_(most).exp_()
            sums = exps.sum(-1, keepdim=True)
            total += ((sums.log() + most)[:, 0] - score).mul(weights[part]).sum()
            if needs_gradient:
                exps.div_(sums)
                if probs is not None:
                    exps.sub_(wanted)
                else:
                    exps.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=exps.dtype))
                of_logits = exps.mul_(weights[part, None]).to(dtype)
                of_x[part] = (of_logits @ columns).to(x.dtype)
                if trains_matrix:
                    of_matrix += (of_logits.T @ rows).float()
        ctx.save_for_backward(of_x, of_matrix)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_matrix = ctx.saved_tensors
        of_matrix = of_matrix * gradients[0] if ctx.needs_input_grad[1] else None
        return of_x * gradients[0], of_matrix, None, None, None, None, None
