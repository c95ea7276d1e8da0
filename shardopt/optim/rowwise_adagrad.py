"""torchrec.optim's place for `RowWiseAdagrad`; the algorithm is in `shardopt.algorithms.row_wise.row_wise`."""

from shardopt.algorithms.row_wise.row_wise import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]
