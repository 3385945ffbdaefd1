"""Attention of drafted rows over the beginning of a context and over rows of their own."""

import torch

from paceline.training.layers import attend


def test_training_attention_equals_softmax_over_visible_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 3, 2, 4, 8, generator=generator)  # 4 query heads, 2 key heads
    context = torch.randn(2, 5, 2, 8, generator=generator), torch.randn(2, 5, 2, 8, generator=generator)
    own = torch.randn(2, 3, 2, 2, 8, generator=generator), torch.randn(2, 3, 2, 2, 8, generator=generator)
    lengths = torch.tensor([[1, 3, 5], [0, 2, 4]])
    for given in (own, None):
        lengths = lengths.clamp(min=0 if given is not None else 1)
        found = attend(q, context, lengths, given)
        for b in range(2):
            for n in range(3):
                keys, values = (part[b, : lengths[b, n]] for part in context)
                if given is not None:
                    keys, values = torch.cat([keys, given[0][b, n]]), torch.cat([values, given[1][b, n]])
                for row in range(2):
                    for head in range(4):
                        weights = (keys[:, head // 2] @ q[b, n, row, head] / 8**0.5).softmax(0)
                        torch.testing.assert_close(found[b, n, row, head], weights @ values[:, head // 2])
