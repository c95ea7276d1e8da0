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

from typing import TYPE_CHECKING

# Imported when a name is first asked for: what lists and verifies checkpoints needs neither torch nor these.
if TYPE_CHECKING:
    from shardopt.sharding.public import *  # noqa: F403  # re-exports, for type checkers
else:
    from shardopt.runtime.exports import lazily as _lazily

    __getattr__, __dir__ = _lazily(__name__, "shardopt.sharding.public")
