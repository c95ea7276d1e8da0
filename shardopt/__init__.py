"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name."""

from typing import TYPE_CHECKING

from shardopt.version import __version__ as __version__

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "SOAP",
    "SWA",
    "AdEMAMix",
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradScaler",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "Lion",
    "MixtureSampler",
    "OptimizerWrapper",
    "PerRankState",
    "RandomState",
    "ReduceLROnPlateau",
    "ResumableSampler",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "SemiSync",
    "SemisyncOptimizer",
    "Shampoo",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "in_backward",
    "keyed",
    "ramped_decay",
    "update_bn",
]

# Imported when they are first asked for: the shell's verbs are modules of this package, and their help needs no torch.
if TYPE_CHECKING:
    from shardopt.algorithms.blocked.shampoo import Shampoo
    from shardopt.algorithms.blocked.soap import SOAP
    from shardopt.algorithms.elementwise.ademamix import AdEMAMix
    from shardopt.algorithms.elementwise.lion import Lion
    from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
    from shardopt.algorithms.layer_wise.lamb import LAMB
    from shardopt.algorithms.layer_wise.lars import LARS
    from shardopt.algorithms.row_wise.row_wise import RowWiseAdagrad, RowWiseAdam
    from shardopt.data.mixture import MixtureSampler
    from shardopt.data.random_state import PerRankState, RandomState
    from shardopt.data.sampler import ResumableSampler
    from shardopt.optim.averaging import EMA, SWA
    from shardopt.optim.backward import in_backward
    from shardopt.optim.batch_norm import update_bn
    from shardopt.optim.clipping import GradientClipping, GradientClippingOptimizer
    from shardopt.optim.decay_ramps import ramped_decay
    from shardopt.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
    from shardopt.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper, keyed
    from shardopt.optim.scaler import GradScaler
    from shardopt.optim.schedules import ReduceLROnPlateau
    from shardopt.optim.semi_sync.semi_sync import SemiSync
    from shardopt.optim.semi_sync.semisync_optimizer import SemisyncOptimizer
    from shardopt.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
else:
    from shardopt.lazy import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "shardopt.algorithms.blocked.shampoo": ["Shampoo"],
            "shardopt.algorithms.blocked.soap": ["SOAP"],
            "shardopt.algorithms.elementwise.ademamix": ["AdEMAMix"],
            "shardopt.algorithms.elementwise.lion": ["Lion"],
            "shardopt.algorithms.elementwise.schedule_free": ["ScheduleFreeAdamW", "ScheduleFreeSGD"],
            "shardopt.algorithms.layer_wise.lamb": ["LAMB"],
            "shardopt.algorithms.layer_wise.lars": ["LARS"],
            "shardopt.algorithms.row_wise.row_wise": ["RowWiseAdagrad", "RowWiseAdam"],
            "shardopt.data.mixture": ["MixtureSampler"],
            "shardopt.data.random_state": ["PerRankState", "RandomState"],
            "shardopt.data.sampler": ["ResumableSampler"],
            "shardopt.optim.averaging": ["EMA", "SWA"],
            "shardopt.optim.backward": ["in_backward"],
            "shardopt.optim.batch_norm": ["update_bn"],
            "shardopt.optim.clipping": ["GradientClipping", "GradientClippingOptimizer"],
            "shardopt.optim.decay_ramps": ["ramped_decay"],
            "shardopt.optim.fused": ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"],
            "shardopt.optim.keyed": [
                "CombinedOptimizer",
                "KeyedOptimizer",
                "KeyedOptimizerWrapper",
                "OptimizerWrapper",
                "keyed",
            ],
            "shardopt.optim.scaler": ["GradScaler"],
            "shardopt.optim.schedules": ["ReduceLROnPlateau"],
            "shardopt.optim.semi_sync.semi_sync": ["SemiSync"],
            "shardopt.optim.semi_sync.semisync_optimizer": ["SemisyncOptimizer"],
            "shardopt.optim.warmup": ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"],
        },
    )
