"""Lists of tensors that are updated together."""

import torch

from shardopt.algorithms.lists import add_squares
from tests.support.atomics import RefusesAtomics


def test_squares_are_added_in_the_order_of_the_tensors():
    # In fp32 1 is lost beside 1e8: alone it would be there.
    tensors = [torch.tensor([each]) for each in (1e4, 1.0, 2.0)]
    for owners, sums in [((0, 1, 1), (1e8, 5.0)), ((0, 0, 1), (1e8, 4.0)), ((0, 1, 2), (1e8, 1.0, 4.0))]:
        into = torch.zeros(len(sums), 2)
        with RefusesAtomics():
            add_squares(into[:, 0], torch.tensor(owners), tensors)
        assert into.tolist() == [[each, 0] for each in sums]
