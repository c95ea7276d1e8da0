"""The table: every elementwise algorithm, option set and implementation, in every layout, on every rank of 1, 2 and 4.

Bit-identical to torch over the same boxes as plain parameters, whether `init_state` was called or not; and to the whole
where every box ends with a vector of the CPU, or no vectors are fused.
"""

import pytest
import torch

import shardopt
from shardopt.algorithms import AlgorithmSpec, Kind, register, registry, spec_of
from shardopt.errors import AlgorithmError
from shardopt.sharding.view import local_tensors
from tests.support.cases import (
    ELEMENTWISE,
    ELEMENTWISE_CASES,
    EXTRA_CASES,
    FUSED_SGD_IS_ASTRAY,
    INFOS,
    OWN_OPTIONS,
    astray,
    refused,
)
from tests.support.fake_rank import KeptRank, boxes_of, shard
from tests.support.layout_runs import (
    LAYOUTS,
    MIXED,
    RANKS,
    Place,
    our_run,
    same,
    torch_run,
    values,
    whole,
    whole_vectors,
)

EXACT = (torch.float32, torch.float64, torch.complex64)
DTYPES = (*EXACT, torch.bfloat16)
ALONE = "alone"


def without_implementation(case):
    name, options = case.values
    return name, *sorted((key, str(value)) for key, value in options.items() if key not in ("foreach", "fused"))


def rows():
    """Algorithm, options, dtype, number of ranks, layouts, and the ranks that look; what is not `usual` is exhaustive.

    Usually all options are seen on four ranks in fp32, all layouts under one optimizer, by one implementation after the
    Usually all options are seen on four ranks in fp32, all layouts under one optimizer, by one implementation after the
    other; the first options of every algorithm and implementation in every dtype (in fp64 of every algorithm, and of
    the fused ones), and those of every algorithm on fewer ranks. The first and the last rank look in fp32, and the
    last one alone in other dtypes, and where the first options of the algorithm were seen already. All means each
    layout by itself, and each rank, too.
    """
    met, cases = set(), (*ELEMENTWISE_CASES, *EXTRA_CASES)
    by_options = {}
    for case in cases:
        by_options.setdefault(without_implementation(case), []).append(case)
    turns = [implementations[i % len(implementations)] for i, implementations in enumerate(by_options.values())]
    for case in cases:
        name, options = case.values
        kind = (name, options.get("foreach"), options.get("fused"))
        first, plainest = kind not in met, name not in met
        met |= {kind, name}
        in_turn = case in turns
        for dtype in DTYPES:
            for ranks in RANKS:
                for layouts in (MIXED, ALONE) if dtype == torch.float32 else (MIXED,):
                    # What is fused goes by the dtype, and may be refused in one.
                    of_dtype = first if dtype == torch.float32 else plainest or (first and kind[-1])
                    usual = layouts is MIXED and ranks == 4 and (of_dtype or (dtype == torch.float32 and in_turn))
                    usual = usual or (layouts is MIXED and dtype == torch.float32 and plainest)
                    if name in OWN_OPTIONS:  # which share their bookkeeping
                        usual = layouts is MIXED and ranks == 4 and dtype in (torch.float32, torch.bfloat16) and first
                        usual = usual and not options.get("foreach")
                    both = dtype == torch.float32 and (plainest or name in OWN_OPTIONS)
                    looking = (0, ranks - 1) if both else (ranks - 1,)
                    kind_of = "alone" if layouts is ALONE else "mixed"
                    yield pytest.param(
                        name,
                        options,
                        dtype,
                        ranks,
                        [(layout,) for layout in LAYOUTS] if layouts is ALONE else [MIXED],
                        looking,
                        id=f"{case.id}-{str(dtype).removeprefix('torch.')}-{ranks}-{kind_of}",
                        marks=() if usual else pytest.mark.exhaustive,
                    )


@pytest.fixture(scope="module")
def kept():
    """A rank for the tests of steps, which follow one another."""
    rank = KeptRank()
    yield rank
    rank.close()


@pytest.mark.parametrize(("name", "options", "dtype", "ranks", "layouts", "looking"), list(rows()))
def test_step_on_shards_is_torchs_step(name, options, dtype, ranks, layouts, looking, request, kept):
    reason = refused(name, options, dtype)
    full = request.config.getoption("--exhaustive")
    # The steps before which `init_state` is called; unit/optim/test_init_state.py has all options.
    calls = ((), (0, 3)) if full or len(looking) > 1 else ((),)
    looking = range(ranks) if full else sorted({*looking})
    for names in layouts:
        if reason is not None:
            refuses_as_torch(name, options, names, dtype, reason, kept)
            continue
        if astray(name, options, dtype):
            kept.at(0, 2)
            with pytest.raises(AlgorithmError, match="fused SGD would be wrong"):
                our_run(name, options, names, dtype, Place(2)).steps()
            continue
        undivided = torch_run(name, options, names, dtype, whole)
        for rank in kept.first(looking, ranks):
            kept.at(rank, ranks)
            place = Place(ranks)
            boxes = torch_run(name, options, names, dtype, lambda *of, at=place: local_tensors(at(*of))[0])
            for early in calls:
                ours = our_run(name, options, names, dtype, place)
                ours.steps(before=lambda step, of=ours, at=early: of.optimizer.init_state() if step in at else None)
                for layout in names:
                    is_torchs(name, ours, boxes, layout)
                    goes_with_the_whole(name, options, dtype, ours, undivided, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_fused_sgd_in_16_bits_is_still_astray(dtype):
    """Once no torch has the fault that is followed, `astray` and `fused_astray` can go, and `fused_agrees` can grow."""
    numbers = torch.randn(9, 20, generator=torch.Generator().manual_seed(0)).to(dtype)

    def trained(fused):
        parameter = torch.nn.Parameter(numbers[0].clone())
        optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused, foreach=False)
        for gradient in numbers[1:]:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    off = (trained(True) - trained(False)).abs().max() / trained(False).abs().max()
    assert (off > 16 * torch.finfo(torch.bfloat16).eps) == FUSED_SGD_IS_ASTRAY
    params = {"w": torch.nn.Parameter(numbers[0].clone())}
    params["w"].grad = numbers[1].clone()
    optimizer = shardopt.keyed("sgd", params, lr=0.1, momentum=0.9, fused=True)
    optimizer.init_state()
    with pytest.raises(AlgorithmError, match=r"w: found a parameter of torch\.b?float16 on the CPU"):
        optimizer.step()
    assert torch.equal(params["w"], numbers[0])
    assert not optimizer.state_dict()["state"]["w"]["momentum_buffer"].any()


def refuses_as_torch(name, options, names, dtype, reason, kept):
    refusals = (AssertionError, RuntimeError, TypeError, ValueError)
    with pytest.raises(refusals, match=reason):
        torch_run(name, options, names, dtype, whole)
    kept.at(0, 2)
    with pytest.raises((*refusals, AlgorithmError), match=reason):
        our_run(name, options, names, dtype, Place(2)).steps()


def is_torchs(name, ours, boxes, layout):
    """The parameter and its state are what torch makes of this rank's box; state lies like the parameter."""
    parameter, state, wanted = ours.parameters[layout], ours.state(layout), boxes.state(layout)
    assert same(local_tensors(parameter)[0].detach(), boxes.parameters[layout].detach()), layout
    assert list(state) == list(wanted), layout
    kinds = {entry.name: entry.kind for entry in spec_of(name).state}
    for entry, value in state.items():
        if wanted[entry] is None:  # torch's SGD keeps this where there is no momentum
            assert value is None
            continue
        assert same(local_tensors(value)[0], wanted[entry]), (layout, entry)
        if kinds[entry] is Kind.PARAMETER and layout != "plain":
            assert (value.shape, value.placements) == (parameter.shape, parameter.placements), (layout, entry)
        else:
            assert type(value) is torch.Tensor


def goes_with_the_whole(name, options, dtype, ours, full, layout):
    parameter = ours.parameters[layout]
    # Those that torch lacks are computed in fp32 where parameters have 16 bits.
    exact = name in OWN_OPTIONS or (not options.get("fused") and dtype in EXACT) or whole_vectors(parameter)
    wanted = {"": full.parameters[layout].detach(), **full.state(layout)}
    for entry, value in {"": parameter, **ours.state(layout)}.items():
        if value is None:
            continue
        parts = boxes_of(wanted[entry], value) if value.shape == parameter.shape else [wanted[entry]]
        for local, part in zip(local_tensors(value), parts, strict=False):  # a rank may hold nothing
            if exact:
                assert torch.equal(local.detach(), part), (layout, entry)
            else:
                # A few units in the last place of the largest element.
                atol = 4 * torch.finfo(dtype).eps * wanted[entry].abs().max().item()
                assert (local.detach() - part).abs().max() <= atol if part.numel() else True, (layout, entry)


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE_CASES)
def test_state_is_divided_among_ranks(name, options, kept):
    """Bytes on a rank of four, of the state of an evenly sharded parameter: 1/4 but for the counters."""
    mesh, bytes_held = kept.at(3, 4), []
    for tensor in (torch.ones(64, 64), shard(torch.ones(64, 64), mesh, *LAYOUTS["even"].placements)):
        optimizer = shardopt.keyed(name, {"w": torch.nn.Parameter(tensor)}, **options)
        optimizer.init_state()
        state = [local for own in optimizer.state.values() for value in own.values() for local in local_tensors(value)]
        bytes_held.append(sum(local.nbytes for local in state))
    alone, one_of_four = bytes_held
    keeps = any(entry.kind is Kind.PARAMETER for entry in spec_of(name).entries(optimizer.param_groups[0]))
    assert (alone > 64 * 64) == keeps
    if keeps:
        assert one_of_four <= 0.26 * alone


@pytest.mark.parametrize("ranks", RANKS)
def test_the_layouts_are_what_they_are_called(ranks, kept):
    start = values(torch.float32)[0]
    for rank in range(ranks):
        kept.at(rank, ranks)
        place = Place(ranks)
        laid_out = {name: place(start[name], name) for name in LAYOUTS}
        for name, tensor in laid_out.items():
            parts = boxes_of(start[name], tensor)
            (local,) = local_tensors(tensor)
            assert torch.equal(local, parts[0]) if parts else local.numel() == 0
        assert whole_vectors(laid_out["even"]) and not whole_vectors(laid_out["uneven"])
        assert (local_tensors(laid_out["empty"])[0].numel() == 0) == (rank > 0)
        assert "_StridedShard" in repr(laid_out["strided"].placements)
        assert laid_out["grid"].device_mesh.ndim == 2


class Whole(torch.optim.SGD):
    """Needs the whole parameter."""

    def step(self, closure=None):
        raise NotImplementedError


def test_what_is_not_elementwise_is_refused_on_shards_and_let_through_on_plain(monkeypatch, kept):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    name = register(AlgorithmSpec(Whole, "Whole", elementwise=False, why_not="it looks at all of it")).name
    shardopt.keyed(name, {"w": torch.nn.Parameter(torch.zeros(4, 4))})
    sharded = {"w": torch.nn.Parameter(shard(torch.zeros(4, 4), kept.at(0, 2), *LAYOUTS["even"].placements))}
    with pytest.raises(AlgorithmError, match="w: found a sharded parameter under " + name) as caught:
        shardopt.keyed(name, sharded)
    assert spec_of(name).why_not in str(caught.value)


def differentiate(name, make):
    """The gradients of a function of a step, by the parameter before it and by the factor of its gradient."""
    generator = torch.Generator().manual_seed(5)
    start, factor = (torch.rand(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    parameter = start.clone()
    parameter.grad = factor * start
    make(parameter).step()
    return torch.autograd.grad(parameter.square().sum(), [start, factor])


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name in INFOS])
def test_a_step_on_plain_parameters_can_be_differentiated(name):
    options = {"lr": 0.1, "differentiable": True, "foreach": False}
    ours = differentiate(name, lambda tensor: shardopt.keyed(name, {"w": tensor}, **options))
    assert all(
        map(torch.equal, ours, differentiate(name, lambda tensor: getattr(torch.optim, name)([tensor], **options)))
    )


class CountedRate(float):
    """A learning rate that counts how often it is read; reading one on an accelerator would wait for it."""

    reads = 0

    def __float__(self):
        CountedRate.reads += 1
        return float.__float__(self)


@pytest.mark.parametrize("algorithm", [shardopt.optim.Lion, shardopt.optim.AdEMAMix, shardopt.optim.ScheduleFreeSGD])
def test_a_learning_rate_is_read_once_a_group(algorithm, monkeypatch):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    optimizer = algorithm([{"params": params[:3]}, {"params": params[3:]}], lr=CountedRate(0.1))
    for parameter in params:
        parameter.grad = torch.ones(2)
    monkeypatch.setattr(CountedRate, "reads", 0)
    optimizer.step()
    assert CountedRate.reads == 2
