"""Sharded tensors of a class that this package has never seen: stepped, clipped, saved, and resharded both ways."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.errors import LayoutError
from shardopt.sharding import Box, PiecesTensor, TensorKind, cut_range, register_kind, view_of
from tests.harness import run_ranks
from tests.support.flat_buffers import SHAPES, FlatBuffer, drawn, full, optimizer_of

RANKS_STAY = True

ALGORITHMS = [("adamw", {}), ("sgd", {"momentum": 0.9}), ("adagrad", {})]
CLIP = 2.0


def gradients(step):
    """In every third step `e` has none."""
    values = drawn(100 + step)
    if step % 3 == 2:
        values["e"] = torch.zeros_like(values["e"])
    return values


def train_alone(algorithm, options, steps):
    """After each of these numbers of steps, the parameters and state that one process has."""
    params = {name: torch.nn.Parameter(value) for name, value in drawn(0).items()}
    optimizer = optimizer_of(params, algorithm, CLIP, **options)
    results = []
    for step in range(max(steps)):
        for name, value in gradients(step).items():
            params[name].grad = value
        optimizer.step()
        if step + 1 in steps:
            state = optimizer.state_dict()["state"]
            entries = {f"{name}.{entry}": v.clone() for name in SHAPES for entry, v in state[name].items()}
            results.append({name: p.detach().clone() for name, p in params.items()} | entries)
    return results


def train_flat(path, algorithm, options, begin, end, source):
    """Steps on shards of a flat buffer, loaded first where there is a source; saved at the end."""
    buffer = FlatBuffer(drawn(0), dist.get_rank(), dist.get_world_size())
    optimizer = optimizer_of(buffer.params, algorithm, CLIP, **options)
    app = {"params": buffer.params, "optimizer": optimizer}
    if source:
        optimizer.init_state()
        checkpoint.load(source, app)
    for step in range(begin, end):
        buffer.set_gradients(gradients(step))
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(path, app)


def train_rows(path, algorithm, options, begin, end, source):
    """The same on DTensors cut along their first dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def spread(value):
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) if value.ndim else value

    params = {name: torch.nn.Parameter(spread(value)) for name, value in drawn(7).items()}
    optimizer = optimizer_of(params, algorithm, CLIP, **options)
    optimizer.init_state()
    app = {"params": params, "optimizer": optimizer}
    checkpoint.load(source, app)
    for step in range(begin, end):
        for name, value in gradients(step).items():
            params[name].grad = spread(value)
        optimizer.step()
    checkpoint.save(path, app)
    return {name: full(param) for name, param in params.items()}


def stored(path):
    with checkpoint.open(path) as reader:
        params = {name: reader.read(f"params.{name}") for name in SHAPES}
        state = [key for key in sorted(reader.keys()) if key.startswith("optimizer.state.")]
        return params | {key.removeprefix("optimizer.state."): reader.read(key) for key in state}


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS, ids=[name for name, _ in ALGORITHMS])
def test_they_train_reshard_and_resume_as_one_process_does(tmp_path, algorithm, options):
    """Four ranks' flat buffers, then rows on two ranks, then flat buffers on three."""
    wanted = train_alone(algorithm, options, [4, 7, 10])
    a, b, c = (str(tmp_path / name) for name in "abc")
    run_ranks(4, train_flat, a, algorithm, options, 0, 4, None)
    run_ranks(2, train_rows, b, algorithm, options, 4, 7, a)
    run_ranks(3, train_flat, c, algorithm, options, 7, 10, b)
    for path, expected in zip((a, b, c), wanted, strict=True):
        loaded = stored(path)
        assert loaded.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(loaded[key].double(), value.double(), rtol=1e-12, atol=1e-12, msg=key)


def save_pieces(path, pieces):
    shape, own = pieces[dist.get_rank()]
    tensor = PiecesTensor(shape, [(Box(*box), torch.ones(box[1])) for box in own], torch.float32)
    with pytest.raises(LayoutError) as caught:
        checkpoint.save(path, {"x": tensor}, deadline_seconds=20)
    return [(problem.key, problem.found) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([((2, 0), (1, 3))], "no box holds offsets (3, 0) sizes (1, 3)"),
        ([((1, 0), (3, 3))], "both hold offsets (1, 0) sizes (1, 3)"),
    ],
    ids=["hole", "overlap"],
)
def test_holes_and_overlaps_between_ranks_are_refused_at_the_save(tmp_path, second, said):
    pieces = [((4, 3), [((0, 0), (2, 3))]), ((4, 3), second)]
    outcomes = run_ranks(2, save_pieces, str(tmp_path / "c"), pieces)
    assert outcomes[0] == outcomes[1]
    ((key, text),) = outcomes[0]
    assert key == "x" and said in text
    assert not list(tmp_path.glob("c/*"))


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1, 1, 5), (3, 1, 2, 2)])
def test_a_run_of_elements_is_cut_into_few_boxes_that_are_it(shape):
    whole = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            flat = whole.flatten()[start:end].clone()
            pieces = cut_range(flat, shape, start)
            assert len(pieces) <= max(2 * len(shape) - 1, 1)
            for box, part in pieces:
                assert torch.equal(part, whole[tuple(map(slice, box.offsets, box.ends))])
                assert part.numel() and part.data_ptr() >= flat.data_ptr()  # no copy
            assert sum(part.numel() for _, part in pieces) == end - start


def test_a_tensor_of_pieces_is_copied_and_pickled_with_its_pieces():
    tensor = PiecesTensor((4, 2), [(Box((1, 0), (2, 2)), torch.arange(4.0).view(2, 2))], requires_grad=True)
    for twin in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        (piece,) = view_of(twin).pieces
        assert piece.box == Box((1, 0), (2, 2)) and torch.equal(piece.tensor, tensor.tensors[0])
        assert piece.tensor.data_ptr() != tensor.tensors[0].data_ptr() and twin.requires_grad
    with pytest.raises(TypeError, match="compute on its `tensors`"):
        torch.add(tensor, 1)
    with pytest.raises(LayoutError, match="on a rank without pieces"):
        PiecesTensor((4, 2), [])


def test_only_classes_of_tensors_are_registered():
    for cls in (int, torch.Tensor, torch.nn.Parameter):
        with pytest.raises(LayoutError, match=r"a subclass of torch\.Tensor"):
            register_kind(cls, TensorKind())
