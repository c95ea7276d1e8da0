"""Optimizers with state keyed by parameter name: the classes, and the function that makes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.low_precision.optimizer import LowPrecisionOptimizer, low_precision
from shardopt.algorithms.low_precision.options import as_texts, asks_for_less, without_defaults
from shardopt.algorithms.registry import spec_of
from shardopt.algorithms.trial import refuse_contradicted
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.combined import CombinedOptimizer
from shardopt.optim.core.composite import OptimizerWrapper
from shardopt.optim.core.keyed_wrapper import KeyedOptimizerWrapper
from shardopt.optim.local.modes import in_own_modes
from shardopt.optim.state_dict.groups import (
    GroupsOfNamed,
    NamedParameters,
    NamedTensors,
    Places,
    by_pattern,
    named_in_groups,
)
from shardopt.optim.state_dict.options import known_options, refuse_bad_options
from shardopt.ranks import Group, SharedGroup
from shardopt.state.param_groups import PARAMS, STORAGE_OPTIONS
from shardopt.state.state import Tied

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper", "keyed"]

Wrapper = TypeVar("Wrapper", bound=KeyedOptimizerWrapper)
Grouped = tuple[int, dict[str, Any], NamedParameters]


@in_own_modes
def keyed(
    algorithm: type[Optimizer] | str,
    named_params: NamedTensors | GroupsOfNamed,
    *,
    groups: Collection[Mapping[str, Any]] | None = None,
    process_group: Group | None = None,
    tied: Tied | None = None,
    **defaults: Any,
) -> KeyedOptimizer:
    """Makes an optimizer for named parameters, plain or sharded, that saves its state and groups by name.

    Args:
        algorithm: a torch optimizer class or its name in any case, "adamw" or "row_wise_adagrad".
        named_params: `model.named_parameters()`, or a mapping. Segments that wrappers add to names (checkpointed
            activations, torch.compile) are left out, so that a run resumes with and without them. So is a "module."
            that all names begin with, as under DistributedDataParallel. Or groups as torch takes them, instead of
            `groups`: `[{"params": model.body.named_parameters("body"), option: value, ...}, ...]`.
        groups: `{"match": regex, option: value, ...}`. Each parameter goes to the first group whose regex matches its
            name, or else to a last group with the defaults. Groups keep their places where they are empty, so that
            schedules fit on all ranks. Keys that are no options, such as "name" or "lr_scale", are kept, saved and
            loaded with the group; one that the training loop adds must be there before a load, too. A key that looks
            like a misspelt option is refused. A group with an "algorithm" of its own (class or name) starts from that
            algorithm's defaults, not from those given here.
        process_group: the ranks that train these parameters, where they are not all of the job: a process group, or a
            device mesh. Clipping and `check_agreement` go by it, L-BFGS, and who logs.
        tied: name → the name that stands for it, of parameters that are tied and may be so on different ranks only:
            `{"output.weight": "embed.weight"}`. This optimizer has them under the second name: a norm counts them once,
            and they have one state. To make their gradients equal before the step is the training loop's part.
        defaults: options of `algorithm`. For an elementwise one, here or in a group, they also say how it stores:
            `state_dtype` (torch.bfloat16, or torch.uint8 for 8-bit codes; default: as what is stepped), `master_dtype`
            (torch.float32: bf16 and fp16 parameters get a master) and `rounding` (None: state in fewer bits at random,
            parameters to nearest; "stochastic": both at random; "nearest": both to nearest). Its step is then computed
            in fp32, in chunks; see docs/low-memory.md. Without these, and without `foreach` or `fused`, each step takes
            the fastest implementation that computes what the for-loop computes. That is the fused one of Adam, AdamW,
            Adagrad and SGD where torch has it for the device (but SGD's not in bfloat16, and none in float16).
            Elsewhere it is the for-loop on the CPU, and torch's own choice on accelerators.

    Returns:
        A KeyedOptimizerWrapper; or for several algorithms a CombinedOptimizer of one for each, with the names of
        `named_params`.

    Raises:
        AlgorithmError: an algorithm is not known, may not step on shards, or has no such option. Or an option has to be
            a number and is none.
        StateError: there are no parameters, they are those of FullyShardedDataParallel, a name comes twice, or a
            pattern matches nothing. In a job of several ranks a rank may hold no parameters, and a pattern must match
            on any rank. Saves and `check_agreement` refuse those that match on none.
    """
    built = build(KeyedOptimizerWrapper, algorithm, named_params, groups or (), defaults, process_group, tied)
    made = built[0] if len(built) == 1 else CombinedOptimizer(built)
    made.save_param_groups(True)
    return made


def build(
    wrapper: type[Wrapper],
    algorithm: type[Optimizer] | str,
    named_params: NamedTensors | GroupsOfNamed,
    groups: Collection[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    process_group: Group | None = None,
    tied: Tied | None = None,
) -> list[Wrapper]:
    """Builds one `wrapper` optimizer for each algorithm; arguments as for `keyed`."""
    shared_group = SharedGroup(process_group)
    is_alone = shared_group.ranks.size == 1
    params, with_members = named_in_groups(named_params, groups, alone=is_alone, tied=tied)
    groups = groups if with_members is None else with_members
    defaults, given = as_texts(defaults), [as_texts(each) if isinstance(each, Mapping) else each for each in groups]
    own = [each for each in given if isinstance(each, Mapping) and "algorithm" not in each]
    main = _class_of(algorithm, any(map(asks_for_less, (defaults, *own))))
    defaults = _options_for(main, defaults)
    refuse_bad_options(main, defaults, "defaults")
    groups_of: dict[Any, list[Grouped]] = {}
    grouped, patterns, unmatched = by_pattern(params, given)
    if with_members is not None:
        grouped.pop()  # that of what is in none of them: there is nothing
        unmatched = []
    if unmatched and is_alone:  # of several, another may have what it matches
        raise StateError("a pattern matches no parameter", unmatched, code="bad-groups")
    for position, (options, matched) in enumerate(grouped):
        members = NamedParameters(matched)
        members.dropped, members.tied = params.dropped, params.tied
        named_here = options.pop("algorithm", None)
        optimizer = main if named_here is None else _class_of(named_here, asks_for_less(options))
        options = _options_for(optimizer, options)
        refuse_bad_options(optimizer, options, f"groups[{position}]")
        # torch holds only defaults against their ranges; this lets it look at the options of each group too.
        given_here = {**(defaults if optimizer is main else {}), **options}
        optimizer([torch.zeros(1, 1, device="cpu")], **known_options(optimizer, given_here))
        _try_out(optimizer, given_here, matched.values(), wrapper._in_backward)
        groups_of.setdefault(optimizer, []).append((position, options, members))
    built: list[Wrapper] = []
    for optimizer, grouped_own in groups_of.items():
        (_, first, members), *others = grouped_own
        given_to_all = defaults if optimizer is main else {}
        made = wrapper(members, partial(_made, optimizer, first, given_to_all))
        for _, options, members in others:
            made.add_param_group({PARAMS: members, **options})
        places, given_to_groups, _ = zip(*grouped_own, strict=True)
        made.made_of(given_to_all, given_to_groups, Places(patterns, places), () if built else unmatched)
        made.work_with(shared_group)
        built.append(made)
    return built


def _made(algorithm: Any, options: Mapping[str, Any], defaults: Mapping[str, Any], tensors: list[Tensor]) -> Optimizer:
    made: Optimizer = algorithm([{PARAMS: tensors, **options}], **defaults)
    return made


def _try_out(optimizer: Any, options: Mapping[str, Any], parameters: Iterable[Tensor], in_backward: bool) -> None:
    """Refuses a class from outside that does not do what its spec says."""
    if issubclass(optimizer, LowPrecisionOptimizer):
        spec = optimizer.algorithm
        optimizer, options = spec.optimizer, {name: options[name] for name in options if name not in STORAGE_OPTIONS}
        parameters = [torch.zeros(0, dtype=torch.float32, device="cpu")]  # it computes in fp32
    else:
        spec = spec_of(optimizer)
    refuse_contradicted(spec, optimizer, known_options(optimizer, options), parameters, in_backward)


def _class_of(algorithm: Any, less: bool = False) -> Any:
    """Returns the class of an algorithm; with `less`, the variant that stores parameters and state as options say."""
    spec = spec_of(algorithm)
    is_its_own = isinstance(algorithm, str) or algorithm in (spec.optimizer, spec.stands_for)
    if less and not is_its_own:  # the spec is of its base, whose variant has other defaults
        problem = Problem(
            key=", ".join(STORAGE_OPTIONS),
            found=f"{algorithm.__name__}, a subclass of {spec.name}",
            required=f"{spec.name} itself",
            remedy=f'give "{spec.name.lower()}" and the options that {algorithm.__name__} sets',
        )
        raise AlgorithmError(
            f"{algorithm.__name__} does not store state or parameters in fewer bits", [problem], code="low-precision"
        )
    if less:
        return low_precision(spec).optimizer
    return spec.optimizer if is_its_own else algorithm


def _options_for(optimizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options that the class accepts: only the variant for fewer bits has options for storage."""
    return {**options} if issubclass(optimizer, LowPrecisionOptimizer) else without_defaults(options)
