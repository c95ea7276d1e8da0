"""What a reader should look at first, by the numbers of a report. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from shardopt.checkpoint.text import plural, seconds_text
from shardopt.report.changes import layer_of
from shardopt.state.paths import STATE

_SLOW, _SLOW_SECONDS = 3, 0.1  # times the median, and more than it by so much: short saves vary by more than that
_LARGE, _FEWEST_ALIKE = 10, 3  # times the median of the same tensor of other layers, if there are so many
_SPREAD = 4  # times the median distance of layers from their median, in logarithms: some differ by nature
_MOST = 8  # of each kind

Finding = dict[str, Any]
"""`kind`, `text`, and what it is about: `run` (its number), `step` and `branch`; or `tensor`, a key."""


def findings_of(document: Mapping[str, Any]) -> list[Finding]:
    """Returns the findings of a report, the gravest first: at most 8 of each kind, and how many more there are."""
    found: list[Finding] = []
    for number, run in enumerate(document["runs"]):
        found += _most(_incomplete(run), run=number)
        found += _most(_slow(run, "seconds", "slow save", "took"), run=number)
        found += _most(_slow(run, "stall_seconds", "stall", "held up training for"), run=number)
    checkpoint, changes = document["checkpoint"], document["against"]
    if checkpoint is not None:
        found += _most(_not_finite(checkpoint["tensors"]))
        sizes = {each["key"]: each["statistics"]["rms"] for each in checkpoint["tensors"] if "statistics" in each}
        found += _most(_outliers(sizes, "large values", "root mean square"))
    if changes is not None:
        shares = {each["key"]: each["relative"] for each in changes["tensors"] if math.isfinite(each["relative"])}
        found += _most(_outliers(shares, "large change", "relative change"))
        found += _most(_unlike(changes))
    return found


def _most(findings: Iterable[Finding], **about: int) -> list[Finding]:
    everything = [{**each, **about} for each in findings]
    more = len(everything) - _MOST
    note = [{"kind": everything[0]["kind"], "text": f"and {more:,} more"}] if more > 0 else []
    return [*everything[:_MOST], *note]


def _incomplete(run: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the steps that no place has all of, the newest first."""
    places = [f"{each['kind']} {each['url']}" for each in run["places"]]
    for step in reversed(run["steps"]):
        if step["complete"] or not step["in_run"] or step["left"] is not None:
            continue
        where = [f"{each['condition']} in {places[each['place']]}" for each in step["places"]]
        problems = [problem for each in step["places"] for problem in each["problems"]]
        first = f" ({problems[0]['key']}: {problems[0]['found']})" if problems else ""
        yield _of_step(step, "not complete", f"{_name(step)} is complete nowhere: {', '.join(where)}{first}")


def _slow(run: Mapping[str, Any], name: str, kind: str, verb: str) -> Iterator[Finding]:
    """Yields the steps whose seconds are far above the median, the slowest first."""
    measured = [(step[name], step) for step in run["steps"] if step[name] is not None]
    if not measured:
        return
    usual = median(seconds for seconds, _ in measured)
    for seconds, step in sorted(measured, key=lambda pair: -pair[0]):
        if seconds > _SLOW * usual and seconds > usual + _SLOW_SECONDS:
            text = f"{_name(step)} {verb} {seconds_text(seconds)}; the median is {seconds_text(usual)}"
            yield _of_step(step, kind, text)


def _of_step(step: Mapping[str, Any], kind: str, text: str) -> Finding:
    return {"kind": kind, "text": text, "step": step["step"], "branch": step["branch"]}


def _name(step: Mapping[str, Any]) -> str:
    return f"step {step['step']}" + (f" of branch {step['branch']}" if step["branch"] else "")


def _not_finite(tensors: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for each in tensors:
        found = each.get("statistics", {})
        names = {"nan": "NaN", "positive_infinity": "inf", "negative_infinity": "-inf"}
        counts = [f"{found[name]:,} {text}" for name, text in names.items() if found.get(name)]
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
        spread = median(abs(math.log(number / usual)) for number in of_layers.values())
        for key, number in of_layers.items():
            if math.log(number / usual) > max(math.log(_LARGE), _SPREAD * spread):
                text = f"{key} has a {what} of {number:.3g}; {name} has a median of {usual:.3g} over layers"
                found.append((number / usual, {"kind": kind, "text": text, "tensor": key}))
    yield from (finding for _, finding in sorted(found, key=lambda pair: -pair[0]))


def _unlike(changes: Mapping[str, Any]) -> Iterator[Finding]:
    for each in changes["tensors"]:
        if each["kind"] in ("shape", "dtype"):
            yield {"kind": "other tensor", "text": f"{each['key']}: {each['a']} → {each['b']}", "tensor": each["key"]}
    for side, when in (("only_before", "before"), ("only_now", "now")):
        yield from ({"kind": "other tensor", "text": f"{key} is there only {when}"} for key in changes[side])
