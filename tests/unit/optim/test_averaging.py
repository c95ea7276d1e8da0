"""EMA and SWA in one process: torch's own averages bit for bit, swapped in and out, saved and loaded."""

import copy
import gc

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import shardopt
from shardopt import checkpoint
from shardopt.algorithms.elementwise.schedule_free import ScheduleFreeAdamW
from shardopt.errors import LayoutError, MismatchError, StateError
from shardopt.optim.averages import tensors as averaged_tensors
from tests.support.fake_rank import as_rank

KINDS = {
    "ema": (lambda model, **o: shardopt.EMA(model, 0.9, **o), get_ema_multi_avg_fn(0.9)),
    "swa": (shardopt.SWA, get_swa_multi_avg_fn()),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)
    return torch.nn.Sequential(*layers).to(dtype)


def batch(step):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def train(net, optimizer, steps, after_step=lambda: None):
    dtype = next(net.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        net(batch(step).to(dtype)).square().mean().backward()
        optimizer.step()
        after_step()


def sgd(net):
    return shardopt.keyed("sgd", net.named_parameters(), lr=0.1)


def averages(averaging):
    return {name: owned for name, entries in averaging.state_dict()["state"].items() for owned in entries.values()}


def values(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@every_kind
def test_averages_are_torchs_bit_for_bit(kind, dtype, use_buffers):
    net = model(dtype)
    make, torchs = KINDS[kind]
    # torch's SWA has no rule for the integers that batch norm counts with.
    theirs = AveragedModel(net, multi_avg_fn=torchs, use_buffers=use_buffers and kind == "ema")
    ours = make(net, use_buffers=use_buffers)
    optimizer = sgd(net)
    ours.attach(optimizer)
    train(net, optimizer, range(6), lambda: theirs.update_parameters(net))

    assert ours.n_averaged == int(theirs.n_averaged) == 6
    actual = averages(ours)
    assert actual.pop("__averaging") == 6
    compared = dict(theirs.module.named_parameters())
    if use_buffers and kind == "ema":
        compared |= {name: b for name, b in theirs.module.named_buffers() if b.is_floating_point()}
    for name, value in compared.items():
        assert torch.equal(actual[name], value), name
    assert not torch.equal(actual["2.weight"], net[2].weight)
    assert ("1.running_mean" in actual) == use_buffers


def test_complex_weights_are_averaged_as_torch_does():
    net = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))})
    theirs, ours = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)), shardopt.EMA(net, 0.9, torch.float32)
    for step in range(4):
        with torch.no_grad():
            net["w"] += step
        theirs.update_parameters(net)
        ours.update()
    assert torch.equal(averages(ours)["w"], theirs.module["w"])


def test_the_mean_of_buffers_and_the_last_of_what_cannot_be_averaged():
    net = model()
    net.register_buffer("positions", torch.arange(9))
    net.register_buffer("mask", torch.tensor([True, False]))
    swa = shardopt.SWA(net, use_buffers=True)
    seen = []
    train(net, sgd(net), range(3), lambda: (swa.update(), seen.append(net[1].running_mean.clone())))
    actual = averages(swa)
    torch.testing.assert_close(actual["1.running_mean"], torch.stack(seen).mean(0))
    assert actual["1.num_batches_tracked"] == 3
    assert torch.equal(actual["positions"], torch.arange(9))
    assert torch.equal(actual["mask"], torch.tensor([True, False]))


@every_kind
def test_fp32_averages_of_bf16_weights(kind, monkeypatch):
    """They are those of the same weights in fp32, in one bucket or in many."""
    net, twin = model(torch.bfloat16), model()
    ours, reference = KINDS[kind][0](net, dtype=torch.float32), KINDS[kind][0](twin)
    monkeypatch.setattr(averaged_tensors, "SCRATCH_BYTES", 50)

    def follow():
        twin.load_state_dict(net.state_dict())
        reference.update()
        ours.update()

    train(net, sgd(net), range(5), follow)
    assert {average.dtype for name, average in averages(ours).items() if name != "__averaging"} == {torch.float32}
    assert_equal(averages(ours), averages(reference))
    with ours.swap():
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, averages(reference)[name].bfloat16())


@every_kind
def test_swap_gives_the_averages_and_everything_back(kind):
    net = model()
    ours = KINDS[kind][0](net)
    optimizer = sgd(net)
    ours.attach(optimizer)
    train(net, optimizer, range(4))
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
        net[0].weight[0, 1] = -0.0
    own, means = values(net), averages(ours)
    means = {name: value.clone() for name, value in means.items()}
    memory = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}

    with ours.swap():
        assert ours.swapped
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, means[name])
        net(batch(9))  # in training mode: changes the buffers
        assert not torch.equal(net[1].running_mean, own["1.running_mean"])
    assert not ours.swapped
    assert {name: tensor.data_ptr() for name, tensor in net.state_dict().items()} == memory
    for name, tensor in net.state_dict().items():
        bits = torch.int64 if tensor.dtype == torch.int64 else torch.int32
        assert torch.equal(tensor.view(bits), own[name].view(bits)), name
    assert_equal(averages(ours), means)

    ours.swap()
    ours.swap()
    assert torch.equal(net[2].weight, own["2.weight"])


@every_kind
def test_before_the_first_update_the_averages_are_the_weights(tmp_path, kind):
    saved, into = model(), model(seed=1)
    checkpoint.save(tmp_path / "c", {"model": saved})
    averaging = KINDS[kind][0](into)
    checkpoint.load(tmp_path / "c", {"model": into, "ema": averaging}, strict=checkpoint.Strictness(missing="ignore"))
    with averaging.swap():
        assert_equal(values(into), values(saved))
    assert_equal(values(into), values(saved))
    assert averaging.n_averaged == 0


def test_training_continues_after_a_swap_as_if_there_was_none():
    results = []
    for swapping in (False, True):
        net = model()
        ema, optimizer = shardopt.EMA(net, 0.9), sgd(net)
        ema.attach(optimizer)
        train(net, optimizer, range(3))
        if swapping:
            with ema.swap():
                net(batch(7))
        train(net, optimizer, range(3, 6))
        results.append((values(net), averages(ema)))
    assert_equal(results[1][0], results[0][0])
    assert_equal(results[1][1], results[0][1])


@pytest.mark.parametrize("scaler_of", [shardopt.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])  # torch's kernels skip by themselves, in a step that the scaler calls
def test_a_step_that_a_scaler_skips_does_not_count(scaler_of, fused):
    net = model()
    ema, optimizer = shardopt.EMA(net), torch.optim.SGD(net.parameters(), lr=0.1, fused=True) if fused else sgd(net)
    ema.attach(optimizer)
    scaler = scaler_of("cpu")
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(net(batch(0)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert ema.n_averaged == 2


@pytest.mark.parametrize("place", ["around", "inside"])
def test_a_wrapped_optimizer_can_be_attached_at_either_end(place):
    net = model()
    ema, inner = shardopt.EMA(net, 0.5), sgd(net)
    outer = shardopt.GradientClippingOptimizer(inner, clipping=shardopt.GradientClipping.NORM)
    ema.attach(outer if place == "around" else inner)
    before = net[2].weight.detach().clone()
    train(net, outer, range(2))
    assert ema.n_averaged == 2 and not torch.equal(averages(ema)["2.weight"], before)


def test_weights_come_back_when_an_evaluation_fails():
    net = model()
    ema, own = shardopt.EMA(net), values(net)
    with pytest.raises(ZeroDivisionError), ema.swap():
        raise ZeroDivisionError
    assert_equal(values(net), own)


def test_attached_again_they_are_updated_once_in_a_step():
    net = model()
    optimizer, ema = sgd(net), shardopt.EMA(net)
    detach, again = ema.attach(optimizer), ema.attach(optimizer)
    copied = copy.deepcopy(ema)  # which is attached to nothing
    copied.attach(optimizer)
    train(net, optimizer, [0, 1])
    assert ema.n_averaged == copied.n_averaged == 2
    detach()
    again()
    train(net, optimizer, [2])
    assert (ema.n_averaged, copied.n_averaged) == (2, 3)


def test_while_swapped_nothing_is_trained_saved_or_loaded(tmp_path):
    net = model()
    ema, optimizer = shardopt.EMA(net), sgd(net)
    detach = ema.attach(optimizer)
    app = {"model": net, "ema": ema}
    checkpoint.save(tmp_path / "c", app)
    saved = ema.state_dict()
    with ema.swap():
        own = values(net)
        for refused in (
            ema.update,
            ema.state_dict,
            lambda: ema.load_state_dict(saved),
            lambda: ema.check_state_dict(saved),
            lambda: checkpoint.save(tmp_path / "d", app),
            lambda: checkpoint.load(tmp_path / "c", app),
            lambda: train(net, optimizer, [0]),
        ):
            with pytest.raises(StateError, match=r"swap\(\) to put them back"):
                refused()
            own |= {name: t for name, t in values(net).items() if name.startswith("1.")}  # training-mode statistics
            assert_equal(values(net), own)
    with ema.swap(), pytest.raises(StateError, match="do not nest"), ema.swap():
        pass
    assert not ema.swapped and ema.n_averaged == 0
    detach()
    train(net, optimizer, [0])
    assert ema.n_averaged == 0


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_torch_loads_within_a_swap_are_not_lost_silently(assign):
    net, other = model(), model(seed=1)
    ema, own, loaded = shardopt.EMA(net), values(net), {name: each.clone() for name, each in values(other).items()}
    refused = (
        r"would be lost[^\n]*\n  - 0\.weight: found values that were written [^;]*, and in \d others?[^;]*; .*"
        r"swap\(\) once more loses what was written"
    )
    with pytest.raises(StateError, match=refused), ema.swap():
        net.load_state_dict(loaded, assign=assign)
    assert ema.swapped
    assert_equal(values(net), loaded)
    ema.swap()
    assert not ema.swapped
    put_back = dict(net.named_buffers()) if assign else own  # what was assigned has taken the place of the parameters
    assert_equal(values(net), {**loaded, **put_back})


def test_an_error_within_a_swap_is_the_one_that_is_raised():
    net = model()
    ema, own = shardopt.EMA(net), values(net)
    with pytest.raises(ZeroDivisionError), ema.swap():
        with torch.no_grad():
            net[0].weight.zero_()
        raise ZeroDivisionError
    assert_equal(values(net), own)


@every_kind
def test_resumed_averages_continue_bit_for_bit(kind, tmp_path):
    def fresh(seed):
        net = model(seed=seed)
        optimizer = sgd(net)
        ours = KINDS[kind][0](net, use_buffers=True)
        ours.attach(optimizer)
        return net, optimizer, ours

    net, optimizer, ours = fresh(0)
    train(net, optimizer, range(4))
    checkpoint.save(tmp_path / "c", dict(model=net, optimizer=optimizer, averages=ours))
    train(net, optimizer, range(4, 8))

    other, its_optimizer, resumed = fresh(1)
    memory = {name: tensor.data_ptr() for name, tensor in averages(resumed).items()}
    checkpoint.load(tmp_path / "c", dict(model=other, optimizer=its_optimizer, averages=resumed))
    assert {name: tensor.data_ptr() for name, tensor in averages(resumed).items()} == memory
    train(other, its_optimizer, range(4, 8))
    assert resumed.n_averaged == 8
    assert_equal(averages(resumed), averages(ours))


def test_averages_without_a_count_are_not_overwritten_by_the_next_update(tmp_path):
    """The first update copies the weights; a count of 0 that was saved is one."""
    net = torch.nn.Linear(1, 1, bias=False)
    offered = {"state": {"weight": {"ema": torch.full((1, 1), 5.0)}}}
    torch.save({"model": net.state_dict(), "ema": offered}, tmp_path / "own.pt")

    def load(ema, **options):
        checkpoint.load(tmp_path / "own.pt", {"model": net, "ema": ema}, **options)

    lenient = checkpoint.Strictness(missing="ignore")
    for refused in (
        lambda ema: ema.load_state_dict(offered),
        lambda ema: ema.load_state_dict(offered, strict=False),
        load,
        lambda ema: load(ema, strict=lenient),
    ):
        with pytest.raises(
            MismatchError, match=r"__averaging.n_averaged: found averages without .* call update\(\) once"
        ):
            refused(shardopt.EMA(net, 0.5))
    for loaded in (lambda ema: ema.load_state_dict(offered, strict=False), lambda ema: load(ema, strict=lenient)):
        ema = shardopt.EMA(net, 0.5)
        ema.update()  # as the error says
        loaded(ema)
        torch.nn.init.ones_(net.weight)
        ema.update()
        assert ema.n_averaged == 2 and averages(ema)["weight"] == 3

    before = shardopt.EMA(net, 0.5)
    checkpoint.save(tmp_path / "before", {"model": net, "ema": before})
    again = shardopt.EMA(net, 0.5)
    checkpoint.load(tmp_path / "before", {"model": net, "ema": again})
    again.load_state_dict(before.state_dict())
    checkpoint.load(tmp_path / "before", {"model": net, "ema": again}, select=r"^model\.")
    assert again.n_averaged == 0


def test_what_does_not_fit_is_refused_whole():
    net = model()
    ema = shardopt.EMA(net, use_buffers=True)
    before = {name: value.clone() for name, value in averages(ema).items()}

    def state(other, **options):
        saved = ema_of(other, **options).state_dict()
        for entries in saved["state"].values():
            for value in entries.values():
                value += 1
        return saved

    def ema_of(other, kind=shardopt.EMA, **options):
        return kind(other, use_buffers=True, **options)

    wider = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    for offered, reported in (
        (state(net, kind=shardopt.SWA), "0.weight.ema: found nothing"),
        (state(net, kind=shardopt.SWA), "no such key"),
        (state(wider), r"0.weight.ema: found shape \(8, 5\)"),
        (state(net, dtype=torch.float64), "0.weight.ema: found dtype torch.float64"),
        ({"state": {}}, "__averaging: found nothing"),
        ({}, "as this averaging has one"),
    ):
        for call in (ema.load_state_dict, ema.check_state_dict):
            with pytest.raises(MismatchError, match=reported):
                call(offered)
            assert_equal(averages(ema), before)
    part = state(net)
    del part["state"]["0.weight"]
    reported = ema.load_state_dict(part, strict=False)
    assert reported.missing_keys == ["state.0.weight"] and not reported.unexpected_keys
    assert torch.equal(averages(ema)["0.bias"], before["0.bias"] + 1)
    ema.load_state_dict(state(net, dtype=torch.float64), convert_dtype=True)
    assert averages(ema)["0.weight"].dtype == torch.float32


def test_changes_of_the_model_are_noticed():
    net = model()
    ema = shardopt.EMA(net, 0.5)
    ema.update()
    net.double()  # the same parameters with other memory: averages keep their dtype
    with torch.no_grad():
        net[0].bias += 1
    ema.update()
    actual = averages(ema)["0.bias"]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), net[0].bias.detach() - 0.5)

    net[2].bias.data = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(StateError, match=r"2\.bias: found local shapes \[\(4,\)\]"):
        ema.update()
    assert ema.n_averaged == 2

    other = model()
    ema = shardopt.EMA(other)
    other[2].weight = torch.nn.Parameter(torch.zeros(3, 7))
    for call in (ema.swap, ema.update, ema.state_dict):
        with pytest.raises(StateError, match=r"2\.weight: found another parameter"):
            call()
    assert not ema.swapped and ema.n_averaged == 0
    other[2] = torch.nn.Linear(3, 7)  # a step does not walk through all modules; a save does
    with pytest.raises(StateError, match=r"2\.bias: found another parameter"):
        ema.state_dict()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves a model to a GPU")
def test_averages_follow_a_model_to_a_gpu_and_are_torchs_there():
    net = model()
    ema = shardopt.EMA(net, 0.9)
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    net.cuda()
    theirs.cuda()
    for _ in range(3):
        with torch.no_grad():
            net[0].weight += 1
        ema.update()
        theirs.update_parameters(net)
    assert averages(ema)["0.weight"].is_cuda
    assert torch.equal(averages(ema)["0.weight"], theirs.module[0].weight)


def test_buffers_that_were_replaced_are_found_again():
    net = model()
    ema = shardopt.EMA(net, 0.5, use_buffers=True)
    ema.update()
    net[1].running_mean = net[1].running_mean + 2
    ema.update()
    assert torch.equal(averages(ema)["1.running_mean"], torch.ones(7))
    with ema.swap():
        net[1].running_mean = torch.zeros(7)
    assert torch.equal(net[1].running_mean, torch.full((7,), 2.0))
    ema.swap()
    net[1].running_mean = torch.zeros(8)
    with pytest.raises(StateError, match=r"1\.running_mean"):
        ema.swap()


def test_names_are_without_those_of_wrappers(tmp_path):
    """So that activations may be checkpointed in the one run, and not in the next."""

    def trained(wrapped, seed):
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        net = torch.nn.Sequential(*map(checkpoint_wrapper, net)) if wrapped else net
        optimizer, ema = shardopt.keyed("adamw", net.named_parameters()), shardopt.EMA(net, use_buffers=True)
        ema.attach(optimizer)
        net(torch.rand(4, 2, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
        return {"model": net, "optimizer": optimizer, "ema": ema}

    saved, into = trained(True, 0), trained(False, 1)
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", into)
    assert (
        list(into["optimizer"].params)
        == list(saved["optimizer"].params)
        == ["0.weight", "0.bias", "1.weight", "1.bias"]
    )
    assert_equal(averages(into["ema"]), averages(saved["ema"]))
    with into["ema"].swap(), saved["ema"].swap():
        assert_equal(dict(into["model"].state_dict()), dict(saved["model"].state_dict()))


def test_tied_weights_are_averaged_once():
    net = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    net[1].weight = net[0].weight
    ema = shardopt.EMA(net)
    assert averages(ema).keys() == {"0.weight", "0.bias", "1.bias", "__averaging"}


def test_arguments_that_make_no_averages():
    with pytest.raises(StateError, match="decay"):
        shardopt.EMA(model(), decay=1.1)
    with pytest.raises(StateError, match="dtype"):
        shardopt.SWA(model(), dtype=torch.int32)
    with pytest.raises(LayoutError, match=r"weight.*lazy"):
        shardopt.EMA(torch.nn.LazyLinear(3))


def test_update_bn_is_torchs_in_one_process():
    ours, theirs = model(), model()
    loader = [(batch(step), step) for step in range(5)]
    ours.eval()
    theirs.eval()
    shardopt.optim.update_bn(loader, ours)
    torch.optim.swa_utils.update_bn(loader, theirs)
    assert_equal(values(ours), values(theirs))
    assert ours[1].num_batches_tracked == 5 and not ours.training


def test_the_statistics_of_the_averages_leave_with_them():
    net = model()
    swa, optimizer = shardopt.SWA(net), sgd(net)
    swa.attach(optimizer)
    train(net, optimizer, range(4))
    own = values(net)
    with swa.swap():
        shardopt.optim.update_bn([batch(step) for step in range(3)], net)
        assert net[1].num_batches_tracked == 3
    assert_equal(values(net), own)


@every_kind
def test_weights_are_not_loaded_into_the_place_of_averages(kind, tmp_path):
    net = model()
    ours = KINDS[kind][0](net)
    checkpoint.save(tmp_path / "c", {"model": net, "weights": net.state_dict()})
    with torch.no_grad():
        for weight in net.parameters():
            weight += 1
    own = values(net)
    other, only = model(), checkpoint.Strictness(unexpected="ignore")
    with ours.swap():
        of_averages = values(net)
        loads = [{"model": net}, {"weights": net.state_dict()}, {"weights": {"1.running_mean": net[1].running_mean}}]
        for app in loads:
            with pytest.raises(StateError, match=r"would be lost.*\n.*averages in the place of it"):
                checkpoint.load(tmp_path / "c", app, strict=only)
        with checkpoint.open(tmp_path / "c") as reader, pytest.raises(StateError, match="would be lost"):
            reader.read_into("weights.0.weight", net[0].weight)
        assert_equal(values(net), of_averages)
        checkpoint.load(tmp_path / "c", {"model": other}, strict=only)
    assert_equal(values(net), own)
    checkpoint.load(tmp_path / "c", {"model": net}, strict=only)
    assert_equal(values(net), values(other))


def test_masters_are_not_loaded_while_averages_stand_in_the_model(tmp_path):
    net = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    ema, optimizer = shardopt.EMA(net, 0.5), shardopt.keyed("sgd", net.named_parameters(), master_dtype=torch.float32)
    net(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", {"optimizer": optimizer})
    optimizer.step()
    state = optimizer.state_dict()["state"]["weight"]
    master = state["master"].clone()
    with ema.swap():
        with pytest.raises(MismatchError, match=r"nothing was changed.*\n.*averages in the place of it"):
            checkpoint.load(tmp_path / "c", {"optimizer": optimizer})
        with pytest.raises(StateError, match="would be lost"):
            optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(state["master"], master)
    checkpoint.load(tmp_path / "c", {"optimizer": optimizer})
    assert not torch.equal(state["master"], master)


def schedule_free(net, _):
    return shardopt.keyed("ScheduleFreeAdamW", net.named_parameters(), lr=0.01)


def of_two(net, _):
    groups = [{"match": "^2", "algorithm": "sgd", "lr": 0.1}]
    return shardopt.keyed("ScheduleFreeSGD", net.named_parameters(), lr=0.01, groups=groups)


def plain(net, _):
    return ScheduleFreeAdamW(net.parameters(), lr=0.01)


@pytest.mark.parametrize("made", [schedule_free, of_two, plain])
@every_kind
def test_the_mode_of_schedule_free_is_not_changed_while_averages_stand_in_the_model(made, kind):
    net = model()
    ours, optimizer = KINDS[kind][0](net), made(net, kind)
    train(net, optimizer, range(3), ours.update)
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    for before, change in (((), optimizer.eval), ((optimizer.eval,), optimizer.train)):
        for each in before:
            each()
        own = {name: p.detach().clone() for name, p in net.named_parameters()}
        with ours.swap():
            inside = {name: p.detach().clone() for name, p in net.named_parameters()}
            with pytest.raises(StateError, match="the mode cannot be changed"):
                change()
            assert all(torch.equal(p, inside[name]) for name, p in net.named_parameters())
            for again in before:
                again()  # the mode that there is
        assert all(torch.equal(p, own[name]) for name, p in net.named_parameters())
        change()  # the remedy


@pytest.mark.parametrize(
    ("algorithm", "option", "other", "same"),
    [("ScheduleFreeAdamW", "betas", (0.5, 0.999), (0.9, 0.5)), ("ScheduleFreeSGD", "momentum", 0.5, 0.9)],
)
def test_schedule_frees_own_beta_is_not_kept_over_that_of_saved_weights(algorithm, option, other, same):
    net = model()
    saved = shardopt.keyed(algorithm, net.named_parameters(), lr=0.01)
    train(net, saved, range(2))
    for value in (other, same):
        loaded = shardopt.keyed(algorithm, net.named_parameters(), lr=0.01, **{option: value})
        loaded.init_state()
        loaded.keep_options(option)
        if value is other:
            with pytest.raises(MismatchError, match=rf"{option}: found .*resume with {option}=.*0\.9"):
                loaded.load_state_dict(saved.state_dict())
        else:
            loaded.load_state_dict(saved.state_dict())
            assert loaded.param_groups[0][option] == value
    loaded = shardopt.keyed(algorithm, net.named_parameters(), lr=0.01, **{option: other})
    loaded.init_state()
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0][option] == saved.param_groups[0][option]


def test_averages_of_averages_are_refused_and_steps_within():
    net = model()
    ema, swa, optimizer = shardopt.EMA(net), shardopt.SWA(net), sgd(net)
    keyed = shardopt.keyed("sgd", net.named_parameters(), lr=0.1)
    train(net, optimizer, range(3), lambda: (ema.update(), swa.update()))
    own = values(net)
    with ema.swap():
        for refused, said in (
            (swa.swap, "averages cannot be put in the model"),
            (swa.update, "averages of other averages"),
            (keyed.step, "a step would train the averages"),
        ):
            with pytest.raises(StateError, match=said):
                refused()
    assert_equal(values(net), own)
    with swa.swap():
        assert swa.swapped
    keyed.step()
    swa.update()


def test_who_ships_averages_and_drops_the_rest_trains_on_from_them():
    net = model()
    ema, keyed = shardopt.EMA(net), shardopt.keyed("sgd", net.named_parameters(), lr=0.1)
    train(net, keyed, range(2), ema.update)
    ema.swap()
    with pytest.raises(StateError, match="a step would train"):
        keyed.step()
    del ema
    gc.collect()
    keyed.step()


def own_average(average, weight, n_averaged):
    return average + (weight - average) / (n_averaged + 2)


def own_averages(averages_, weights, n_averaged):
    torch._foreach_lerp_(averages_, weights, 1 / (float(n_averaged) + 2))


@pytest.mark.parametrize(
    "formula", [{"avg_fn": own_average}, {"multi_avg_fn": own_averages}], ids=["avg_fn", "multi_avg_fn"]
)
@pytest.mark.parametrize("kind", [shardopt.EMA, shardopt.SWA])
def test_a_formula_is_applied_as_torch_applies_it(kind, formula):
    net = model()
    theirs, ours = AveragedModel(net, **formula), kind(net, **formula, device="cpu")
    optimizer = sgd(net)
    ours.attach(optimizer)
    train(net, optimizer, range(5), lambda: theirs.update_parameters(net))
    actual = averages(ours)
    for name, value in theirs.module.named_parameters():
        assert torch.equal(actual[name], value), name
    assert not torch.equal(actual["2.weight"], net[2].weight)
    if kind is shardopt.EMA:
        assert not torch.equal(shardopt.EMA(net)._averages["0.weight"][0], actual["0.weight"])


def test_it_is_called_as_a_module_with_the_averages():
    net = model()
    ema, theirs = shardopt.EMA(net, 0.5), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(net)
    ema.attach(optimizer)
    train(net, optimizer, range(3), lambda: theirs.update_parameters(net))
    net.eval()
    theirs.eval()
    theirs.module.load_state_dict({**theirs.module.state_dict(), **dict(net.named_buffers())})
    before, own = values(net), net(batch(9))
    assert torch.equal(ema(batch(9)), theirs(batch(9))) and not torch.equal(own, theirs(batch(9)))
    assert not ema(batch(9)).requires_grad and not hasattr(ema, "module")
    assert_equal(values(net), before)
    with ema.swap():
        assert torch.equal(ema(batch(9)), theirs(batch(9))) and ema.swapped and ema.module is net
    with pytest.raises(AttributeError, match=r"with ema.swap\(\)"):
        ema.module.state_dict()
    with pytest.raises(RuntimeError):
        ema(torch.zeros(6, 4))  # the forward fails
    assert_equal(values(net), before)


def test_ramped_decays():
    net = model()
    decays = []

    def told(n):
        decays.append(shardopt.optim.ramped_decay(0.3, inv_gamma=2.0, power=0.75)(n))
        return decays[-1]

    ema = shardopt.EMA(net, told)
    wanted = None
    for _ in range(4):
        with torch.no_grad():
            net[0].weight += 1
        weight = net[0].weight.detach().clone()
        wanted = weight if wanted is None else wanted.lerp(weight, 1 - told(ema.n_averaged))
        ema.update()
    assert torch.equal(averages(ema)["0.weight"], wanted)
    assert decays[0] == pytest.approx(1 - 1.5**-0.75) and decays[-1] == 0.3 and decays == sorted(decays)
    simple = shardopt.optim.ramped_decay(0.5)
    assert [simple(n) for n in (1, 2, 100)] == [2 / 11, 3 / 12, 0.5]
    assert copy.deepcopy(simple) == simple
    for bad in ({"decay": 2.0}, {"inv_gamma": 0.0}, {"power": -1.0}):
        with pytest.raises(StateError, match=next(iter(bad))):
            shardopt.optim.ramped_decay(**bad)
    wrong = shardopt.EMA(net, lambda n: 2.0)
    wrong.update()
    before = {name: value.clone() for name, value in averages(wrong).items()}
    with pytest.raises(StateError, match="decay"):
        wrong.update()
    assert_equal(averages(wrong), before)


def test_formulas_that_contradict():
    for options in ({"avg_fn": own_average, "multi_avg_fn": own_averages}, {"decay": 0.9, "avg_fn": own_average}):
        with pytest.raises(StateError, match="averages cannot be made"):
            shardopt.EMA(model(), **options)


def normed():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def averaged_model():
    """torch's, over a few updates, and its model."""
    model = normed()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for scale in (1.0, 2.0, 3.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        theirs.update_parameters(model)
    return model, theirs


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_state_of_torchs_averages_loads(use_buffers):
    _, theirs = averaged_model()
    ours = shardopt.EMA(normed(), 0.5, use_buffers=use_buffers)
    ours.load_state_dict(theirs.state_dict())
    assert ours.n_averaged == 3
    for name, value in theirs.module.named_parameters():
        assert torch.equal(ours.state_dict()["state"][name]["ema"], value)
    ours.check_state_dict(theirs.state_dict())
    stranger = {**theirs.state_dict(), "module.other": torch.ones(1)}
    with pytest.raises(MismatchError, match=r"state\.other"):
        ours.load_state_dict(stranger)


def test_torchs_averages_in_a_checkpoint_load_by_their_names(tmp_path):
    model, theirs = averaged_model()
    checkpoint.save(tmp_path / "theirs", {"model": model, "ema": theirs})
    again = AveragedModel(normed())
    checkpoint.load(tmp_path / "theirs", {"model": normed(), "ema": again})
    for value, wanted in zip(again.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, wanted)
    torch.save({"model": model.state_dict(), "ema": theirs.state_dict()}, tmp_path / "theirs.pt")
    rename = {r"^ema\.module\.(.+)$": r"ema.state.\1.ema", r"^ema\.n_averaged$": "ema.state.__averaging.n_averaged"}
    buffers = r"^ema\..*(running_mean|running_var|num_batches_tracked)$"
    for url in (tmp_path / "theirs", tmp_path / "theirs.pt"):
        for options in ({}, {"skip": buffers}, {"rename": rename, "skip": buffers}, {"transactional": True}):
            ours = shardopt.EMA(normed(), 0.5)
            report = checkpoint.load(url, {"model": normed(), "ema": ours}, **options)
            assert ours.n_averaged == 3
            assert torch.equal(ours.state_dict()["state"]["0.weight"]["ema"], theirs.module[0].weight)
            assert report.renamed["ema.state.0.weight.ema"] == "ema.module.0.weight"
        with_buffers = shardopt.SWA(normed(), use_buffers=True)
        checkpoint.load(url, {"model": normed(), "ema": with_buffers})
        mean = with_buffers.state_dict()["state"]["1.running_mean"]["swa"]
        assert torch.equal(mean, theirs.module[1].running_mean)


def test_torchs_averages_of_another_model_are_refused_by_name(tmp_path):
    model, theirs = averaged_model()
    checkpoint.save(tmp_path / "theirs", {"model": model, "ema": theirs})
    larger = normed().append(torch.nn.Linear(1, 1))
    with pytest.raises(MismatchError, match=r"ema\.state\.3\.weight: found nothing"):
        checkpoint.load(
            tmp_path / "theirs", {"ema": shardopt.EMA(larger)}, strict=checkpoint.Strictness(unexpected="ignore")
        )
    smaller = normed()[:2]
    with pytest.raises(MismatchError, match=r"ema\.state\.2\.weight\.ema"):
        checkpoint.load(tmp_path / "theirs", {"model": model, "ema": shardopt.EMA(smaller)})


@pytest.mark.parametrize("call", [shardopt.EMA.state_dict, shardopt.EMA.swap])
def test_averages_of_a_model_that_has_grown_are_not_saved_without_the_new_layer(call):
    model = normed()
    ema = shardopt.EMA(model, 0.5)
    ema.update()
    state = ema.state_dict()
    model.append(torch.nn.Linear(1, 1))
    with pytest.raises(StateError, match=r"3\.weight: found another .*load_state_dict\(state, strict=False\)"):
        call(ema)
    grown = shardopt.EMA(model, 0.5)
    grown.load_state_dict(state, strict=False)
    assert grown.n_averaged == 1
    grown.update()
    assert torch.equal(grown.state_dict()["state"]["3.weight"]["ema"], model[3].weight)


def test_new_averages_replace_those_that_a_grown_model_has_left_and_no_others(tmp_path, caplog):
    model = normed()[:1]
    optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=0.1)
    old, another = shardopt.EMA(model, 0.5), shardopt.EMA(normed()[:1], 0.5)
    for each in (old, another):
        each.attach(optimizer)
    state = old.state_dict()
    model.append(torch.nn.Linear(4, 1))
    optimizer.add_param_group({"params": dict(model[1].named_parameters("1"))})
    new, slow = shardopt.EMA(model, 0.5), shardopt.EMA(model, 0.9)
    new.load_state_dict(state, strict=False)
    for each in (new, slow):
        each.attach(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert [each.n_averaged for each in (old, another, new, slow)] == [0, 1, 1, 1]
    checkpoint.save(tmp_path / "one", {"model": model, "optimizer": optimizer, "new": new, "slow": slow, "x": another})
    assert "not in the app" not in caplog.text


def test_the_average_of_a_weight_that_has_another_name_now_is_kept_by_its_key():
    model = normed()
    ema = shardopt.EMA(model, 0.5)
    ema.update()
    state = ema.state_dict()
    before = state["state"]["0.weight"]["ema"].clone()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    found = r"0\.weight: found it under the name '0\.weight_orig'; .*\[new\] = state\[\"state\"\]\.pop\(old\)"
    with pytest.raises(StateError, match=found):
        ema.state_dict()
    with torch.no_grad():
        model[0].weight_orig += 1
    ema = shardopt.EMA(model, 0.5)
    state["state"]["0.weight_orig"] = state["state"].pop("0.weight")
    ema.load_state_dict(state, strict=False)
    assert torch.equal(ema.state_dict()["state"]["0.weight_orig"]["ema"], before)


def test_torchs_calls_are_taken_or_refused_by_name():
    model = normed()
    ema = shardopt.EMA(model, 0.5)
    ema.update_parameters(torch.nn.Sequential(model))
    assert ema.n_averaged == 1
    with pytest.raises(StateError, match=r"model: found a model with other parameters; .* EMA\(model\) of this one"):
        ema.update_parameters(normed())
    batches = [torch.randn(8, 3), torch.randn(8, 3)]
    before = model[1].running_mean.clone()
    for update in (torch.optim.swa_utils.update_bn, shardopt.optim.update_bn):
        with pytest.raises(
            StateError, match=r"EMA: found averages beside a model; .*shardopt.optim.update_bn\(loader, model\)"
        ):
            update(batches, ema)
    assert torch.equal(model[1].running_mean, before) and model.training
    with ema.swap():
        shardopt.optim.update_bn(batches, ema)
        by_averages = model[1].running_mean.clone()
        shardopt.optim.update_bn(batches, model)
        assert torch.equal(model[1].running_mean, by_averages) and not torch.equal(by_averages, before)


def test_tables_whose_rows_are_this_ranks_have_no_averages():
    """As torchrec's, whose class is known by its name."""
    kind = type("TableBatchedEmbeddingSlice", (torch.nn.Parameter,), {"__module__": "torchrec.distributed.composable"})
    model = torch.nn.ModuleDict({"over": torch.nn.Linear(2, 2), "tables": torch.nn.Module()})
    model["tables"].weight = torch.nn.Parameter(torch.zeros(2, 2))
    model["tables"]._parameters["weight"] = torch.Tensor._make_subclass(kind, torch.zeros(2, 2), True)
    shardopt.EMA(model, decay=0.9)
    with as_rank(0, 2):
        with pytest.raises(StateError, match=r"tables\.weight: .* make averages of the dense modules"):
            shardopt.EMA(model, decay=0.9)
        shardopt.EMA(model["over"], decay=0.9)


def test_averages_of_another_decay_go_on_where_the_model_only_got_more():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow, alike = shardopt.EMA(model, 0.99), shardopt.EMA(model, 0.9)
    model.append(torch.nn.Linear(2, 2))
    fast = shardopt.EMA(model, 0.9)
    for each in (slow, alike, fast):
        each.attach(optimizer)
    fast.attach(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [each.n_averaged for each in (slow, alike, fast)] == [1, 0, 1]
