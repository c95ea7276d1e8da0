"""Published weights from an accelerator, and followers on it and beside it."""

import shutil
import tempfile
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule
from tests.accelerator.support import CopiesToHost, each_kind, needs_standin, on_accelerator
from tests.support.in_bits import by_hand

SHAPES = {"wide": (700, 300), "deep": (3, 90, 110), "small": (12,), "table": (90_000, 2)}


def followed(accelerator):
    """Publishes a few steps from the device; returns what followers in several kinds of memory have otherwise."""
    device = torch.device(accelerator.KIND, 0)
    folder, wrong = tempfile.mkdtemp(), []
    weights = {name: torch.randn(shape).bfloat16().to(device) for name, shape in SHAPES.items()}
    apps = {
        "device": {name: torch.zeros_like(each) for name, each in weights.items()},
        "cpu": {name: torch.zeros(each.shape, dtype=each.dtype, device="cpu") for name, each in weights.items()},
        "columns": {
            name: torch.zeros(*each.shape[:-1], 2 * each.shape[-1], dtype=each.dtype, device=device)[..., ::2]
            for name, each in weights.items()
        },
        "fp32": {name: torch.zeros(each.shape, device=device) for name, each in weights.items()},
    }
    followers = {
        name: checkpoint.Follower(folder, app, strict=checkpoint.Strictness(dtype="cast")) for name, app in apps.items()
    }
    try:
        with checkpoint.Publisher(folder, anchor_every=3, durable=False) as publisher:
            for step in range(1, 7):
                for each in weights.values():
                    flat = each.view(-1)
                    flat[torch.randint(0, flat.numel(), (max(flat.numel() // 50, 1),)).to(device)] += 1
                pending = publisher.publish(step, weights)
                published = {name: each.cpu().clone() for name, each in weights.items()}
                for each in weights.values():
                    each.add_(1)  # training goes on; then it is taken back, for the next step
                pending.result()
                for each in weights.values():
                    each.sub_(1)
                for each, was in zip(weights.values(), published.values(), strict=True):
                    each.copy_(was)
                for name, follower in followers.items():
                    if name == "columns" and step in (2, 5):  # it misses some
                        continue
                    report = follower.update()
                    if report.step != step or (step > 3 and report.whole > 1):  # one is too small for deltas
                        wrong.append((name, step, report.whole))
                    wrong += [
                        (name, step, key)
                        for key, each in apps[name].items()
                        if not torch.equal(each.cpu(), published[key].to(each.dtype))
                    ]
        return wrong
    finally:
        shutil.rmtree(folder)


def served(accelerator):
    """Computes within `serving`, on another stream than the update's, and waits for none; returns what is otherwise."""
    device = torch.device(accelerator.KIND, 0)
    module, folder = torch.get_device_module(device), tempfile.mkdtemp()
    app = {name: torch.zeros(64, 64, device=device) for name in ("a", "b")}
    computed = {name: torch.zeros_like(each) for name, each in app.items()}
    try:
        with checkpoint.Publisher(folder, durable=False) as publisher:
            follower = checkpoint.Follower(folder, app)
            for step in (1, 2):
                publisher.publish(step, {name: torch.full((64, 64), float(step)) for name in app}).result()
                if step == 1:
                    follower.update()
                    stream = module.Stream(device)
                    stream.wait_stream(module.current_stream(device))
                    accelerator.C.side(True)
                    with follower.serving(), module.stream(stream):
                        for name, each in app.items():
                            computed[name].add_(each)
            follower.update()
            stream.synchronize()
            accelerator.C.side(False)
            return [(name, "served") for name, each in computed.items() if not (each.cpu() == 1).all()]
    finally:
        shutil.rmtree(folder)


def followed_and_served(accelerator):
    return followed(accelerator) + served(accelerator)


@each_kind
def test_weights_of_a_device_are_published_and_followed(kind):
    assert on_accelerator(1, followed_and_served, kind=kind) == [[]]


def copied_by_updates(accelerator):
    """Updates weights, one of which somebody else has changed; returns what is copied to the host, by app and step."""
    device = torch.device(accelerator.KIND, 0)
    folder, found = tempfile.mkdtemp(), {}
    weights = {name: torch.randn(900, 600).bfloat16().to(device) for name in ("a", "b")}
    apps = {
        "same": {name: torch.zeros_like(each) for name, each in weights.items()},
        "fp32": {name: torch.zeros(each.shape, device=device) for name, each in weights.items()},
        "columns": {name: torch.zeros(900, 1200, dtype=each.dtype, device=device) for name, each in weights.items()},
    }
    apps["columns"] = {name: each[:, ::2] for name, each in apps["columns"].items()}
    strict = checkpoint.Strictness(dtype="cast")
    followers = {name: checkpoint.Follower(folder, app, strict=strict) for name, app in apps.items()}
    try:
        with checkpoint.Publisher(folder, durable=False) as publisher:
            for step in range(3):
                for each in weights.values():
                    each[step::50] *= 2
                publisher.publish(step, weights).result()
                for name, follower in followers.items():
                    apps[name]["b"][7, -1] += step == 2
                    with CopiesToHost() as copies:
                        report = follower.update()
                    right = all(torch.equal(apps[name][key], weights[key].to(apps[name][key].dtype)) for key in weights)
                    found[name, step] = (right, report.whole, len(copies.sizes), sum(copies.sizes))
        return found
    finally:
        shutil.rmtree(folder)


@each_kind
def test_weights_are_known_again_without_a_copy_of_them(kind):
    (found,) = on_accelerator(1, copied_by_updates, kind=kind)
    hashed_after, hashed_before_too = (2, 16), (4, 32)  # of two weights, 8 bytes for each 4 MiB
    for name in ("same", "fp32", "columns"):
        assert found[name, 0] == (True, 2, *hashed_after)
        assert found[name, 1] == (True, 0, *hashed_before_too)
        assert found[name, 2] == (True, 1, *hashed_before_too)


RULES = [
    Rule("qk", ("q", "k"), "q+k i -> q i, k i", {"q": 400}),
    Rule("rotary", "rotary", "(h half two) i -> (h two half) i", {"h": 5, "two": 2}),
    Rule("up", "up", "i o -> o i"),
    Rule("experts", "experts.{e}", "e i o -> o i"),
    Rule("table", "table", "v i -> v+_more i", {"_more": 100}),
]


def rearranged_by_hand(weights):
    whole = {name: each.cpu().clone() for name, each in weights.items()}
    made = {"q": whole["qk"][:400], "k": whole["qk"][400:], "up": whole["up"].t()}
    made["rotary"] = whole["rotary"].reshape(5, 50, 2, 90).transpose(1, 2).reshape(500, 90)
    made |= {f"experts.{e}": whole["experts"][e].t() for e in range(3)}
    made["table"] = torch.cat([whole["table"], torch.zeros(100, 20, dtype=torch.bfloat16, device="cpu")])
    return {name: each.contiguous() for name, each in made.items()}


def rearranged(accelerator):
    """Publishes by rules from the device, whose weights change right after each call; returns what is otherwise."""
    device = torch.device(accelerator.KIND, 0)
    folder, wrong = tempfile.mkdtemp(), []
    shapes = {"qk": (700, 90), "rotary": (500, 90), "up": (300, 200), "experts": (3, 90, 110), "table": (900, 20)}
    weights = {name: torch.randn(shape).bfloat16().to(device) for name, shape in shapes.items()}
    app = {name: torch.zeros_like(each) for name, each in rearranged_by_hand(weights).items()}
    follower, memory = checkpoint.Follower(folder, app), torch.get_device_module(device)
    try:
        with checkpoint.Publisher(folder, rearrange=RULES, durable=False) as publisher:
            before = memory.memory_allocated()
            publisher.publish(0, weights).result()
            peak = memory.max_memory_allocated() - before
            if peak > max(each.nbytes for each in weights.values()) + 4096:  # a GPU copies columns by way of rows
                wrong.append(f"{peak} bytes of the device")
            for step in range(1, 5):
                expected = rearranged_by_hand(weights)
                pending = publisher.publish(step, weights)
                for each in weights.values():
                    flat = each.view(-1)
                    flat[torch.randint(0, flat.numel(), (flat.numel() // 50,)).to(device)] += 1
                pending.result()
                report = follower.update()
                if report.step != step or (step > 1 and report.whole):
                    wrong.append((step, report.whole))
                wrong += [(step, name) for name, each in app.items() if not torch.equal(each, expected[name])]
        return wrong
    finally:
        shutil.rmtree(folder)


@each_kind
def test_weights_of_a_device_are_published_in_another_arrangement(kind):
    assert on_accelerator(1, rearranged, kind=kind) == [[]]


def in_bits(accelerator, folder):
    """Publishes tables from devices in fewer bits, cut by columns and by rows; returns what is otherwise."""
    kind, wrong = accelerator.KIND, []
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    whole = {name: torch.randn(200, 10, generator=torch.Generator().manual_seed(7)) for name in ("a", "b", "half")}
    cuts = {"a": Shard(1), "b": Shard(0), "half": Shard(1)}
    with checkpoint.Publisher(folder, dtype={"half": torch.float16, "": "int8_rows"}, durable=False) as publisher:
        for step in range(1, 4):
            for each in whole.values():
                each[step::20] *= step
            on_device = {
                name: distribute_tensor(each.to(kind), mesh, [cuts[name]], src_data_rank=None)
                for name, each in whole.items()
            }
            publisher.publish(step, on_device).result()
            expected = by_hand("a", whole["a"]) | by_hand("b", whole["b"]) | {"half": whole["half"].half()}
            app = {name: torch.zeros_like(each, device="cpu") for name, each in expected.items()}
            checkpoint.load(f"{folder}/step-{step:08d}", app)
            wrong += [(step, name) for name, each in app.items() if not torch.equal(each, expected[name])]
    return wrong


@each_kind
def test_tables_of_devices_are_published_in_fewer_bits(kind, tmp_path):
    assert on_accelerator(2, in_bits, str(tmp_path), kind=kind) == [[], []]


def contexts_of_a_thread(standin):
    """Follows in a new thread, into weights on the second device."""
    device = torch.device("standin", 1)
    standin.C.set_device(1)
    folder, seen = tempfile.mkdtemp(), []
    app = {"a": torch.zeros(300, 300, device=device)}
    with torch.inference_mode():
        made = {name: torch.zeros_like(each) for name, each in app.items()}
    with checkpoint.Publisher(folder, durable=False) as publisher:
        publisher.publish(1, {"a": torch.ones(300, 300)}).result()
        for each in (app, made):
            follower = checkpoint.Follower(folder, each)
            standin.C.reset()
            thread = threading.Thread(target=follower.update)
            thread.start()
            thread.join()
            seen.append((standin.C.contexts(), [bool((tensor == 1).all()) for tensor in each.values()]))
    shutil.rmtree(folder)
    return seen


@needs_standin
def test_an_update_in_a_thread_makes_no_context_on_another_device():
    assert on_accelerator(1, contexts_of_a_thread) == [[({1}, [True])] * 2]
