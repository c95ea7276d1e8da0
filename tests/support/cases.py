"""Every elementwise algorithm with every CPU option set of torch's own database and every implementation it has."""

import sys
from types import ModuleType

import pytest
import torch
from torch.testing._internal.opinfo.core import DecorateInfo

from shardopt.algorithms import algorithms, spec_of


def _database():
    """Torch's table of optimizers, without that of all operators, of which it wants one class: more than a second."""
    operators = ModuleType("torch.testing._internal.common_methods_invocations")
    operators.DecorateInfo = DecorateInfo
    if sys.modules.setdefault(operators.__name__, operators) is not operators:
        operators = None  # somebody has it already
    from torch.testing._internal.common_optimizers import optim_db

    if operators is not None:
        del sys.modules[operators.__name__]
    return optim_db


optim_db = _database()
INFOS = {info.optim_cls.__name__: info for info in optim_db}
# SparseAdam takes none of the gradients that the others are given; it is in tests/numerics/test_sparse.py.
ELEMENTWISE = [spec.name for spec in algorithms() if spec.elementwise and spec.takes_dense]
IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

FUSED_SGD_IS_ASTRAY = torch.torch_version.TorchVersion(torch.__version__) < (2, 15)
"""Whether this torch's fused SGD for the CPU is far from its for-loop in 16 bits; see `astray`."""

LACKING = {"LBFGS": {"maximize"}}
"""Options of a newer torch that ours does not have: see docs/limits.md."""

# Of algorithms that torch lacks.
OWN_OPTIONS = {
    "AdEMAMix": [("ramped", {"t_alpha_beta3": 4, "weight_decay": 0.1})],
    "Lion": [("default", {}), ("decayed", {"lr": 0.01, "weight_decay": 0.1, "maximize": True})],
    "ScheduleFreeAdamW": [("default", {}), ("warm", {"lr": 0.1, "warmup_steps": 3, "weight_decay": 0.1, "r": 1.0})],
    "ScheduleFreeSGD": [("warm", {"lr": 0.1, "warmup_steps": 3, "weight_decay": 0.1, "r": 1.0})],
}


def option_sets(name):
    if name in OWN_OPTIONS:
        return OWN_OPTIONS[name]
    sets = INFOS[name].optim_inputs_func(device="cpu")
    return [(each.desc, each.kwargs) for each in sets if not each.kwargs.keys() & LACKING.get(name, set())]


def implementations(name):
    """Those that an algorithm has; the database leaves foreach out on the CPU, where it works."""
    supported = INFOS[name].supported_impls if name in INFOS else ("foreach",)
    return [how for how in IMPLEMENTATIONS if how == "for-loop" or how in supported]


def plain_class(name):
    """The class over plain tensors that an elementwise algorithm is held against: torch's, where it has one."""
    return getattr(torch.optim, name, spec_of(name).optimizer)


def case(name, desc, options, how):
    return pytest.param(name, {**options, **IMPLEMENTATIONS[how]}, id=f"{name}-{desc}-{how}".replace(" ", "_"))


ELEMENTWISE_CASES = [
    case(name, desc, options, how)
    for name in ELEMENTWISE
    for desc, options in option_sets(name)
    for how in implementations(name)
]


def _in_turn(name):
    """Each options of an algorithm, and each of its implementations, at least once."""
    descs, hows = [desc for desc, _ in option_sets(name)], [*implementations(name)]
    for number in range(max(len(descs), len(hows))):
        desc, how = descs[number % len(descs)], hows[number % len(hows)]
        yield f"{name}-{desc}-{how}".replace(" ", "_")


# A covering few of the cases: those of the usual run, where tests of all of them take long.
IN_TURN = {id for name in ELEMENTWISE for id in _in_turn(name)}

# What the database has on CUDA only, or not at all.
EXTRA_OPTIONS = {
    "tensor_rate": {"lr": torch.tensor(0.01)},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
}
EXTRA_CASES = [
    case(name, desc, options, how)
    for name in ELEMENTWISE
    for desc, options in EXTRA_OPTIONS.items()
    for how in implementations(name)
    if name in INFOS or desc == "tensor_rate"  # torch's own contract has the others, ours do not
]


def refused(name, options, dtype):
    """Returns a pattern of torch's error for a combination that it refuses on plain CPU parameters, or None.

    The whole list: a test holds torch against it.
    """
    how = next(key for key, chosen in IMPLEMENTATIONS.items() if chosen.items() <= options.items())
    if options.get("differentiable"):
        return "does not support .differentiable.|support autograd|leaf Variable|be differentiated"
    if options.get("capturable") and (how, name) not in (("fused", "Adam"), ("fused", "AdamW")):
        return "capturable"  # there is no such option, or only for other devices
    if dtype.is_complex and how == "fused":
        return "floating point Tensors"
    if isinstance(options.get("lr"), torch.Tensor) and how == "foreach" and name in ("Adam", "AdamW"):
        return "lr as a Tensor is not supported"
    return None


def astray(name, options, dtype):
    """Whether this is torch's fused SGD for the CPU in 16 bits, which ours refuses.

    It is off from its own for-loop by much more than rounding, at other elements where a tensor is cut otherwise; and
    with momentum its first step reads what was in the buffer's memory before, so that no two runs need be equal.
    """
    return name == "SGD" and bool(options.get("fused")) and dtype in (torch.bfloat16, torch.float16)
