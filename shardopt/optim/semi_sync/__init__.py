"""Semi-synchronous training: islands that step by themselves, and meet every so many steps.

`schedule` (when, and which parameters), `buckets` (flat buffers that are added up), `weights` (of an island, against
the anchors), `islands` (who meets, and what they agree on), `outer` (anchors and steps on their mean change),
`semi_sync` (the optimizer); `semisync_optimizer` has torchrec's, under its name and signature.
"""

from shardopt.optim.semi_sync.semi_sync import SemiSync
from shardopt.optim.semi_sync.semisync_optimizer import SemisyncOptimizer

__all__ = ["SemiSync", "SemisyncOptimizer"]
