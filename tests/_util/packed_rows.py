"""Rows that hold several documents, told by the lengths of these."""

import torch


def positions(rows):
    """Position ids `[rows, length]`, which begin anew with every document."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def each(rows):
    """Row, first token and end of every document."""
    for row, lengths in enumerate(rows):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        yield from ((row, end - n, end) for n, end in zip(lengths, ends, strict=True))
