"""torchtitan's own optimizers and loader, under our checkpoints."""

from dataclasses import dataclass

from integrations.torchtitan_windows import Windows
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import OptimizersContainer


class Share(IterableDataset):
    """A data rank's own windows, one after the other, with the position that torchtitan's streams keep."""

    def __init__(self, length, rank, ranks):
        self.windows, self.rank, self.ranks, self.position = Windows(length), rank, ranks, 0

    def __iter__(self):
        while True:
            self.position += 1
            yield self.windows[(self.position * self.ranks + self.rank) % len(self.windows)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict):
        self.position = state_dict["position"]


class ShareLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        super().__init__(Share(seq_len, dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size)


def stock(config):
    """Puts them into a config."""
    config.dataloader = ShareLoader.Config()
    groups, implementation = config.optimizer.param_groups, config.optimizer.implementation
    config.optimizer = OptimizersContainer.Config(param_groups=groups, implementation=implementation)
    config.checkpoint.interval = 2
