"""torchrun for hosts that come and go: one that has lost the rendezvous does not close it for all others.

    python launch/elastic.py --nnodes 2:4 --rdzv-endpoint node1:29400 … train.py …

takes torchrun's own arguments but for the backend, which is c10d. torchrun closes the rendezvous, for good, when it
ends with an error. Where the error is that a host was cut off, and its cable is back by then, nobody could join the job
any more, this host included.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

BACKEND = "c10d-of-all"


class RendezvousOfAll(RendezvousHandler):
    """A c10d rendezvous that stays open when this host leaves because it was out of reach."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        parameters.backend = "c10d"
        self._handler = rendezvous_handler_registry.create_handler(parameters)

    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._handler.next_rendezvous()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        # torchrun calls this on its way out. Without it the heartbeats of this host end with its process.
        return isinstance(sys.exception(), RendezvousError) or self._handler.shutdown()


def main() -> None:
    rendezvous_handler_registry.register(BACKEND, RendezvousOfAll)
    run.main(["--rdzv-backend", BACKEND, *sys.argv[1:]])


if __name__ == "__main__":
    main()
