"""Finds the layers that are in `eval()` while the rest of their module trains, such as frozen batch norms.

No state says which they are: a resumed run whose script forgets one would train otherwise without an error. So a run
notes them with its saves, and one that resumes compares its own.

A save may come within an evaluation, or after one that has ended otherwise than it began. So a module counts only where
it is the same at two calls of `save`, one after the other, of which the first need not save anything: both where it is
noted and where it is compared. A module that is in `eval()` as a whole does not count either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.nn import Module

from shardopt.checkpoint.reports import LoadReport
from shardopt.runtime.torch_private import in_eval
from shardopt.state.names import plain_names_in
from shardopt.state.paths import Path, join

Layers = tuple[str, ...]
"""The names of layers within a module, without wrappers' parts; one name stands for all that is in it."""

_LINE = (
    "%d layers are in %s that were in %s when this step was saved, such as %s: if the run put them there, call their "
    "%s again, %s; the modes of layers are not saved [optimizer-state]"
)
_log = logging.getLogger("shardopt.checkpoint")


def layers_in_eval(root: Module) -> Layers | None:
    """Returns the layers of a module that are in `eval()`; None if all are.

    Layers are modules without others in them: the mode of what wraps them or holds them says nothing.
    """
    found = in_eval(root)
    if found is None:
        return None
    plain = plain_names_in(root, found)
    return tuple(plain.get(name, name) for name in found)


class LayersInEval:
    """The layers in `eval()` at the saves of one run. On rank 0."""

    def __init__(self) -> None:
        self.looks = 0  # at so many calls of `save` from now on
        self._seen = dict[str, Layers | None]()  # at the last look, by the key of their module
        self._stored = dict[str, Layers]()  # of the restored checkpoint, until they are compared

    def restored(self, report: LoadReport | None) -> None:
        """Begins to compare with a checkpoint.

        Args:
            report: of its load; None for none.
        """
        noted = (report is not None and report.in_eval) or {}
        loaded = () if report is None else report.loaded
        self._stored = {key: own for key, own in noted.items() if any(each.startswith(f"{key}.") for each in loaded)}
        self.looks = 2

    def look(self, objects: Iterable[tuple[Path, Any]], is_saved: bool) -> dict[str, Layers]:
        """Returns the layers by the key of their module, of those that are as at the last look; warns of others.

        Args:
            objects: of the app, by path.
            is_saved: whether this call of `save` saves.
        """
        self.looks = 1 if is_saved else self.looks - 1
        found = dict[str, Layers]()
        for path, root in objects:
            if not isinstance(root, Module):
                continue
            key, layers = join(path), layers_in_eval(root)
            if layers is not None and self._seen.get(key) == layers:
                found[key] = layers
                if key in self._stored:
                    _tell(key, root, layers, self._stored.pop(key))
            self._seen[key] = layers
        return found


def _tell(key: str, root: Module, layers: Layers, stored: Layers) -> None:
    """Logs a warning of layers of a module that are in another mode than they were saved in."""
    if {*layers} == {*stored}:
        return
    names = {f"{name}.": name for name, _ in root.named_modules(remove_duplicate=False)}
    plain = plain_names_in(root, names)
    known = {plain.get(name, name).removesuffix(".") for name in names}
    trains = [each for each in stored if not _is_among(each, layers) and each in known]
    evaluates = [each for each in layers if not _is_among(each, stored)] if known.issuperset(stored) else []
    if trains:
        where = join((key, trains[0]))
        _log.warning(_LINE, len(trains), "train()", "eval()", where, "eval()", "after each train() of the model")
    if evaluates:
        where = join((key, evaluates[0]))
        _log.warning(_LINE, len(evaluates), "eval()", "train()", where, "train()", "before the loop")


def _is_among(name: str, layers: Layers) -> bool:
    """Whether a layer is one of some, or within one."""
    return any(f"{name}.".startswith(f"{each}.") for each in layers)
