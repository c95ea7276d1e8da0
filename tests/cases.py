"""Every elementwise algorithm with every CPU option set of torch's own database and every implementation it has."""

import pytest
from torch.testing._internal.common_optimizers import optim_db

from shardopt.algorithms import algorithms

INFOS = {info.optim_cls.__name__: info for info in optim_db}
ELEMENTWISE = [spec.name for spec in algorithms() if spec.elementwise]
IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def option_sets(name):
    return [(inputs.desc, inputs.kwargs) for inputs in INFOS[name].optim_inputs_func(device="cpu")]


ELEMENTWISE_CASES = [
    pytest.param(name, {**options, **IMPLEMENTATIONS[how]}, id=f"{name}-{desc}-{how}".replace(" ", "_"))
    for name in ELEMENTWISE
    for desc, options in option_sets(name)
    for how in IMPLEMENTATIONS
    if how == "for-loop" or how in INFOS[name].supported_impls
]
