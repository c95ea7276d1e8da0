"""torch.distributed.checkpoint (DCP), from the modules that define its calls: type checkers see no others."""

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader as FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save
from torch.distributed.checkpoint.state_dict_saver import save as save
