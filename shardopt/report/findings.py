"""What a reader should look at first, by the numbers of a report. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from shardopt.checkpoint.text import plural, seconds_text
from shardopt.report.changes import layer_of
from shardopt.report.runs import NO_FILE
from shardopt.report.tensors import NOT_FINITE
from shardopt.state.paths import STATE

_SLOW, _SLOW_SECONDS = 3, 0.1  # times the median, and more than it by so much: short saves vary by more than that
_LARGE, _FEWEST_ALIKE = 10, 3  # times the median of the same tensor of other layers, if there are so many
_SPREAD = 4  # times the median distance of layers from their median, in logarithms: some differ by nature
# A jump is a change of a metric of more than 5 times the largest of the 8 before it, 3 at least, and the 8 after it.
# Noise rarely looks so: what goes up by chance comes down again. A loss falls fast at first: no jump with fewer before.
_JUMP, _NEIGHBOURS, _FEWEST_BEFORE = 5, 8, 3
_LEAST_JUMP = 0.01  # of the larger value: rounding of a metric that stays is no jump
_MOST = 8  # of each kind

Finding = dict[str, Any]
"""`kind`, `text`, and what it is about: `run` (its number), `step` and `branch`; or `tensor`, a key."""


def findings_of(document: Mapping[str, Any]) -> list[Finding]:
    """Returns the findings of a report, the gravest first: at most 8 of each kind, and how many more there are."""
    found: list[Finding] = []
    for number, run in enumerate(document["runs"]):
        found += _most(_incomplete(run), run=number)
        found += _most(_alone(run), run=number)
        for metric in run["metrics"]:
            values = [(step, (step["metrics"] or {}).get(metric)) for step in run["steps"] if step["in_run"]]
            known = [(step, value) for step, value in values if value is not None]
            found += _most(_metric_not_finite(metric, known), run=number)
            found += _most(_jumps(metric, known), run=number)
        found += _most(_slow(run, "seconds", "slow save", "took"), run=number)
        found += _most(_slow(run, "stall_seconds", "stall", "held up training for"), run=number)
    checkpoint, changes = document["checkpoint"], document["against"]
    if checkpoint is not None:
        found += _most(_not_finite(checkpoint["tensors"]))
        sizes = {each["key"]: each["statistics"]["rms"] for each in checkpoint["tensors"] if "statistics" in each}
        found += _most(_outliers(sizes, "large values", "has a root mean square of {:.3g}"))
    if changes is not None:
        shares = {each["key"]: each["relative"] for each in changes["tensors"] if math.isfinite(each["relative"])}
        found += _most(_outliers(shares, "large change", "has changed by {:.3g} times its old norm"))
        found += _most(_unlike(changes))
    return found


def _most(findings: Iterable[Finding], **about: int) -> list[Finding]:
    everything = [{**each, **about} for each in findings]
    more = len(everything) - _MOST
    note = [{"kind": everything[0]["kind"], "text": f"and {more:,} more"}] if more > 0 else []
    return [*everything[:_MOST], *note]


def _incomplete(run: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the steps that no place has all of, the newest first."""
    for step in reversed(run["steps"]):
        if step["complete"] or not step["in_run"] or step["left"] is not None:
            continue
        text = f"{_name(step)} cannot be restored from anywhere. {_elsewhere(run, step, True)}"
        yield _of_step(step, "not complete", text)


def _alone(run: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the steps that one place only has all of; those that the others lack for the same reason together."""
    groups: defaultdict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for step in run["steps"]:
        if step["alone"] is not None:
            groups[step["alone"], _elsewhere(run, step, False)].append(step)
    for (place, reason), steps in groups.items():
        name = run["places"][place]["name"]
        name = name if name[-1].isdigit() else f"the {name}"
        reason = _elsewhere(run, steps[0], True) if len(steps) == 1 else reason
        verb = "is" if len(steps) == 1 else "are"
        text = f"{_names(steps)} {verb} complete only in {name}. {reason}"
        yield _of_step(steps[-1], "one place", text)


def _elsewhere(run: Mapping[str, Any], step: Mapping[str, Any], is_detailed: bool) -> str:
    """Returns why each place that a step is not complete in lacks it, also by name of the first file."""
    there = {each["place"]: each for each in step["places"]}
    reasons = []
    for number, place in enumerate(run["places"]):
        seen = there.get(number)
        if seen is None and place["kind"] != "tier":
            reasons.append(f"{place['name']}: not there")
        elif seen is not None and not seen["complete"]:
            first = _first_problem(seen["problems"], place["url"]) if is_detailed else ""
            reasons.append(f"{place['name']}: {seen['condition']}{first}")
    return "; ".join(reasons)


def _first_problem(problems: Sequence[Mapping[str, Any]], url: str) -> str:
    if not problems:
        return ""
    key, found, required = (problems[0][name] for name in ("key", "found", "required"))
    what = "" if found == NO_FILE else f": found {found}, required {required}"
    more = f", and {len(problems) - 1:,} more" if len(problems) > 1 else ""
    return f" ({key.removeprefix(url).lstrip('/')}{what}{more})"


def _metric_not_finite(name: str, known: Sequence[tuple[Mapping[str, Any], float]]) -> Iterator[Finding]:
    steps = [step for step, value in known if not math.isfinite(value)]
    if steps:
        yield _of_step(steps[0], "not finite", f"{name} is not finite in {_names(steps)}")


def _jumps(name: str, known: Sequence[tuple[Mapping[str, Any], float]]) -> Iterator[Finding]:
    """Yields where a metric went to another level between two steps and stayed, the newest first."""
    finite = [(step, value) for step, value in known if math.isfinite(value)]
    changes = [abs(after - before) for (_, before), (_, after) in pairwise(finite)]
    for at in reversed(range(_FEWEST_BEFORE, len(changes))):
        around = [*changes[max(at - _NEIGHBOURS, 0) : at], *changes[at + 1 : at + 1 + _NEIGHBOURS]]
        (earlier, before), (later, after) = finite[at : at + 2]
        if changes[at] > _JUMP * max(around) > 0 and changes[at] > _LEAST_JUMP * max(abs(before), abs(after)):
            text = (
                f"{name} went from {before:.3g} to {after:.3g} between {_names([earlier, later])}, "
                f"{_times(changes[at] / max(around))} the largest other change near it"
            )
            yield _of_step(later, "jump", text)


def _slow(run: Mapping[str, Any], name: str, kind: str, verb: str) -> Iterator[Finding]:
    """Yields the steps whose seconds are far above the median, the slowest first."""
    measured = [(step[name], step) for step in run["steps"] if step[name] is not None]
    if not measured:
        return
    usual = median(seconds for seconds, _ in measured)
    for seconds, step in sorted(measured, key=lambda pair: -pair[0]):
        if seconds > _SLOW * usual and seconds > usual + _SLOW_SECONDS:
            times = f", {_times(seconds / usual)} the median of" if usual else "; the median is"
            text = f"{_name(step)} {verb} {seconds_text(seconds)}{times} {seconds_text(usual)}"
            yield _of_step(step, kind, text)


def _of_step(step: Mapping[str, Any], kind: str, text: str) -> Finding:
    return {"kind": kind, "text": text, "step": step["step"], "branch": step["branch"]}


def _name(step: Mapping[str, Any]) -> str:
    return f"step {step['step']}" + (f" of branch {step['branch']}" if step["branch"] else "")


def _names(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns "step 3", "steps 3 and 5", or "12 steps from step 3 to step 40"."""
    if len(steps) == 1:
        return _name(steps[0])
    if len(steps) == 2:
        names = [_name(each).removeprefix("step ") for each in steps]
        return f"steps {' and '.join(names)}"
    return f"{len(steps):,} steps from {_name(steps[0])} to {_name(steps[-1])}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"


def _not_finite(tensors: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for each in tensors:
        found = each.get("statistics", {})
        counts = [f"{found[name]:,} {text}" for name, text in NOT_FINITE.items() if found.get(name)]
        if counts:
            text = f"{each['key']} has {', '.join(counts)} among {plural(each['elements'], 'element')}"
            yield {"kind": "not finite", "text": text, "tensor": each["key"]}


def _outliers(numbers: Mapping[str, float], kind: str, what: str) -> Iterator[Finding]:
    """Yields tensors whose number is far above that of the same tensor in other layers, the most so first.

    Layers may differ by orders of magnitude. So a number counts as large only if its distance from the median is
    several times the usual one, both as logarithms. State of optimizers is left out: it follows the gradients, of which
    the first layers often have the largest.
    """
    alike: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, number in numbers.items():
        if number > 0 and STATE not in key.split("."):
            alike[layer_of(key)[1]][key] = number
    found: list[tuple[float, Finding]] = []
    for name, of_layers in alike.items():
        if len(of_layers) < _FEWEST_ALIKE:
            continue
        usual = median(of_layers.values())
        # Differences of logarithms: the ratio of two numbers may be beyond the range of fp64.
        distances = {key: math.log(number) - math.log(usual) for key, number in of_layers.items()}
        spread = median(map(abs, distances.values()))
        for key, number in of_layers.items():
            if distances[key] > max(math.log(_LARGE), _SPREAD * spread):
                layers = f"{name} over {len(of_layers):,} layers ({usual:.3g})"
                text = f"{key} {what.format(number)}, {_times(number / usual)} the median of {layers}"
                found.append((number / usual, {"kind": kind, "text": text, "tensor": key}))
    yield from (finding for _, finding in sorted(found, key=lambda pair: -pair[0]))


def _unlike(changes: Mapping[str, Any]) -> Iterator[Finding]:
    for each in changes["tensors"]:
        if each["kind"] in ("shape", "dtype"):
            yield {"kind": "other tensor", "text": f"{each['key']}: {each['a']} → {each['b']}", "tensor": each["key"]}
    for side, when in (("only_before", "before"), ("only_now", "now")):
        yield from ({"kind": "other tensor", "text": f"{key} is there only {when}"} for key in changes[side])
