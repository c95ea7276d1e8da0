"""The public names of `shardopt.sharding`, one per line."""

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
