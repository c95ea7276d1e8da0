"""What docs/comparison.md says of torch.distributed.checkpoint (DCP), seen with the installed torch, and of us."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardopt
from shardopt import checkpoint
from shardopt.errors import CheckpointExistsError, CorruptionError, MismatchError, StateError
from tests.harness import run_ranks

pytestmark = [  # of DCP in one process, and where it writes over a checkpoint
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]
WEIGHT = torch.arange(1024, dtype=torch.float32)


def flip_a_bit(folder, pattern, tensor=WEIGHT):
    """Flips one bit of a tensor's bytes, in the file that has them."""
    (path,) = folder.glob(pattern)
    data = bytearray(path.read_bytes())
    at = bytes(data).index(tensor.numpy().tobytes()) + 2046
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_keys_that_nobody_asked_for(tmp_path):
    dcp.save({"weight": WEIGHT, "other": WEIGHT}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp.load({"weight": torch.zeros(1024)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint.save(tmp_path / "own", {"weight": WEIGHT, "other": WEIGHT})
    with pytest.raises(MismatchError, match="other: found"):
        checkpoint.load(tmp_path / "own", {"weight": torch.zeros(1024)})


def test_another_dtype(tmp_path):
    stored = torch.tensor([1.5, 1e300], dtype=torch.float64)
    dcp.save({"weight": stored}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    whole, half = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float32)
    for into in (whole, half):
        dcp.load({"weight": into}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert whole[0] == 1 and half[1] == float("inf")
    checkpoint.save(tmp_path / "own", {"weight": stored})
    for strict in (True, checkpoint.Strictness(dtype="cast")):
        with pytest.raises(MismatchError):
            checkpoint.load(tmp_path / "own", {"weight": torch.zeros(2)}, strict=strict)


def test_a_flipped_bit(tmp_path):
    dcp.save({"weight": WEIGHT}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    flip_a_bit(tmp_path / "dcp", "*.distcp")
    into = torch.zeros(1024)
    dcp.load({"weight": into}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert not torch.equal(into, WEIGHT)
    checkpoint.save(tmp_path / "own", {"weight": WEIGHT})
    flip_a_bit(tmp_path / "own", "*.safetensors")
    with pytest.raises(CorruptionError):
        checkpoint.load(tmp_path / "own", {"weight": torch.zeros(1024)})


class DiesBeforeMetadata(dcp.FileSystemWriter):
    def finish(self, metadata, results):
        raise OSError("died")


def test_a_save_to_the_same_path_that_dies(tmp_path):
    dcp.save({"weight": WEIGHT, "step": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="died"):
        dcp.save({"weight": WEIGHT + 1, "step": 2}, storage_writer=DiesBeforeMetadata(tmp_path / "dcp"), no_dist=True)
    into = torch.zeros(1024)
    dcp.load({"weight": into}, checkpoint_id=tmp_path / "dcp", no_dist=True)  # of the save that has failed
    assert torch.equal(into, WEIGHT + 1)
    checkpoint.save(tmp_path / "own", {"weight": WEIGHT, "step": 1})
    with pytest.raises(CheckpointExistsError):
        checkpoint.save(tmp_path / "own", {"weight": WEIGHT + 1, "step": 2})


def test_state_of_an_optimizer_that_never_stepped():
    model = torch.nn.Linear(4, 2)
    theirs, ours = torch.optim.NAdam(model.parameters()), shardopt.keyed("nadam", model.named_parameters())
    get_optimizer_state_dict(model, theirs)
    ours.init_state()
    assert {state["step"].item() for state in theirs.state.values()} == {1.0}
    assert {state["mu_product"].item() for state in theirs.state.values()} != {1.0}
    for state in ours.state_dict()["state"].values():
        assert state["step"].item() == 0.0 and state["mu_product"].item() == 1.0


def replicas_that_differ(folder):
    state = {"weight": WEIGHT + dist.get_rank()}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    with pytest.raises(StateError, match="replicas have drifted apart"):
        checkpoint.save(f"{folder}/own", state)


def test_replicas_that_differ(tmp_path):
    run_ranks(2, replicas_that_differ, str(tmp_path))


@pytest.mark.parametrize("wanted", [{"other": torch.zeros(4)}, {"weight": torch.zeros(512)}], ids=["missing", "shape"])
def test_a_load_that_is_refused(tmp_path, wanted):
    stored = {"first": WEIGHT, "weight": WEIGHT}
    dcp.save(stored, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint.save(tmp_path / "own", stored)
    into = {"first": torch.zeros(1024), **wanted}
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(MismatchError):
        checkpoint.load(tmp_path / "own", into, strict=checkpoint.Strictness(unexpected="ignore"))
    assert not into["first"].any()


def test_damage_in_the_middle_of_a_load(tmp_path):
    stored = {"first": WEIGHT, "second": WEIGHT + 1}
    dcp.save(stored, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (path,) = (tmp_path / "dcp").glob("*.distcp")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])  # all of the first, some of the second
    into = {"first": torch.zeros(1024), "second": torch.zeros(1024)}
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(into["first"], WEIGHT)
    checkpoint.save(tmp_path / "own", stored)
    flip_a_bit(tmp_path / "own", "*.safetensors", WEIGHT + 1)
    into = {"first": torch.zeros(1024), "second": torch.zeros(1024)}
    with pytest.raises(CorruptionError):
        checkpoint.load(tmp_path / "own", into, transactional=True)
    assert not into["first"].any() and not into["second"].any()
