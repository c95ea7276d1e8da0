"""The rules: what may happen to a run, in any order, and what must then be the same on both sides.

Hypothesis draws and shrinks. On several ranks each of them does, from one seed and with the same numbers, since what a
rule has come to is agreed upon before the next: a failure of one rank is one of all, and no rank waits for another.
"""

import functools
import logging
import shutil
import traceback
from unittest import mock

import torch.distributed as dist
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.twins.layouts import LAYOUTS
from tests.twins.plain import ADDED, KINDS, OPTIONS, SHAPES, WITH_STATE, Plain, value
from tests.twins.sharded import MESHES, MODULES, Sharded

NAMES = sorted(SHAPES)
MOST = 99  # small enough that hypothesis draws no numbers out of the source, which other modules would change
UNUSED = st.sets(st.sampled_from(NAMES), max_size=6)


class Failed(AssertionError):
    """A rule came to something else on a rank; the same error on all of them."""


def agreed(method):
    """Looks, after a rule, whether both sides are the same; and on several ranks whether they are on every rank.

    `then` is what has no gradient in a step after it, None where there is no step.
    """

    @functools.wraps(method)
    def carried_out(self, then=None, **arguments):
        drawn, failure = f"{method.__name__}({arguments}, then={then})", ""
        try:
            method(self, **arguments)
            if then is not None:
                self.train([then], 7)
            self.sharded.check(self.plain)
        except Exception:
            failure = traceback.format_exc()
        self.done.append(drawn)
        reports = [(drawn, failure)]
        if dist.get_world_size() > 1:
            reports *= dist.get_world_size()
            dist.all_gather_object(reports, (drawn, failure))
        assert len({drawn for drawn, _ in reports}) == 1, f"ranks have drawn otherwise: {reports}"
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(reports) if text]
        if failures:
            if not type(self).failed:  # at once: to find a shorter one may take longer than there is time
                type(self).failed = True
                print(f"the first to fail, of {self.kind}:", *self.done, *failures, sep="\n", flush=True)
            raise Failed("\n".join(failures))

    return carried_out


def change(**given):
    """A rule, and maybe a step after it."""
    return lambda method: rule(then=st.none() | UNUSED, **given)(agreed(method))


def target():
    """How a fresh app is made: layout, names of modules, order."""
    return st.tuples(st.integers(0, 2), st.sampled_from(MODULES), st.integers(0, 50))


class Twins(RuleBasedStateMachine):
    """A sharded run and a plain one."""

    root, kind = "", ""  # a folder that all ranks see; of `KINDS`
    played, failed = 0, False

    def __init__(self):
        super().__init__()
        type(self).played += 1
        self.folder = f"{self.root}/{self.played}"
        self.manager = None
        self.saved = []  # of each its path, the plain side as it was, and the name of modules then
        self.history = {}  # the same for each step that the manager has
        self.step_number = 0
        self.frozen = set()
        self.done = []  # every rule, with what it was given

    @initialize(how=target(), early=st.booleans())
    @agreed
    def begin(self, how, early):
        self.plain = Plain(self.kind)
        self.sharded = self.fresh(self.plain, how)
        self.manager = self.run()
        if early:
            self.make_state()

    def run(self):
        return checkpoint.Manager(f"{self.folder}/run", every=1)

    def teardown(self):
        if self.manager is not None:
            self.manager.close()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def fresh(self, plain, how):
        layout, module, order = how
        layouts = LAYOUTS[dist.get_world_size()]
        return Sharded(plain, layouts[layout % len(layouts)], module, self.frozen & plain.params.keys(), order)

    # --- training ----------------------------------------------------------------------------------------------------

    @rule(unused=st.lists(UNUSED, min_size=1, max_size=3), seed=st.integers(1, 99))
    @agreed
    def steps(self, unused, seed):
        self.train(unused, seed)

    def train(self, unused, seed):
        """Args: unused: in each of the steps, what has no gradient besides what is frozen."""
        for number, without in enumerate(unused):
            names = self.plain.params.keys() - without - self.frozen
            gradients = {name: value(name, seed + number) for name in names}
            self.plain.step(gradients)
            self.sharded.step(gradients)

    @change(name=st.sampled_from(NAMES), what=st.sampled_from(["freeze", "no gradient", "make state"]))
    def changes_what_is_trained(self, name, what):
        if what == "no gradient":
            self.train([set(NAMES)], 0)
        elif what == "make state":
            self.make_state()
        elif name in self.plain.params:
            self.frozen ^= {name}
            self.sharded.train(name, name not in self.frozen)

    @change(name=st.sampled_from(NAMES), option=st.sampled_from(sorted(OPTIONS)), which=st.integers(0, 2))
    def changes_an_option(self, name, option, which):
        if name in self.plain.params and option in self.plain.options_of(name):
            new = OPTIONS[option][which % len(OPTIONS[option])]
            self.plain.options_of(name)[option] = new
            self.sharded.set_option(name, option, new)

    @precondition(lambda self: any(name not in self.plain.params for name in ADDED))
    @change(lr=st.sampled_from([0.01, 0.2]))
    def adds_a_group(self, lr):
        name = next(name for name in ADDED if name not in self.plain.params)
        self.frozen.discard(name)
        options = {**KINDS[self.kind][0].options, "lr": lr}
        self.plain.add(0, name, options)
        self.sharded.add(name, options)

    def make_state(self):
        self.sharded.optimizer.init_state()
        self.plain.early |= self.plain.params.keys() - self.plain.state().keys() - self.frozen

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self, path):
        return path, self.plain.copied(), self.sharded.module

    @change()
    def saves(self):
        self.save()

    def save(self):
        path = f"{self.folder}/{len(self.saved)}"
        checkpoint.save(path, self.sharded.app, check_replicas="all")
        self.saved.append(self.snapshot(path))

    @change()
    def manager_saves(self):
        self.save_in_run()

    def save_in_run(self):
        self.step_number += 1
        self.manager.save(self.step_number, self.sharded.app)
        self.history[self.step_number] = self.snapshot("")

    @precondition(lambda self: self.saved)
    @change(which=st.integers(0, MOST), how=target(), before=st.sampled_from(["", "all", "names"]), init=st.booleans())
    def loads_into_a_fresh_one(self, which, how, before, init):
        """Args: before: what has state before the load; init: whether the load makes what lacks."""
        self.resume(which, how, before, init)

    @change(how=target(), before=st.sampled_from(["", "all", "names"]), init=st.booleans())
    def resumes(self, how, before, init):
        """Saves, and resumes as another process at once."""
        self.save()
        self.resume(-1, how, before, init)

    def resume(self, which, how, before, init):
        path, plain, module = self.saved[which % len(self.saved)]
        sharded, names = self.fresh(plain, how), plain.names_with_state()
        there = set(plain.params) if plain.kind in WITH_STATE else set()
        if before == "all":
            sharded.optimizer.init_state()
            there |= plain.params.keys() - self.frozen
        elif before == "names":
            sharded.optimizer.init_state(names=[sharded.saved_name(name) for name in names])
            there |= names
        fits = init or there == names
        load = functools.partial(checkpoint.load, path, init_state=init)
        if self.loads(load, sharded, plain, module, fits):
            self.sharded = sharded

    @precondition(lambda self: self.saved)
    @change(which=st.integers(0, MOST), init=st.booleans())
    def loads_into_the_same(self, which, init):
        path, plain, module = self.saved[which % len(self.saved)]
        fits = self.fits_here(plain, init)
        self.loads(functools.partial(checkpoint.load, path, init_state=init), self.sharded, plain, module, fits)

    @change(back=st.none() | st.integers(0, MOST), how=st.none() | target(), anew=st.booleans())
    def restores(self, back, how, anew):
        """Args: back: to which of the steps, None for the newest; how: None into the same; anew: another manager."""
        while len(self.history) < (1 if back is None else 2):
            self.save_in_run()
            self.train([set()], 5)
        step = max(self.history) if back is None else sorted(self.history)[back % len(self.history)]
        _, plain, module = self.history[step]
        if anew:
            self.manager.close()
            self.manager = self.run()
        sharded = self.sharded if how is None else self.fresh(plain, how)
        # In the app as it is, state of what had none at that step goes.
        fits = how is not None or self.plain.layout_of_groups() == plain.layout_of_groups()

        def restore(app, rename):
            assert self.manager.restore(app, step=None if back is None else step, rename=rename) == step
            if back is not None:
                with self.run() as later:
                    assert later.restore(app, rename=rename) == step, "what is beyond is still part of the run"

        if self.loads(restore, sharded, plain, module, fits):
            self.sharded, self.step_number = sharded, step
            self.history = {each: saved for each, saved in self.history.items() if each <= step}

    def fits_here(self, plain, init):
        """Whether a save goes into the app as it is."""
        mine, saved = self.plain.names_with_state(), plain.names_with_state()
        return self.plain.layout_of_groups() == plain.layout_of_groups() and (
            self.plain.state().keys() <= saved if init else mine == saved
        )

    def loads(self, load, sharded, plain, module, fits):
        """Loads, or is refused, as is to be; whether it was loaded. What was refused has changed nothing."""
        rename = None if sharded.module == module else {rf"\b{module}\.0\.": f"{sharded.module}.0."}
        try:
            load(sharded.app, rename=rename)
        except MismatchError:
            assert not fits, "refused"
            return False
        assert fits, "loaded, though it does not fit"
        self.plain = plain.copied()
        return True


def play(root, sequences, steps, number=0):
    """Plays so many sequences of each kind on the ranks of this job; how many there were.

    Args:
        steps: the most rules in a sequence.
        number: of the series; another one draws other sequences.

    Raises:
        Failed: a sequence came to something else; the shortest that does so is told.
    """
    MESHES.clear()
    log = logging.getLogger("shardopt")
    level = log.level
    log.setLevel(logging.ERROR)  # runs that are restored, or step without gradients, say so
    try:
        with (
            mock.patch("os.fsync"),  # which takes a good part of the time; no machine goes down here
            # Numbers in the source, of which none is in any range here: to look for them takes seconds on each rank.
            mock.patch("hypothesis.internal.conjecture.providers._get_local_constants", Constants),
        ):
            series = enumerate(KINDS, 100 * number)
            return sum(
                _played(f"{root}/{drawn_from}", kind, sequences, steps, drawn_from) for drawn_from, kind in series
            )
    finally:
        log.setLevel(level)


def _played(root, kind, sequences, steps, drawn_from):
    machine = type("Played", (Twins,), {"root": root, "kind": kind})
    run_state_machine_as_test(
        seed(drawn_from)(machine),
        settings=settings(
            max_examples=sequences,
            stateful_step_count=steps,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.played
