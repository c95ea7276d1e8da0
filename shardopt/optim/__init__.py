"""Optimizers with state keyed by fully qualified parameter name.

The function that builds one by algorithm and pattern is `shardopt.keyed`; here `keyed` is the module.
"""

from shardopt.algorithms.blocked.shampoo import Shampoo as Shampoo
from shardopt.algorithms.blocked.soap import SOAP as SOAP
from shardopt.algorithms.elementwise.ademamix import AdEMAMix as AdEMAMix
from shardopt.algorithms.elementwise.lion import Lion as Lion
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeSGD as ScheduleFreeSGD
from shardopt.algorithms.layer_wise.lamb import LAMB as LAMB
from shardopt.algorithms.layer_wise.lars import LARS as LARS
from shardopt.algorithms.row_wise.row_wise import RowWiseAdagrad as RowWiseAdagrad
from shardopt.algorithms.row_wise.row_wise import RowWiseAdam as RowWiseAdam
from shardopt.optim.averages.batch_norm import update_bn as update_bn
from shardopt.optim.averages.formulas import EMA as EMA
from shardopt.optim.averages.formulas import SWA as SWA
from shardopt.optim.backward import in_backward as in_backward
from shardopt.optim.clipping import GradientClipping as GradientClipping
from shardopt.optim.clipping import GradientClippingOptimizer as GradientClippingOptimizer
from shardopt.optim.fused import EmptyFusedOptimizer as EmptyFusedOptimizer
from shardopt.optim.fused import FusedOptimizer as FusedOptimizer
from shardopt.optim.fused import FusedOptimizerModule as FusedOptimizerModule
from shardopt.optim.gradients.scaler import GradScaler as GradScaler
from shardopt.optim.keyed import CombinedOptimizer as CombinedOptimizer
from shardopt.optim.keyed import KeyedOptimizer as KeyedOptimizer
from shardopt.optim.keyed import KeyedOptimizerWrapper as KeyedOptimizerWrapper
from shardopt.optim.keyed import OptimizerWrapper as OptimizerWrapper
from shardopt.optim.schedules.decay_ramps import ramped_decay as ramped_decay
from shardopt.optim.schedules.plateau import ReduceLROnPlateau as ReduceLROnPlateau
from shardopt.optim.semi_sync.semi_sync import SemiSync as SemiSync
from shardopt.optim.semi_sync.semisync_optimizer import SemisyncOptimizer as SemisyncOptimizer
from shardopt.optim.warmup import WarmupOptimizer as WarmupOptimizer
from shardopt.optim.warmup import WarmupPolicy as WarmupPolicy
from shardopt.optim.warmup import WarmupStage as WarmupStage
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
