"""The names of `import shardopt` that a program's first page uses. All others are in the packages."""

from shardopt.data import RandomState as RandomState
from shardopt.data import ResumableSampler as ResumableSampler
from shardopt.optim import EMA as EMA
from shardopt.optim import SWA as SWA
from shardopt.optim import GradientClipping as GradientClipping
from shardopt.optim import GradientClippingOptimizer as GradientClippingOptimizer
from shardopt.optim import GradScaler as GradScaler
from shardopt.optim import KeyedOptimizer as KeyedOptimizer
from shardopt.optim import SemiSync as SemiSync
from shardopt.optim import WarmupOptimizer as WarmupOptimizer
from shardopt.optim import WarmupPolicy as WarmupPolicy
from shardopt.optim import WarmupStage as WarmupStage
from shardopt.optim import in_backward as in_backward
from shardopt.optim.keyed import keyed as keyed
