"""Semi-synchronous training: islands that step by themselves, and meet every so many steps.

`schedule` (when, and which parameters), `buckets` (flat buffers that are added up), `weights` (of an island, against the
anchors), `islands` (who meets, and what they agree on), `outer` (anchors and steps on their mean change), `semi_sync`
(the optimizer).
"""

from shardopt.optim.semi_sync.semi_sync import SemiSync

__all__ = ["SemiSync"]
