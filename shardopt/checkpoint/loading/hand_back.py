"""Hands objects their loaded state; errors say how far the load came."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from shardopt.checkpoint.loading.refusals import MAY_HAVE_CHANGED
from shardopt.checkpoint.loading.torchs.kept import keeping_groups_and_dtypes
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import CheckpointError, MismatchError, Problem, ShardoptError
from shardopt.state.fused_kernels import has_other_rate, kernels_in
from shardopt.state.names import plain_name
from shardopt.state.paths import join
from shardopt.state.state import PartialStateful, RestoreTarget
from shardopt.state.versions import Noted, converts, note, stored_for, versions_in

_log = logging.getLogger("shardopt.checkpoint")

_REFUSED = (
    "mend what it says, and load again, which loads everything anew; or leave the object out of the app, and load with "
    'Strictness(unexpected="ignore")'
)


def note_stored_versions(
    noted: Sequence[Noted],
    reader: CheckpointReader,
    renamed: Mapping[str, str],
    stored_keys: Callable[[], Mapping[str, str]],
) -> None:
    """Notes in states of modules by which versions of their classes the loaded values were saved.

    Args:
        renamed: whether anything is, if not empty.
        stored_keys: returns key of what is loaded → its key in the checkpoint.
    """
    versions = reader.manifest.module_versions
    if not versions or (not renamed and versions == versions_in(noted)):  # all by the versions that are here
        return
    keys = stored_keys()
    for each in noted:
        note(each, stored_for(each, versions, keys))


def refuse_other_versions(
    noted: Iterable[Noted], reader: CheckpointReader, stored_keys: Mapping[str, str], app: Any
) -> None:
    """Raises MismatchError for modules of other versions than those here, whose load would convert, and does not run.

    Args:
        stored_keys: as for `note_stored_versions`.
        app: the module; or its state, or a module with a `load_state_dict` of its own, which may convert anything.
    """
    versions, problems = reader.manifest.module_versions or {}, []
    modules = dict(app.named_modules(remove_duplicate=False)) if _is_by_torch(app) else {}
    for each in noted:
        here = each.versions()
        remedy = "run the code of the publisher here, or load the step by checkpoint.load(...), which converts"
        for name, stored in stored_for(each, versions, stored_keys).items():
            own = here[each.plain_names.get(name, name)]
            if stored != own and (name not in modules or converts(modules[name])):
                found = f"values by version {stored} of its class"
                problems.append(Problem(each.key(name) or "the module", found, f"version {own}, as here", remedy))
    if problems:
        raise MismatchError("classes of modules have changed; nothing was changed", problems, code="does-not-fit")


def hand_back(loaded: Sequence[RestoreTarget], lenient: bool) -> None:
    """Gives objects their state by `load_state_dict`, in turn.

    Args:
        lenient: whether differences within plain values pass.

    Raises:
        CheckpointError: an object refused its state; an error of this library as it is. Both say how far the load came.
    """
    for number, target in enumerate(loaded):
        try:
            with keeping_groups_and_dtypes(target.object):
                _give(target.taker, target.filled_state(), lenient)
        except Exception as error:
            told = _refusal(error, loaded, number)
            if told is error:
                raise
            raise told from error
    for fused, kernel in (pair for each in loaded for pair in kernels_in(each.object)):
        if has_other_rate(fused, kernel):
            fused.zero_grad()  # gives the kernel the rate of its group; it has no gradients


def _give(taker: Any, state: Any, lenient: bool) -> None:
    if _is_by_torch(taker):
        # Keys are compared before. What a module leaves out of its own state, as of a frozen part, it need not get.
        found = taker.load_state_dict(state, strict=False)
        lost = [*(key for key in found.missing_keys if key in state), *found.unexpected_keys]
        if not lost and found.missing_keys and _has_others(state, taker):
            lost = found.missing_keys
        if lost:
            raise KeyError(f"its hooks gave other keys to {', '.join(lost)}")
    else:
        choices = {"strict": False} if lenient and isinstance(taker, PartialStateful) else {}
        taker.load_state_dict(state, **choices)


def _is_by_torch(app: Any) -> bool:
    """Whether it is a module that torch's own `load_state_dict` loads."""
    return getattr(getattr(app, "load_state_dict", None), "__func__", None) is Module.load_state_dict


def _has_others(state: Any, module: Module) -> bool:
    """Whether hooks have put something into a module's state that may stand for what is missing in it."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    own = {plain_name(name) for name, _ in tensors}
    return any(plain_name(key) not in own and not key.endswith("_extra_state") for key in state)


def _refusal(error: Exception, loaded: Sequence[RestoreTarget], number: int) -> ShardoptError:
    """Returns the error to raise for one of the object with this number: it says how far the load came."""
    done, ahead = (
        ", ".join(join(each.path) for each in those) or "none" for those in (loaded[:number], loaded[number:])
    )
    come = f"tensors are read, objects loaded: {done}; not loaded: {ahead}. {MAY_HAVE_CHANGED}"
    if isinstance(error, ShardoptError):
        error.restate(f"{error.message}; {come}")
        return error
    kind, key = type(loaded[number].taker).__name__, join(loaded[number].path)
    problem = Problem(key, f"{type(error).__name__}: {error}", f"a {kind} that takes its state", _REFUSED)
    return CheckpointError(f"an object refused the state that was saved; {come}", [problem], code="object-refused")


def warn_of_what_is_left(what: str, is_undone: bool, marked: Sequence[str]) -> None:
    """Warns of what a load that has ended well has left out.

    Args:
        what: the load.
        is_undone: whether the next step undoes it, by masters.
        marked: the keys of optimizers that may still be half changed by what came before.
    """
    if is_undone:
        _log.warning(
            "%s: parameters were loaded without their fp32 masters. The next step makes them of the masters that are "
            "here. To train on from what was loaded, load the optimizer of that checkpoint too, or make a new one "
            "[optimizer-state]",
            what,
        )
    if marked:
        _log.warning(
            "%s: an earlier load or outer step did not end well, and this load leaves out some of what that may have "
            "changed. So %s will raise PartialLoadError when stepped or saved. Load all of it; or start again, with "
            "transactional=True, by which a load of damaged data changes nothing [partial-load]",
            *(what, ", ".join(dict.fromkeys(marked)) or "the optimizer"),
        )
