"""Has torch's optimizers keep the dtypes of loaded state, which their own load casts to those of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.runtime.torch_private import around_loads
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import PARAM_GROUPS, STATE
from shardopt.state.state import PartialStateful

STEP = "step"
"""An entry of whose dtype torch takes care itself."""


@contextmanager
def keeping_dtypes(loaded: Any, with_inner: Callable[[Any], Iterable[Optimizer]]) -> Iterator[None]:
    """Undoes torch's casts of state in the load of an object: moments in fp32, counts, masks.

    Where the optimizer's own load goes on, or a hook of the program's runs, state has its dtypes already.

    Args:
        with_inner: returns an object and the optimizers that it has as attributes, whose load its own may call.
    """
    with ExitStack() as after_load:
        for each in with_inner(loaded) if hasattr(loaded, "__dict__") else ():
            if isinstance(each, Optimizer) and not isinstance(each, PartialStateful):  # keyed ones keep them
                given: dict[str, Any] = {}
                for hook in around_loads(each, partial(_note, given), partial(_put_back, given)):
                    after_load.callback(hook.remove)
        yield


def _note(given: dict[str, Any], _: Optimizer, state_dict: Mapping[str, Any]) -> None:
    given.clear()  # it may load several times
    given.update(state_dict)


def _put_back(given: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Puts given state where a load has cast it; parameters go by their numbers in the given groups, as in the load."""
    numbers, parameters = (
        chain.from_iterable(group[PARAMS] for group in groups)
        for groups in (given[PARAM_GROUPS], optimizer.param_groups)
    )
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in given[STATE] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_given(optimizer.state[parameter], given[STATE][number])


def _as_given(loaded: Any, given: Any) -> Any:
    if isinstance(loaded, Tensor) and isinstance(given, Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, dict):
        own = given.keys() - {STEP}
        return {key: _as_given(each, given[key]) if key in own else each for key, each in loaded.items()}
    if isinstance(loaded, list | tuple) and type(loaded) is type(given) and len(loaded) == len(given):
        return type(given)(map(_as_given, loaded, given))
    return given if isinstance(given, str) else loaded  # of which torch's load makes the text of a generator
