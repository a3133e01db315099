"""Sums over all rows of a call to which each document adds the same bits, wherever it is packed."""

import torch
from torch import Tensor


def sum_by_documents(x: Tensor, first: Tensor) -> Tensor:
    """Sums of (nheads, rows) over all rows, (nheads,): each document by itself, then what comes of them.

    A document's rows are added in pairs that are counted from its first row: in each round a row gets the sum that is
    twice as far away as in the round before, if that is of the same document. So if all other rows are zeros, the
    result is the document's own sum, bit by bit, whatever else there is.

    Args:
        x: what is to be summed, 0 in padding.
        first: (documents,), the first row of each, int32, in ascending order. Rows before them are of none.
    """
    rows = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    document = torch.searchsorted(first, rows, right=True)
    distance = 1
    while distance < x.shape[1]:
        is_same = document[distance:] == document[:-distance]
        added = x[:, :-distance] + x[:, distance:].where(is_same, 0)
        x = torch.cat((added, x[:, -distance:]), 1)
        distance *= 2
    begins = torch.cat((document[:1] > -1, document[1:] != document[:-1]))
    return x.where(begins, 0).sum(1)
