"""Semi-synchronous training: the optimizer (`semi_sync`), its anchors (`outer`), and an island's `weights`.

`semisync_optimizer` has torchrec's optimizer, under its name and signature.
"""

from shardopt.optim.semi_sync.semi_sync import SemiSync as SemiSync
from shardopt.optim.semi_sync.semisync_optimizer import SemisyncOptimizer as SemisyncOptimizer
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
