"""Faults that the package once had, put back: each function takes one mending out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from shardopt.ranks import Call
from shardopt.ranks.channel import Channel
from shardopt.ranks.ranks import Ranks
from shardopt.world import world

_of = importlib.import_module
_commit = _of("shardopt.checkpoint.saving.commit")
_removal = _of("shardopt.checkpoint.saving.removal")
_manager = _of("shardopt.checkpoint.run.manager").Manager
_steps = _of("shardopt.checkpoint.run.steps").Steps
_saver = _of("shardopt.checkpoint.saving.async_save").AsyncSaver
_background = _of("shardopt.checkpoint.saving.background_save").BackgroundSave
_context = _of("shardopt.checkpoint.run.context")
_keeper = _of("shardopt.checkpoint.run.keeper")
_link = _of("shardopt.ranks.connections.link").Link
_peers = _of("shardopt.ranks.connections.peers").Peers
_side = _of("shardopt.ranks.groups").SideRanks
_follower = _of("shardopt.checkpoint.stream.follower").Follower
_chains = _of("shardopt.checkpoint.stream.chains")


def remains_removed_before_the_commit(patch: Callable[..., None]) -> None:
    publish = _commit.publish_checkpoint

    def removing(storage: Any, manifest: Any, data: bytes, base: Any = None) -> None:
        own = {file.name for file in manifest.files}
        for name in storage.names():
            if name not in own and _commit.FILE_NAME.fullmatch(name):
                storage.remove(name)
        publish(storage, manifest, data, base)

    patch(_of("shardopt.checkpoint.saving.commit"), "publish_checkpoint", removing)


def published_over_others(patch: Callable[..., None]) -> None:
    def publish_new(self: Any, name: str, data: bytes) -> bool:
        self.publish(name, data)
        return True

    patch(_of("shardopt.checkpoint.storage.local").LocalStorage, "publish_new", publish_new)


def no_second_look_for_a_manifest(patch: Callable[..., None]) -> None:
    class Looked:
        """A storage of which everything is removed but a manifest that has come meanwhile."""

        def __init__(self, storage: Any) -> None:
            self._storage = storage

        def __getattr__(self, name: str) -> Any:
            return getattr(self._storage, name)

        def remove_durably(self, name: str) -> None:
            if not self.__dict__.get("_looked"):
                self._storage.remove_durably(name)
            self._looked = True

    remove = _removal.remove_checkpoints
    patch(_keeper, "remove_checkpoints", lambda storages: remove([Looked(storage) for storage in storages]))


def branches_known_only_after_the_load(patch: Callable[..., None]) -> None:
    restore = _steps.restore

    def forgetful(self: Any, *args: Any) -> Any:
        before = self._run.branches
        try:
            return restore(self, *args)
        except BaseException:
            self._run.branches = before
            raise

    patch(_steps, "restore", forgetful)


def no_branches(patch: Callable[..., None]) -> None:
    patch(_steps, "_take_back", lambda *args: None)


def removals_for_a_run_as_it_was(patch: Callable[..., None]) -> None:
    patch(_context.Run, "may_remove", lambda self: True)


def failures_raised_by_each_rank_alone(patch: Callable[..., None]) -> None:
    def alone(self: Any, *args: Any) -> None:
        self._finish()
        if self._pending is not None:
            self._pending.raise_failure()

    patch(_saver, "_wait", alone)


def no_beats_between_rounds(patch: Callable[..., None]) -> None:
    patch(Ranks, "beating", lambda *args: nullcontext())


def no_beats_while_state_is_copied(patch: Callable[..., None]) -> None:
    run = _background.run

    def late(self: Any) -> None:
        self._handed_over.wait()
        run(self)

    patch(_background, "run", late)


def names_from_counters(patch: Callable[..., None]) -> None:
    init = _side.__init__

    def counting(self: Any, what: str) -> None:
        process = world()._process()  # type: ignore[attr-defined]  # of the simulated one
        self.number = process.side_channels = getattr(process, "side_channels", 0) + 1
        init(self, what)

    def of(self: Any, ranks: Ranks) -> Ranks:
        if ranks.channel is None:
            return ranks
        made: Ranks | None = self._made.get(ranks.channel)
        if made is None:
            self._made[ranks.channel] = made = Ranks(ranks._process_group(), ranks.deadline_seconds)
            made.channel = Channel(ranks.channel.store, ranks.rank, ranks.members, ranks.channel, f"{self.number:016x}")
        return made

    patch(_side, "__init__", counting)
    patch(_side, "of", of)


def unreadable_is_no_damage(patch: Callable[..., None]) -> None:
    patch(_of("shardopt.checkpoint.storage.local"), "_LOST", set())


def files_of_users_removed(patch: Callable[..., None]) -> None:
    remove = _removal.remove_checkpoints

    def removing(storages: Any) -> Any:
        for storage in storages:
            storage.remove("metrics.json")
        return remove(storages)

    patch(_keeper, "remove_checkpoints", removing)


def metrics_looked_at_outside_of_a_round(patch: Callable[..., None]) -> None:
    save, numbers_of = _manager.save, _of("shardopt.checkpoint.format.metrics").numbers_of

    def looking(self: Any, step: int, app: Any, *, metrics: Any = None, force: bool = False) -> Any:
        numbers_of(metrics)
        return save(self, step, app, metrics=metrics, force=force)

    patch(_manager, "save", looking)


def rounds_without_names(patch: Callable[..., None]) -> None:
    patch(_of("shardopt.ranks.ranks"), "as_call", lambda what: Call(str(what), ""))


def rounds_of_a_restore_with_one_name(patch: Callable[..., None]) -> None:
    as_call = _of("shardopt.ranks").as_call
    patch(_context, "Call", lambda text, same: as_call(text))
    patch(_context, "refuse_seen_by_some", lambda *args: None)  # which takes what the other round says for "sees none"


def leave_taken_once(patch: Callable[..., None]) -> None:
    """Whoever came back to a rank that leaves, and whose connection broke again, was not waited for."""
    leave = _peers.leave

    def once(self: Any, seconds: float, end: float) -> None:
        leave(self, seconds, end)
        patch(self, "leave", lambda *args: self.close(1.0))

    patch(_peers, "leave", once)


def no_more_frames_than_it_said(patch: Callable[..., None]) -> None:
    """A peer that came back had more frames in the end than it had said: they were on the way in the earlier socket."""
    patch(_link, "_sent_once", property(lambda self: self._confirmed + len(self._kept)))


def applied_before_all_ranks_agreed(patch: Callable[..., None]) -> None:
    agree = Ranks.agree

    def alone(self: Any, what: Any, work: Any, *others: Any, **named: Any) -> Any:
        is_reading = str(what).startswith("updating to") and not others and not named and "(applying)" not in str(what)
        return (work(), None) if is_reading else agree(self, what, work, *others, **named)

    patch(Ranks, "agree", alone)


def applied_without_a_pause(patch: Callable[..., None]) -> None:
    patch(_follower, "_enter_pause", lambda *args: world().monotonic())


def not_marked_as_torn(patch: Callable[..., None]) -> None:
    patch(_follower, "_is_torn", property(lambda self: False, lambda *args: None), raising=False)


def files_removed_that_kept_steps_need(patch: Callable[..., None]) -> None:
    patch(_removal, "_referred_in", lambda storages: {storage: frozenset() for storage in storages})


def deltas_on_any_state(patch: Callable[..., None]) -> None:
    """The newest delta of a box was applied to whatever was there."""

    def since(self: Any, entry: Any, state: bytes) -> Any:
        if self.state_of(entry) == state or not self._deltas:
            return [] if self._deltas else None
        file = self._deltas[-1]
        return [_chains.Link(file, file.index(entry, _chains.word_bytes(entry.dtype)))]

    patch(_chains.Chain, "since", since)


def bridges_on_any_state(patch: Callable[..., None]) -> None:
    since = _chains.Chain.since

    def bridged(self: Any, entry: Any, state: bytes) -> Any:
        links = since(self, entry, state)
        if links is None and self._bridge is not None:
            index = self._bridge.index(entry, _chains.word_bytes(entry.dtype))
            on_base = since(self, entry, _chains.digest_of(index.after))
            links = on_base if on_base is None else [_chains.Link(self._bridge, index), *on_base]
        return links

    patch(_chains.Chain, "since", bridged)


def weights_not_known_again(patch: Callable[..., None]) -> None:
    """What the program had changed between two updates was taken for what the first had left."""
    patch(_of("shardopt.checkpoint.stream.staged").Held, "is_in", lambda *args: True)


def steps_left_when_taken_back(patch: Callable[..., None]) -> None:
    patch(_of("shardopt.checkpoint.stream.publisher").Publisher, "_take_back", lambda *args: None)


def newest_step_looked_for_by_each_rank(patch: Callable[..., None]) -> None:
    patch(_follower, "_newest", lambda self, ranks, but: self._root.newest(but))


def step_told_after_the_pause(patch: Callable[..., None]) -> None:
    """Who served right after a pause was told the step before."""
    apply, step = _follower._apply, _follower.step

    def late(self: Any, ranks: Any, what: str, staged: Any, id: Any) -> Any:
        self.told = self._id
        try:
            pause = apply(self, ranks, what, staged, id)
            world().sleep(1e-3)
        finally:
            self.told = None
        return pause

    def told(self: Any) -> Any:
        earlier = self.__dict__.get("told")
        return step.fget(self) if earlier is None or self._is_torn else earlier.step

    patch(_follower, "_apply", late)
    patch(_follower, "step", property(told))


def put_back(broken: Callable[..., None], monkeypatch: Any) -> None:
    """Takes a mending out until `monkeypatch` is undone."""
    broken(partial(monkeypatch.setattr))
