"""The jobs of a simulation: what each rank does, and what it was told."""

from __future__ import annotations

import errno
import json
import signal
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from shardopt.checkpoint.run.destinations import Mirror
from shardopt.checkpoint.run.export import Export
from shardopt.checkpoint.run.manager import Manager
from shardopt.checkpoint.run.options import Preemption
from shardopt.checkpoint.saving.options import SaveOptions
from shardopt.errors import MismatchError, RankError, ShardoptError
from tests.simulation.files import Inode
from tests.simulation.objects import PROTOCOL
from tests.simulation.schedule import DEADLINE_SECONDS, STOP_SECONDS, Fault, Job, Schedule
from tests.simulation.store import StoreServer
from tests.simulation.tasks import Killed, Process
from tests.simulation.told import Told
from tests.simulation.world import SimulatedGroup, SimulatedWorld, begin_process, end_process

ROOT = "/sim/run"
MIRROR = f"{PROTOCOL}://bucket/run"
EXPORTS = "/sim/exports"
_SHARED = ("w",)


class App:
    """What a rank trains: tensors that all ranks have, those of its stage of the model, and plain values."""

    def __init__(self, job: Job, number: int, rank: int, layers: int) -> None:
        self.tensors = {name: torch.zeros(3) for name in _SHARED}
        self.stage = {f"layer{i}": torch.zeros(2) for i in range(layers) if not job.stages or i % job.ranks == rank}
        self.state: dict[str, Any] = {
            "model": _Slow({**self.tensors}, job.state_seconds if rank == job.slow_rank else 0.0),
            "stage": dict(self.stage),
            "frozen": torch.arange(4.0),
            "job": number,
            "step": 0,
        }

    def become(self, job: int, step: int) -> None:
        """Has the values of a step of a job."""
        self.state["job"], self.state["step"] = job, step
        for name, tensor in {**self.tensors, **self.stage}.items():
            tensor.fill_(_value(job, step, name))

    def problem(self) -> str:
        """Returns what does not belong to the step and job that it says; "" where all does."""
        job, step = self.state["job"], self.state["step"]
        wrong = [
            f"{name} is {tensor.tolist()}"
            for name, tensor in {**self.tensors, **self.stage}.items()
            if not bool((tensor == _value(job, step, name)).all())
        ]
        return f"step {step} of job {job} was restored, but {wrong}" if wrong else ""


def _value(job: int, step: int, name: str) -> float:
    return float(zlib.crc32(f"{job} {step} {name}".encode()) % (1 << 20))


class _Slow:
    """A model whose state takes time."""

    def __init__(self, tensors: dict[str, Any], seconds: float) -> None:
        self._tensors, self._seconds = tensors, seconds

    def state_dict(self) -> dict[str, Any]:
        from shardopt.world import world

        if self._seconds:
            world().sleep(self._seconds)
        return dict(self._tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # filled in place


class Ledger:
    """What was reported to the programs, and so must hold."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.problems: list[str] = []
        self.least = 0  # a restore must give this step, or a later one
        self.taken_back = sys.maxsize  # the least of those to which the run was taken back
        self.committed: dict[int, int] = {}  # step → the job by which it was reported as committed
        self.unreadable: set[int] = set()  # steps that were damaged
        self.may_fail = False  # whether nothing may be left that can be restored
        self.files_of_user: list[str] = []
        self.current = 0  # the job that is the last one
        self.begun: dict[tuple[int, int], list[tuple[str, str]]] = {}  # job, rank → tasks after commits, and of which

    def commits(self, job: int, step: int) -> None:
        """Notes that a save was reported as committed."""
        if job == self.current:
            self.least = max(self.least, step)
            self.committed[step] = job

    def saves(self, job: int, step: int) -> None:
        """Notes that a step is saved once more: it may be committed, and nobody hear of it."""
        if self.committed.get(step, job) != job:
            del self.committed[step]

    def takes_back(self, step: int) -> None:
        """Notes that a run is taken back, which may have happened from now on."""
        self.least = min(self.least, step)
        self.taken_back = min(self.taken_back, step)
        self.committed = {each: job for each, job in self.committed.items() if each <= step}


def _is_whole(checkpoint: Inode) -> bool:
    return not any(inode.unreadable for inode in checkpoint.entries.values())


class RunningJob:
    """A job of a schedule that has been started."""

    def __init__(self, world: SimulatedWorld, server: StoreServer, schedule: Schedule, number: int, ledger: Ledger):
        self.world, self.server, self.ledger = world, server, ledger
        self.schedule, self.number, self.job = schedule, number, schedule.jobs[number]
        self.processes: list[Process] = []
        self.disturbed: set[int] = set()
        for fault in schedule.faults:
            if fault.job == number and fault.kind == "unreadable":
                self._damage_newest()
        for rank in range(self.job.ranks):
            self._start(rank)

    def resumes_beside(self, job: RunningJob) -> None:
        """Has stopped ranks continue beside another job, at their operation of its rank 0."""
        for fault in self.schedule.faults:
            if fault.job == self.number and fault.kind == "stop" and fault.beside:
                job.processes[0].at_operation[fault.beside].append(self.processes[fault.rank].go_on)

    def _start(self, rank: int) -> None:
        scheduler = self.world.scheduler
        process = Process(scheduler, f"job {self.number} rank {rank}", f"host{self.number}.{rank // 2}")
        process.address = f"10.0.{self.number}.{rank // 2 + 1}"
        process.job_size = self.job.ranks
        process.planning_seconds = self.job.planning_seconds if rank == self.job.slow_rank else 0.0
        process.gives_up = lambda: self._judge_given_up(rank)
        for fault in self.schedule.faults:
            if fault.job == self.number and fault.rank == rank:
                self._place(fault, process, rank)
        self.processes.append(process)
        process.start(lambda: self._main(process, rank))

    def _place(self, fault: Fault, process: Process, rank: int) -> None:
        scheduler = self.world.scheduler

        def strike() -> None:
            if fault.kind == "signal":
                process.signal()
                if not process.dead:
                    scheduler.at(scheduler.now + STOP_SECONDS + 1.5, lambda: self._judge_stopped(process, rank))
                    return
            if fault.kind == "reset":
                self.world.fabric.reset_one(process)
                return
            self.disturbed.add(rank)
            if fault.kind == "kill":
                process.kill()
            elif fault.kind == "stop":
                process.stop()
                if not fault.beside:
                    scheduler.at(scheduler.now + fault.seconds, process.go_on)
            elif fault.kind == "interrupt":
                process.interrupt()
            elif fault.kind == "cut":
                self.world.network.cut_off(process, fault.seconds)
            elif fault.kind == "store":
                self.disturbed.update(range(self.job.ranks))
                scheduler.note("store", "is lost")
                self.server.lost = True
            elif fault.kind == "power":
                self.disturbed.update(range(self.job.ranks))
                for each in scheduler.processes:  # what is left of earlier jobs too
                    each.kill()
                self.world.files.lose_power()

        if fault.kind == "disk":
            self.world.files.failing[process.name, fault.at] = getattr(errno, fault.detail)
        elif fault.kind == "object":
            self.world.objects.failing[process.name, fault.at] = fault.detail
        elif fault.kind != "unreadable":
            process.at_operation[fault.at].append(strike)

    def _judge_stopped(self, process: Process, rank: int) -> None:
        if not process.dead and rank not in self.disturbed:
            self.ledger.problems.append(f"rank {rank} of job {self.number} got a signal, and continues")

    def _judge_given_up(self, rank: int) -> None:
        """Judges a rank that got a signal and has ended without a save: something else must have held it up."""
        slow = self.job.planning_seconds or self.job.state_seconds
        if not slow and all(fault.kind == "signal" for fault in self.schedule.faults) and not self.disturbed:
            self.ledger.problems.append(f"rank {rank} of job {self.number} got a signal, and was not done in time")
        self.disturbed.add(rank)

    def _damage_newest(self) -> None:
        """Makes a data file of the newest checkpoint unreadable: the one before is to be restored, if there is one."""
        root = self.world.files.find(ROOT)
        entries = {} if root is None else root.entries
        whole = [
            name for name in sorted(entries) if "manifest.json" in entries[name].entries and _is_whole(entries[name])
        ]
        if not whole:
            return
        newest = entries[whole[-1]].entries
        newest[min(name for name in newest if name.endswith(".safetensors"))].unreadable = True
        ledger = self.ledger
        ledger.unreadable.add(int(whole[-1].split("-")[1]))
        ledger.committed.pop(int(whole[-1].split("-")[1]), None)  # it may be saved anew
        self.world.scheduler.note("storage", f"cannot read {whole[-1]} any more")
        # Others may refer to its files, belong to no branch that is known here, or be just about to be removed.
        simple = not any(job.incremental or job.back or job.misfit for job in self.schedule.jobs)
        if any(fault.kind in ("stop", "cut") for fault in self.schedule.faults):
            simple = simple and not any(job.keep_last for job in self.schedule.jobs)
        ledger.least = int(whole[-2].split("-")[1]) if simple and len(whole) > 1 else 0
        ledger.may_fail |= not ledger.least

    def leads_disturbed(self) -> bool:
        """Whether a fault has hit a rank through which others hear of answers."""
        job = self.job
        leaders = range(0, job.ranks - 1, job.ranks_per_block) if job.ranks_per_block > 1 else (0,)
        return not self.disturbed.isdisjoint(leaders)

    def has_ended(self) -> bool:
        """Whether a launcher would start the next one: nobody is left but those who do not answer."""
        cut = self.world.network.seconds_cut
        return all(process.dead or process.stopped or cut(process) > 0 for process in self.processes)

    def _main(self, process: Process, rank: int) -> None:
        begin_process(process, self.job.ranks_per_block)
        process.at_exit.append(end_process)
        process.group = SimulatedGroup(process, self.server, rank, self.job.ranks)
        with suppress(ShardoptError, _Stopped, _Left, KeyboardInterrupt):  # it was noted
            self._train(process.group, rank)

    def _train(self, group: SimulatedGroup, rank: int) -> None:
        job = self.job
        app = App(job, self.number, rank, layers=max(each.ranks for each in self.schedule.jobs))
        manager = Manager(
            ROOT,
            destinations=[Mirror(MIRROR)] if job.mirror else [],
            keep=job.keep_last,
            stop_on=Preemption(signal.SIGTERM, seconds=STOP_SECONDS) if job.stops else None,
            options=SaveOptions(deadline_seconds=DEADLINE_SECONDS),
            stage=job.stage,  # type: ignore[arg-type]  # a word that was drawn
            incremental=job.incremental,
            process_group=group,
            export=Export(EXPORTS) if job.exports else None,
        )
        self._follow(manager, rank)
        with manager:
            if job.looks_alone and rank == 0:
                self._call(rank, "look", self._look_alone, compared=False)
            if job.misfit:
                self._call(rank, "misfit", lambda: manager.restore({"other": torch.ones(2)}, share_reads="never"))
                step = self._call(rank, "newest", lambda: max(manager.steps(), default=0), compared=False) or 0
                step = self.__dict__.setdefault("newest", step)
            else:
                step = self._restore(manager, app, rank)
            for number in range(1, job.saves + 1):
                step += 1
                app.become(self.number, step)
                self._save(manager, app, rank, number, step)
            self._call(rank, "close", manager.close)

    def _follow(self, manager: Manager, rank: int) -> None:
        """Notes the tasks that follow commits, in the order in which this rank begins them."""
        begun = self.ledger.begun[self.number, rank] = []
        after = manager._after
        for task, each in (("mirror", after._mirror), ("export", after._exporter), ("retention", after._keeper)):
            if each is not None:

                def begin(what: Any, *args: Any, task: str = task, begin: Callable[..., None] = each.begin) -> None:
                    begun.append((task, getattr(what, "name", what)))
                    begin(what, *args)

                each.begin = begin  # type: ignore[method-assign, assignment]  # of this instance

    def _look_alone(self) -> list[int]:
        """Looks at the run, on one rank alone."""
        destinations = [Mirror(MIRROR)] if self.job.mirror else []
        return Manager(ROOT, destinations=destinations, process_group=self.processes[0].group).steps()

    def _restore(self, manager: Manager, app: App, rank: int) -> int:
        wanted = None
        if self.job.back:
            steps = self._call(rank, "steps", manager.steps, compared=False) or []
            # All ranks take the run back to the same step: what rank 0 sees is read once.
            first = steps[max(len(steps) - 1 - self.job.back, 0)] if steps else 0
            wanted = self.__dict__.setdefault("wanted", first) or None
            if wanted is not None:
                self.ledger.takes_back(wanted)
        told = self._call(
            rank, "restore", lambda: manager.restore(app.state, step=wanted, share_reads="never"), ends=True
        )
        step = int(told or 0)
        if step:
            self._judge_restored(app, rank, step)
        elif self.ledger.least and not self.ledger.may_fail and self.number == self.ledger.current:
            self.ledger.problems.append(f"nothing was restored, though step {self.ledger.least} was committed")
        return step

    def _judge_restored(self, app: App, rank: int, step: int) -> None:
        ledger = self.ledger
        where = f"rank {rank} of job {self.number}"
        problem = app.problem()
        if problem:
            ledger.problems.append(f"{where}: {problem}")
        if app.state["step"] != step:
            ledger.problems.append(f"{where}: restore returned step {step}, and gave that of {app.state['step']}")
        errors = sum(fault.kind == "disk" and fault.job == self.number for fault in self.schedule.faults)
        if step < ledger.least and errors < 2 and self.number == ledger.current and not self._may_be_late(step):
            ledger.problems.append(f"{where}: step {step} was restored, though {ledger.least} was committed")
        by = ledger.committed.get(step, app.state["job"])
        # A rank of an earlier job that was stopped in its restore ends it beside a later one, which may have taken the
        # run back meanwhile, and saved the step on its own branch.
        is_older = app.state["job"] <= self.number < by and step > ledger.taken_back
        if by != app.state["job"] and not is_older:
            ledger.problems.append(f"{where}: step {step} was committed by job {by}, not this one")

    def _may_be_late(self, step: int) -> bool:
        """Whether an earlier job, which takes the run back as its user has said, may have been stopped in doing so."""
        stopped = {fault.job for fault in self.schedule.faults if fault.kind in ("stop", "cut")}
        late = (number for number in stopped if number < self.number and self.schedule.jobs[number].back)
        return step >= self.ledger.taken_back and any(late)

    def _save(self, manager: Manager, app: App, rank: int, number: int, step: int) -> None:
        job = self.job
        metrics: dict[str, Any] = {"loss": 1.0 / step}
        if job.bad_metrics == number and rank == 0:
            metrics = {"loss": "n/a"}
        passed = step + 1000 if job.astray == (rank, number) else step
        call = f"save {number}"
        self.ledger.saves(self.number, passed)
        try:
            report = self._call(rank, call, lambda: manager.save(passed, app.state, metrics=metrics))
        except _Left:
            self.ledger.commits(self.number, passed)
            raise
        if job.stage and report is not None and rank in job.hears:
            report = self._call(rank, f"result {number}", report.result)
        if report is not None and (not job.stage or rank in job.hears):
            self.ledger.commits(self.number, passed)
            if rank == 0:
                self._put_file_of_user(manager.path(passed))

    def _put_file_of_user(self, directory: str) -> None:
        """Puts a file of the user's own beside a checkpoint: nobody may ever remove it."""
        there = self.world.files.find(directory)
        if there is not None and self.number == self.ledger.current:
            there.entries["metrics.json"] = there.flushed_entries["metrics.json"] = Inode(is_directory=False)
            self.ledger.files_of_user.append(f"{directory}/metrics.json")

    def _call(
        self, rank: int, call: str, function: Callable[[], Any], ends: bool = False, compared: bool = True
    ) -> Any:
        """Makes a call, and notes what it has told; returns None after an error with which a program can continue."""
        scheduler = self.world.scheduler
        scheduler.note(f"job {self.number} rank {rank}", f"calls {call}")
        begin, ok, result = scheduler.now, False, None
        try:
            result = function()
            ok, text = True, _described(result)
        except Killed:
            raise
        except KeyboardInterrupt:
            text = "KeyboardInterrupt"
        except SystemExit:
            ok, text = True, "preempted"
            raise _Left from None
        except ShardoptError as error:
            text = f"{type(error).__name__}: {error}"
            if ends or (isinstance(error, RankError) and not isinstance(error, MismatchError)):
                raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.ledger.problems.append(f"rank {rank} of job {self.number}: {call} raised {text}")
            raise _Stopped from error
        finally:
            if not self.processes[rank].dead:
                disturbed = rank in self.disturbed
                told = Told(self.number, rank, call, begin, scheduler.now, ok, text, disturbed or not compared)
                self.ledger.told.append(told)
                scheduler.note(f"job {self.number} rank {rank}", f"{call}: {text.splitlines()[0] if text else ''}")
        if text == "KeyboardInterrupt":  # whoever interrupts a call may make it again
            return self._call(rank, call, function, ends, compared)
        return result


class _Stopped(Exception):
    """Ends a rank whose call has raised what it must not."""


class _Left(Exception):
    """Ends a rank that got a signal, and has saved."""


def _described(result: Any) -> str:
    save_id = getattr(result, "save_id", "")
    return f"saved as {save_id}" if save_id else str(result) if isinstance(result, int | list) else ""


def judge_order(ledger: Ledger, jobs: list[RunningJob]) -> list[str]:
    """Returns where tasks that follow a commit were begun in another order than docs/architecture.md has."""
    problems = []
    for (number, rank), begun in ledger.begun.items():
        job = jobs[number].job
        chain = ["mirror"] * job.mirror + ["export"] * (job.exports and rank == 0) + ["retention"]
        for i, (task, name) in enumerate(begun):
            if task == "retention" and begun[: i + 1][-len(chain) :] != [(each, name) for each in chain]:
                problems.append(f"rank {rank} of job {number} began {begun[: i + 1][-len(chain) :]}, and not {chain}")
        first = ledger.begun.get((number, 0), [])
        alike = [[name for task, name in each if task == "mirror"] for each in (first, begun)]
        if not jobs[number].schedule.faults and alike[0] != alike[1]:
            problems.append(f"ranks 0 and {rank} of job {number} copy {alike[0]} and {alike[1]}")
    return problems


def judge_exports(world: SimulatedWorld, jobs: list[RunningJob]) -> list[str]:
    """Returns what is wrong with the export that there is, if there is one: it must be of one step of one job."""
    root = world.files.find(EXPORTS)
    record = None if root is None else root.entries.get("export.json")
    if root is None or record is None:
        return []
    name = json.loads(record.data)["name"]
    folder = root.entries.get(name)
    model = None if folder is None else folder.entries.get("model.safetensors")
    if model is None:
        # Of two processes that export at once one may remove what the other is about to publish.
        two_at_once = any(
            fault.beside and fault.job + 1 < len(jobs) and all(each.job.exports for each in jobs[fault.job :][:2])
            for fault in jobs[0].schedule.faults
        )
        return [] if two_at_once else [f"{name} is said to be exported, and is not there"]
    try:
        tensors = safetensors.torch.load(bytes(model.data))
    except SafetensorError as error:
        return [f"the export of {name} is damaged: {error}"]
    step = int(name.split("-")[1])
    values = {key.rpartition(".")[2]: set(value.tolist()) for key, value in tensors.items() if key != "frozen"}
    if any(all(value == {_value(each.number, step, key)} for key, value in values.items()) for each in jobs):
        return []
    return [f"the export of {name} is of no job: {values}"]
