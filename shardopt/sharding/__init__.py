"""Tensors as boxes: integer geometry (`box`, `mesh`), layouts, and the view of any tensor.

To add a kind of tensor: a framework's own class is registered with a `TensorKind` (`kinds.register_kind`), and nothing
here changes. One that torch brings gets a file of its own, as `dtensor`, `sharded_tensor`, `pieces_tensor` and
`wrapper` (LocalShardsWrapper) are, and a branch in each of the functions that ask for the kind of a tensor:

    traceable.py   wrappers by torch's own protocol: of one tensor, which is taken for it; of several, stored as these
    view.py        view_of, local_tensors, assemble, local_like, empty_local_tensor     boxes, memory, the way back
                   is_held, is_on_all_ranks, tells_of_others, members_of, groups_of     on which ranks it is
    gradients.py   local_gradients, GradientReader, takes_gradient, zero_gradients, requires_gradient
    reduced.py     shard_groups_of, is_first_of, sum_memory, local_views, sum_like, stack_like,
                   blocks_like
                   a dimension less or more: asked only by algorithms that reduce, never of registered kinds
"""

from shardopt.runtime.exports import offer as _offer
from shardopt.sharding.box import Box as Box
from shardopt.sharding.box import cover_faults as cover_faults
from shardopt.sharding.box import whole as whole
from shardopt.sharding.gradients import local_gradients as local_gradients
from shardopt.sharding.kinds import cut_range as cut_range
from shardopt.sharding.kinds import register_kind as register_kind
from shardopt.sharding.layout import Layout as Layout
from shardopt.sharding.pieces import Piece as Piece
from shardopt.sharding.pieces import View as View
from shardopt.sharding.pieces_tensor import PiecesTensor as PiecesTensor
from shardopt.sharding.tensor_kind import TensorKind as TensorKind
from shardopt.sharding.view import assemble as assemble
from shardopt.sharding.view import local_tensors as local_tensors
from shardopt.sharding.view import view_of as view_of

_offer(__name__)
