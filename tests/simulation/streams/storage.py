"""What is under the root of a simulated stream, seen by nobody's request: to damage it, and to judge what is left."""

from __future__ import annotations

from tests.simulation.files import Inode
from tests.simulation.objects import PROTOCOL
from tests.simulation.streams.schedule import Hit
from tests.simulation.world import SimulatedWorld

LOCAL_ROOT = "/sim/weights"
REMOTE_ROOT = f"{PROTOCOL}://bucket/weights"
MANIFEST = "manifest.json"


class Stored:
    """The files under the root."""

    def __init__(self, world: SimulatedWorld, remote: bool) -> None:
        self.root = REMOTE_ROOT if remote else LOCAL_ROOT
        self._world, self._remote = world, remote
        self._prefix = REMOTE_ROOT.removeprefix(f"{PROTOCOL}://") + "/"

    def steps(self) -> dict[str, list[str]]:
        """Returns the names of files by directory of a step, in order."""
        if not self._remote:
            return {name: sorted(each.entries) for name, each in sorted(self._directories().items())}
        names = sorted(name.removeprefix(self._prefix) for name in self._world.objects.objects)
        found: dict[str, list[str]] = {}
        for directory, _, name in (each.partition("/") for each in names if each.startswith("step-")):
            found.setdefault(directory, []).append(name)
        return found

    def committed(self) -> list[str]:
        """Returns the directories with a manifest, in order."""
        return [directory for directory, names in self.steps().items() if MANIFEST in names]

    def _directories(self) -> dict[str, Inode]:
        root = self._world.files.find(LOCAL_ROOT)
        entries = {} if root is None else root.entries
        return {name: each for name, each in entries.items() if name.startswith("step-")}

    def damage(self, hit: Hit) -> bool:
        """Flips a byte of a file of a committed step, or loses the file; returns whether there was one."""
        chance = self._world.scheduler.random
        steps, committed = self.steps(), self.committed()
        if not committed:
            return False
        directory = committed[-1] if chance.random() < 0.7 else chance.choice(committed)
        names = [name for name in steps[directory] if (name == MANIFEST) is (hit.detail == "manifest")]
        if not names:
            return False
        path = f"{directory}/{chance.choice(names)}"
        self._world.scheduler.note("storage", f"{hit.kind} {path}")
        data = self._take(path)
        if hit.kind == "flip" and data:
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
            self._put(path, data)
        return True

    def _take(self, path: str) -> bytearray:
        if self._remote:
            return bytearray(self._world.objects.objects.pop(self._prefix + path))
        directory, _, name = path.partition("/")
        return bytearray(self._directories()[directory].entries.pop(name).data)

    def _put(self, path: str, data: bytearray) -> None:
        if self._remote:
            self._world.objects.objects[self._prefix + path] = bytes(data)
            return
        directory, _, name = path.partition("/")
        made = self._directories()[directory].entries[name] = Inode(is_directory=False)
        made.data, made.flushed_data = data, bytes(data)
