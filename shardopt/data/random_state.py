"""Random states, and other state that each rank has for itself, as entries of an `app`."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import torch

from shardopt.runtime.accelerator import module_in_use
from shardopt.state.state import PerRank, Stateful

OnResize = Literal["raise", "keep"]


class PerRankState:
    """An object whose state differs between ranks by intent, such as a stream that each rank reads for itself.

    Each rank gets its own state back, through the object's `load_state_dict`. For torchdata's `StatefulDataLoader` take
    `shardopt.integrations.torchdata.RankPosition`: opened again after a load, it draws one of torch's random numbers.

    Args:
        target: has `state_dict` and `load_state_dict`; its state is plain values and small CPU tensors, nested.
        on_resize: what a load does if the number of ranks has changed since the save: "raise", or "keep" the state that
            the object has then.
    """

    def __init__(self, target: Stateful, *, on_resize: OnResize) -> None:
        if on_resize not in ("raise", "keep"):
            raise ValueError(f"on_resize: found {on_resize!r}; required 'raise' or 'keep'; pass one of them")
        self.target = target
        self._on_resize = on_resize

    def state_dict(self) -> dict[str, Any]:
        return {"of_rank": PerRank(self.target.state_dict(), self._on_resize)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.target.load_state_dict(state_dict["of_rank"].value)


class RandomState(PerRankState):
    """The random number generators of this rank: Python's, NumPy's, torch's on the CPU and on the accelerator in use.

    A rank gets the state of its number, also in another mesh of as many ranks. Where ranks that share a batch must draw
    alike there, leave it out of that load.

    Those are the global ones (`random`, `numpy.random`, `torch`); generators of a program's own are not looked at. That
    of the accelerator is saved, under its kind ("cuda"), once it has been initialized, and loaded if there is one here;
    so are those of other devices on which this process has tensors.

    Args:
        on_resize: as for `PerRankState`. Another number of ranks has no state to resume from, so "keep" continues with
            the generators as the program has seeded them.
    """

    def __init__(self, *, on_resize: OnResize) -> None:
        super().__init__(_Generators(), on_resize=on_resize)


class _Generators:
    def state_dict(self) -> dict[str, Any]:
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        in_use = module_in_use()
        if in_use is not None and getattr(in_use[1], "is_initialized", lambda: True)():  # MPS has no such question
            kind, module = in_use
            state[kind] = module.get_rng_state()
            # Under torchrun all of a host's are there, of which a rank most often uses one.
            used = [module.get_rng_state(each) if module.memory_allocated(each) else None for each in _beside(module)]
            if any(each is not None for each in used):
                state[f"{kind} beside"] = used
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        in_use = module_in_use()
        if in_use is not None and in_use[0] in state_dict:
            kind, module = in_use
            module.set_rng_state(state_dict[kind])
            others = state_dict.get(f"{kind} beside")
            # Without others nothing is asked: that would begin to use the device, which a forked process must not.
            for each, saved in zip(_beside(module), others, strict=False) if others else ():
                if saved is not None:
                    module.set_rng_state(saved, each)


def _beside(module: Any) -> list[int]:
    """Returns the other devices here, from the current one on: a rank may have other ones after a resume."""
    if not all(hasattr(module, name) for name in ("current_device", "device_count", "memory_allocated")):
        return []  # MPS, of which there is one
    current, count = module.current_device(), module.device_count()
    return [(current + step) % count for step in range(1, count)]
