"""Swaps averages into a model in place of its weights for a while, and the weights back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from shardopt.errors import Problem, StateError
from shardopt.optim.averages.tensors import Pair, by_plain_name, refuse_other_shapes
from shardopt.runtime.accelerator import wait_for_reads
from shardopt.runtime.torch_gradients import reshard
from shardopt.sharding.swapped import note_swapped, note_swapped_back
from shardopt.sharding.view import local_tensors

_WRITTEN = "what was written into the place of averages would be lost when the weights are put back"


class AveragesInModel:
    """Keeps a model's own values, and puts averages into its memory until they are put back. Local.

    Args:
        holder: has the averages; by it others are refused meanwhile.
        params: of the model, by name; they come back only if nobody wrote into them.
        tensors: all whose values are kept and put back: parameters and buffers.
        pairs: averages, and the local tensors in whose place they go.
    """

    def __init__(
        self, holder: object, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor], pairs: Sequence[Pair]
    ) -> None:
        self._holder, self._params, self._tensors, self._pairs = holder, params, tensors, pairs
        self._own = {
            name: [local.detach().clone() for local in local_tensors(tensor)] for name, tensor in tensors.items()
        }
        self._versions: dict[str, list[int]] | None = None  # unless all averages are there

    def put_in(self) -> None:
        """Puts the averages in their place. Also if it is interrupted, `put_back` is to be called."""
        note_swapped(self._holder, self._tensors)
        wait_for_reads(local for _, local in self._pairs)
        for average, local in self._pairs:
            local.copy_(average)
        self._versions = self._versions_now()

    def put_back(self, tensors: Mapping[str, Tensor], params: Mapping[str, Tensor], lose: bool = False) -> None:
        """Restores the model's own values, bit for bit.

        Args:
            tensors: the parameters that are averaged, and the buffers that the model has now.
            params: the parameters that it has now.
            lose: whether values that somebody wrote into parameters in the meantime may be lost.

        Raises:
            StateError: somebody wrote into parameters, or put others in their place; nothing was put back. The next
                time that is lost.
        """
        pairs: list[Pair] = []
        for name, tensor in tensors.items():
            weights = local_tensors(tensor)
            if name in self._own:  # a buffer may have come or gone
                refuse_other_shapes(name, weights, self._own[name], "when the averages were put in the model")
                pairs.extend(zip(weights, self._own[name], strict=True))
        if not lose:
            self._refuse_written(params)
        wait_for_reads(local for local, _ in pairs)
        self._versions = None  # these copies write, too, and may be interrupted
        for local, own in pairs:
            local.copy_(own)
        note_swapped_back(self._holder)

    def _refuse_written(self, params: Mapping[str, Tensor]) -> None:
        versions, before = self._versions_now(), self._versions
        if before is None:  # `put_in` or `put_back` did not come to its end
            return
        written = [name for name in versions if versions[name] != before[name]]
        written += [name for name, param in params.items() if self._params.get(name) is not param]
        if not written:
            return
        self._params = {**self._params, **params}
        self._versions = self._versions_now()
        others = f", and in {len(written) - 1} other parameters" if len(written) > 1 else ""
        remedy = (
            "load weights, and change them, outside of `with ema.swap():`; swap() once more loses what was written, "
            "and puts the model's own weights back"
        )
        found = f"values that were written while the averages stood there{others}"
        raise StateError(_WRITTEN, [Problem(written[0], found, "the averages", remedy)], code="averages")

    def _versions_now(self) -> dict[str, list[int]]:
        """Returns torch's write counters of each parameter and its local tensors."""
        return {
            name: [0 if each.is_inference() else each._version for each in (param, *local_tensors(param))]
            for name, param in self._params.items()
        }


class Swapped:
    """A context after which the model has its own weights again.

    Args:
        swapped: whether the averages stand in the model.
        put_back: takes them out; told whether what was written meanwhile may be lost, as after an error.
    """

    def __init__(self, swapped: Callable[[], bool], put_back: Callable[[bool], None]) -> None:
        self._swapped, self._put_back = swapped, put_back

    def __enter__(self) -> None:
        if not self._swapped():
            problem = Problem("swap()", "averages in the model already", "its own weights", "do not nest swap()")
            raise StateError("the model's own weights were put back", [problem], code="averages")

    def __exit__(self, kind: object, *raised: object) -> None:
        if self._swapped():
            self._put_back(kind is not None)


class Places:
    """The places where the modules of a model have parameters, in which a step looks for those that were replaced."""

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self._model, self._params = model, params
        places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        self._seen = [(of_module, name, of_module[name]) for of_module, name in places if of_module[name] is not None]

    def replaced(self, also_modules: bool = False) -> list[str]:
        """Returns the names of parameters that are no longer in their places. Local.

        Args:
            also_modules: whether to find those of modules that were replaced: a walk over all.
        """
        if not also_modules and all(of_module.get(name) is param for of_module, name, param in self._seen):
            return []
        reshard(self._model.modules())  # which may stand in their place
        now = {id(param) for param in self._model.parameters()}
        return [name for name, param in self._params.items() if id(param) not in now]

    def others(self) -> dict[str, str]:
        """Returns the names of parameters that the model has not, or has and are not averaged. Local.

        Each with the name that an averaged one has in the model now; "" for none.
        """
        reshard(self._model.modules())
        now = by_plain_name(self._model, self._model.named_parameters())
        names = {id(param): name for name, param in now.items()}
        others = (name for name in {**self._params, **now} if self._params.get(name) is not now.get(name))
        return {name: names.get(id(self._params.get(name)), "") for name in others}

    def are_left(self, also_with_added: bool) -> bool:
        """Whether the model has left these: it lacks some, or, if that counts, has got others besides. Local."""
        return bool(self.replaced(also_modules=True) or (also_with_added and self.others()))

    def refuse_others(self) -> None:
        """Raises StateError if the model has other parameters than those that are averaged, also added ones. Local."""
        refuse_replaced(self.others())


def refuse_replaced(names: Mapping[str, str]) -> None:
    """Raises StateError if parameters were replaced: their averages would follow what nobody trains.

    Args:
        names: of such parameters, each with the name that it has in the model now; "" for none.
    """
    remedy = (
        "make the averages again where the model changes: state = ema.state_dict() before; then ema = EMA(model), "
        "ema.load_state_dict(state, strict=False) and ema.attach(optimizer). What has another name now keeps its "
        'average if you rename its key: state["state"][new] = state["state"].pop(old)'
    )
    other = "another parameter in the model, or none, or none that is averaged"
    problems = [
        Problem(name, f"it under the name {now!r}" if now else other, "the one that is averaged", remedy)
        for name, now in names.items()
    ]
    if problems:
        raise StateError("a model has changed", problems, code="averages")
