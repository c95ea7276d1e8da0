"""Saves that refer to what an earlier one has: one process; ranks are in tests/distributed/test_incremental.py."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import SEGMENT_BYTES, seal
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import encode_manifest
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import LocalStorage, storage_of
from shardopt.cli import main
from shardopt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    MismatchError,
    OptionError,
    StateError,
)
from tests.harness import Fault
from tests.harness.faults import watched

ROWS = SEGMENT_BYTES // 1024  # of 1 KiB each: a segment


def table(segments):
    return torch.arange(segments * ROWS * 256, dtype=torch.int32).reshape(-1, 256)


def app_of(step, segments=8):
    rows = table(segments)
    begin = ROWS * (step % segments)
    rows[begin : begin + ROWS] += step  # a whole segment: of a few elements a delta would be written
    return {"frozen": torch.arange(300_000.0), "table": rows, "adapter": torch.full((7, 5), float(step)), "step": step}


def save(root, step, base=None, app=None, **options):
    path = root / f"step-{step:08d}"
    base = None if base is None else root / f"step-{base:08d}"
    return checkpoint.save(path, app or app_of(step), base=base, durable=False, **options)


def manifest_of(root, step):
    return read_manifest(LocalStorage(str(root / f"step-{step:08d}")))[0]


def directories(manifest):
    return {file.directory for file in manifest.referred_files}


def is_as_saved(path, app):
    checkpoint.verify(path).raise_if_damaged()
    target = {name: torch.zeros_like(each) if torch.is_tensor(each) else None for name, each in app.items()}
    checkpoint.load(path, target)
    for name, value in app.items():
        same = torch.equal(target[name], value) if torch.is_tensor(value) else target[name] == value
        assert same, name
    return True


def test_what_did_not_change_is_not_written(tmp_path):
    first = save(tmp_path, 1)
    second = save(tmp_path, 2, base=1)
    assert first.bytes_unchanged == 0
    assert second.bytes_unchanged == 4 * 300_000 + (8 - 2) * SEGMENT_BYTES  # the row of step 1, and that of step 2
    assert second.bytes_total == second.bytes_written < 2 * SEGMENT_BYTES + (16 << 10)
    assert is_as_saved(tmp_path / "step-00000002", app_of(2))
    (own,) = (tmp_path / "step-00000002").glob("*.safetensors")
    with safe_open(own, "pt") as opened:
        keys = {key for key in opened.keys() if not key.startswith("__xxh3__")}  # noqa: SIM118  # no dict
        assert keys == {"adapter", f"__rows__.{ROWS}.table"}
        assert torch.equal(opened.get_tensor(f"__rows__.{ROWS}.table"), app_of(2)["table"][ROWS : 3 * ROWS])


def test_all_that_is_the_same_needs_no_file(tmp_path):
    app = {"a": torch.ones(5), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "tied": torch.ones(3)}
    app["again"] = app["tied"]
    for step in (1, 2, 3):
        save(tmp_path, step, base=step - 1 or None, app=app)
    assert [each.name for each in (tmp_path / "step-00000003").iterdir()] == ["manifest.json"]
    assert is_as_saved(tmp_path / "step-00000003", app)


def test_a_run_of_fifty_saves_writes_its_adapters(tmp_path):
    """The first holds everything; every later one refers to that, and to none between."""
    frozen = {f"layers.{i}": torch.randn(200, 200) for i in range(20)}
    adapters = {f"lora.{i}": torch.randn(16, 200 * 4) for i in range(20)}
    nbytes = sum(each.nbytes for each in adapters.values())
    with checkpoint.Manager(tmp_path, keep=2, incremental=True) as manager:
        written = []
        for step in range(1, 51):
            for each in adapters.values():
                each += 1.0
            written.append(manager.save(step, {**frozen, **adapters}).bytes_total)
            manifest = manifest_of(tmp_path, step)
            assert directories(manifest) == (set() if step == 1 else {"step-00000001"})
            assert all((tmp_path / "x" / file.path).resolve().exists() for file in manifest.referred_files)
        assert manager.steps() == [49, 50]
        assert is_as_saved(manager.path(50), {**frozen, **adapters})
    assert sum(written[1:]) <= 1.1 * 49 * nbytes
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"step-{i:08d}" for i in (1, 49, 50)]
    assert not (tmp_path / "step-00000001" / "manifest.json").exists()


def test_changes_that_wander_over_a_table_stay_bounded(tmp_path):
    """Every save changes other rows: references stay one step deep, boxes few, and the disk holds little more."""
    app = {"table": table(40)}
    with checkpoint.Manager(tmp_path, keep=1, incremental=True) as manager:
        for step in range(1, 51):
            app["table"][(step * 7 * ROWS + step) % len(app["table"])] += 1
            manager.save(step, app)
            manifest = manifest_of(tmp_path, step)
            assert len(manifest.tensors["table"].layout.boxes) <= 64
            for file in manifest.referred_files:  # the save that wrote it, which holds it
                assert (tmp_path / file.directory / file.name).exists()
        assert is_as_saved(manager.path(50), app)
    held = sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors"))
    assert held <= 4 * app["table"].nbytes


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    columns=st.sampled_from([None, 1, 60, 64, 3 * 2**14, 5 * 2**16 + 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex128]),
    changes=st.lists(st.lists(st.floats(0, 1, exclude_max=True), max_size=3), min_size=1, max_size=4),
)
def test_whatever_changes_is_saved(tmp_path, columns, dtype, changes):
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    numel = 1_100_000 // dtype.itemsize * 2
    shape = (numel,) if columns is None else (max(numel // columns, 2), columns)
    app = {"x": torch.arange(shape[0] * (columns or 1)).to(dtype).reshape(shape), "step": 0}
    save(root, 0, app=app)
    for step, places in enumerate(changes, 1):
        for place in places:
            app["x"][int(place * shape[0])] += 3
        app["step"] = step
        save(root, step, base=step - 1, app=app)
        with checkpoint.open(root / f"step-{step:08d}") as reader:
            assert torch.equal(reader.read("x"), app["x"])
            middle = checkpoint.Box((shape[0] // 3, *([0] * (len(shape) - 1))), (shape[0] // 3, *shape[1:]))
            assert torch.equal(reader.read("x", middle), app["x"][shape[0] // 3 :][: shape[0] // 3])
    assert is_as_saved(root / f"step-{len(changes):08d}", app)
    shutil.rmtree(root)
    root.mkdir()


def test_another_dtype_name_or_shape_is_written(tmp_path):
    save(tmp_path, 1, app={"a": torch.zeros(10), "b": torch.zeros(10), "c": torch.zeros(10, 1)})
    app = {"a": torch.zeros(10, dtype=torch.int32), "renamed": torch.zeros(10), "c": torch.zeros(10)}
    assert save(tmp_path, 2, base=1, app=app).bytes_unchanged == 0
    assert is_as_saved(tmp_path / "step-00000002", app)
    grown = {"a": torch.cat([torch.arange(8.0 * SEGMENT_BYTES), torch.ones(5)])}
    save(tmp_path, 3, app={"a": grown["a"][:-5].clone()})
    assert save(tmp_path, 4, base=3, app=grown).bytes_unchanged == 4 * 8 * SEGMENT_BYTES
    assert is_as_saved(tmp_path / "step-00000004", grown)


def test_a_file_of_which_little_is_current_is_not_kept_for_it(tmp_path):
    app = {"constant": torch.ones(100), "weights": torch.zeros(100_000)}
    save(tmp_path, 1, app=app)
    app["weights"] += 1
    assert save(tmp_path, 2, base=1, app=app).bytes_unchanged == 0


def test_a_whole_one_is_made_by_reshard(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, base=1)
    checkpoint.reshard(tmp_path / "step-00000002", tmp_path / "whole", world_size=2)
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"step-{step:08d}")
    assert is_as_saved(tmp_path / "whole", app_of(2))


def test_a_checkpoint_that_was_moved_is_read_where_its_root_is_named(tmp_path):
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2, base=1)
    moved = tmp_path / "elsewhere" / "it"
    shutil.move(tmp_path / "run" / "step-00000002", moved)
    with pytest.raises(CorruptionError, match="base_root="):
        checkpoint.load(moved, app_of(0))
    assert not checkpoint.verify(moved).ok
    root = tmp_path / "run"
    assert checkpoint.verify(moved, base_root=root).ok
    app = app_of(0)
    checkpoint.load(moved, app, base_root=root)
    assert torch.equal(app["table"], app_of(2)["table"])
    with checkpoint.open(moved, base_root=root) as reader:
        assert torch.equal(reader.read("frozen"), app["frozen"])
    checkpoint.reshard(moved, tmp_path / "whole", world_size=1, base_root=root)
    assert is_as_saved(tmp_path / "whole", app_of(2))


def test_a_link_outside_the_root_finds_what_its_checkpoint_refers_to(tmp_path):
    """`ls` and `verify` used to call it damaged."""
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2, base=1)
    for link, target in (("latest", "run/step-00000002"), ("current", "latest"), ("moved", "run")):
        (tmp_path / link).symlink_to(target)
    for path in ("latest", "current", "moved/step-00000002"):
        assert is_as_saved(tmp_path / path, app_of(2))
        assert checkpoint.verify(tmp_path / path).ok
        assert main(["ls", str(tmp_path / path)]) == 0
    # Beside the link it counts first: there a root may have steps that lie in an archive.
    (tmp_path / "step-00000001").mkdir()
    for file in (tmp_path / "run" / "step-00000001").glob("*.safetensors"):
        (tmp_path / "step-00000001" / file.name).write_bytes(b"x")
    assert not checkpoint.verify(tmp_path / "latest").ok


def test_a_base_that_is_a_link_gives_only_what_lies_beside_it(tmp_path, caplog):
    """What lay beside its target only was referred to, and no save could be committed."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    save(root, 1)
    save(root, 2, base=1)
    root.rename(archive)
    root.mkdir()
    (root / "step-00000002").symlink_to(archive / "step-00000002")
    assert save(root, 3, base=2).bytes_unchanged == SEGMENT_BYTES  # the row of step 2
    assert "is written again" in caplog.text and is_as_saved(root / "step-00000003", app_of(3))
    (root / "step-00000001").symlink_to(archive / "step-00000001")
    assert save(root, 4, base=2).bytes_unchanged > 4 * 300_000


@pytest.mark.parametrize(
    "path",
    [
        "../../run/step-1/{}",
        "/run/step-1/{}",
        "../../{}",
        "../step-1/../x/{}",
        ".././{}",
        "../.hidden/{}",
        "..//{}",
        "../a\\b/{}",
        "../step-1/other.txt",
        "step-1/{}",
        "s3://bucket/step-1/{}",
        "../s*/{}",
    ],
)
def test_a_reference_that_leads_elsewhere_is_refused(tmp_path, path):
    save(tmp_path, 1)
    save(tmp_path, 2, base=1)
    manifest = manifest_of(tmp_path, 2)
    data = encode_manifest(manifest)
    (referred,) = manifest.referred_files
    body = json.loads(data)
    elsewhere = path.format(referred.name)
    body["files"] = [[elsewhere if name == referred.path else name, *rest] for name, *rest in body["files"]]
    del body["xxh3"]
    with pytest.raises(CorruptionError, match="malformed"):
        decode_manifest(seal(json.dumps(body)[:-1].encode()), "m")


def test_a_reader_of_version_3_is_told_and_one_of_references_is_needed_for_them_alone(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2, base=1)
    monkeypatch.setattr("shardopt.checkpoint.format.decoding.FORMAT_VERSION", 3)
    checkpoint.open(tmp_path / "step-00000001")
    with pytest.raises(FormatError, match="newer"):
        checkpoint.open(tmp_path / "step-00000002")


def test_what_is_no_base_is_refused(tmp_path):
    save(tmp_path / "run", 1)
    with pytest.raises(OptionError, match="beside"):
        checkpoint.save(tmp_path / "other" / "a", {"x": 1}, base=tmp_path / "run" / "step-00000001")
    with pytest.raises(CheckpointNotFoundError):
        save(tmp_path / "run", 3, base=2)
    (tmp_path / "run" / "größe").mkdir()
    with pytest.raises(OptionError, match="ASCII"):
        checkpoint.save(tmp_path / "run" / "a", {"x": 1}, base=tmp_path / "run" / "größe")
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["größe", "step-00000001"]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def data_file(root, step):
    (file,) = (root / f"step-{step:08d}").glob("*.safetensors")
    return file


@pytest.mark.parametrize("damage", ["header", "checksums", "short", "gone"])
def test_nothing_is_referred_to_in_a_file_that_is_not_as_it_was_written(tmp_path, damage):
    save(tmp_path, 1)
    file = data_file(tmp_path, 1)
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        flip(file, 100 if damage == "header" else -1)
    report = save(tmp_path, 2, base=1)
    assert report.bytes_unchanged == 0
    assert is_as_saved(tmp_path / "step-00000002", app_of(2))


def test_damage_in_what_is_referred_to_is_found(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, base=1)
    flip(data_file(tmp_path, 1), -100_000)  # within the table
    flip(data_file(tmp_path, 1), 5000)  # and at its begin
    report = checkpoint.verify(tmp_path / "step-00000002")
    assert len(report.problems) == 2 and all("step-00000001" in each.key for each in report.problems)
    with pytest.raises(CorruptionError, match="step-00000001"):
        checkpoint.load(tmp_path / "step-00000002", app_of(0))


def test_a_base_without_manifest_or_with_a_damaged_one_makes_a_manager_save_all(tmp_path):
    for damage in ("gone", "damaged"):
        root = tmp_path / damage
        with checkpoint.Manager(root, incremental=True) as manager:
            manager.save(1, app_of(1))
            manifest = root / "step-00000001" / "manifest.json"
            manifest.unlink() if damage == "gone" else flip(manifest, 50)
            assert manager.save(2, app_of(2)).bytes_unchanged == 0
            assert manager.save(3, app_of(3)).bytes_unchanged > 0
            assert is_as_saved(manager.path(3), app_of(3))


def test_files_stay_as_long_as_something_refers_to_them(tmp_path):
    with checkpoint.Manager(tmp_path, keep=1, incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, app_of(step))
            assert manager.steps() == [step]
            assert is_as_saved(manager.path(step), app_of(step))
        assert (tmp_path / "step-00000001").is_dir()
        manager.save(4, {"other": torch.ones(3)})
        assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]


def test_a_checkpoint_is_removed_but_for_what_others_refer_to(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, base=step - 1 or None)
    for step in (1, 2):
        remove_checkpoint(LocalStorage(str(tmp_path / f"step-{step:08d}")))
        assert not (tmp_path / f"step-{step:08d}" / "manifest.json").exists()
        assert is_as_saved(tmp_path / "step-00000003", app_of(3))
    # Saved once more into what is left of it, and given up, or committed: that stays where it is.
    with watched([Fault(0, "os:link", action="ENOSPC")], []), pytest.raises(Exception, match="space"):
        save(tmp_path, 1)
    save(tmp_path, 1)
    assert len(list((tmp_path / "step-00000001").glob("*.safetensors"))) == 2
    assert checkpoint.verify(tmp_path / "step-00000001").remains == ()
    assert is_as_saved(tmp_path / "step-00000003", app_of(3))
    for step in (1, 2, 3):
        remove_checkpoint(LocalStorage(str(tmp_path / f"step-{step:08d}")))
    remove_checkpoint(LocalStorage(str(tmp_path / "step-00000001")))
    remove_checkpoint(LocalStorage(str(tmp_path / "step-00000002")))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_removed_where_a_manifest_cannot_be_read(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, base=1)
    with watched([Fault(0, "os:stat", at=2, times=1000, action="EIO")], []), pytest.raises(CorruptionError):
        remove_checkpoint(LocalStorage(str(tmp_path / "step-00000001")))
    assert is_as_saved(tmp_path / "step-00000002", app_of(2))


def test_a_run_that_was_taken_back_keeps_what_is_abandoned_whole(tmp_path):
    with checkpoint.Manager(tmp_path, keep=2, incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, app_of(step))
        app = app_of(0)
        assert manager.restore(app, step=2) == 2
        for step in (3, 4, 5):
            assert manager.save(step, app_of(step)).bytes_unchanged > 0
        assert manager.abandoned_steps() == {0: [3]}
    for path in tmp_path.glob("*/manifest.json"):
        assert checkpoint.verify(path.parent).ok
    with checkpoint.Manager(tmp_path, keep=2, incremental=True) as manager:
        assert manager.restore(app) == 5
        assert manager.save(6, app_of(6)).bytes_unchanged > 0
        assert is_as_saved(manager.path(6), app_of(6))


@pytest.mark.parametrize("stage", ["now", "lazy"])
def test_saves_in_the_background_refer_too(tmp_path, stage):
    model = torch.nn.Linear(300, 300)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.Adam([model.bias])
    with checkpoint.Manager(tmp_path, keep=1, incremental=True, stage=stage) as manager:
        for step in range(1, 6):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            pending = manager.save(step, {"model": model, "step": step})
        report = pending.result()
        assert report.bytes_unchanged == model.weight.nbytes and report.bytes_total < 20_000
        with checkpoint.open(manager.path(5)) as reader:
            assert torch.equal(reader.read("model.weight"), model.weight)
            assert torch.equal(reader.read("model.bias"), model.bias)


def test_copies_refer_to_copies(tmp_path):
    local, mirror = tmp_path / "local", tmp_path / "mirror"
    with checkpoint.Manager(local, keep=1, incremental=True, destinations=[checkpoint.Mirror(mirror)]) as manager:
        for step in (1, 2, 3):
            manager.save(step, app_of(step))
            manager._run.mirror.wait()
    shutil.rmtree(local)
    assert [each.parent.name for each in mirror.glob("*/manifest.json")] == ["step-00000003"]
    assert is_as_saved(mirror / "step-00000003", app_of(3))
    with checkpoint.Manager(local, keep=1, incremental=True, destinations=[checkpoint.Mirror(mirror)]) as manager:
        app = app_of(0)
        assert manager.restore(app) == 3 and torch.equal(app["table"], app_of(3)["table"])
        assert manager.save(4, app_of(4)).bytes_unchanged == 0  # its base is a copy, under another root
        assert manager.save(5, app_of(5)).bytes_unchanged > 0
    for path in (*mirror.glob("*/manifest.json"), *local.glob("*/manifest.json")):
        assert checkpoint.verify(path.parent).ok


@pytest.mark.parametrize("first", [1, 3])
def test_a_copy_takes_along_what_it_refers_to_whichever_is_copied_first(tmp_path, first):
    local, there = tmp_path / "local", f"memory://shardopt-incremental/{tmp_path.name}-{first}"
    for step in (1, 2, 3):
        save(local, step, base=step - 1 or None)
    names = [f"step-{step:08d}" for step in (first, 4 - first, 2)]
    with checkpoint.MirrorCopier(local, there) as mirror:
        for name in names:
            mirror.upload(name)
            mirror.wait()
            for copied in names[: names.index(name) + 1]:
                assert checkpoint.verify(f"{there}/{copied}").ok
    shutil.rmtree(local)
    target = {"table": torch.zeros_like(table(8))}
    checkpoint.load(f"{there}/step-00000003", target, select="table", strict=False)
    assert torch.equal(target["table"], app_of(3)["table"])
    remove_checkpoint(storage_of(f"{there}/step-00000001"))
    assert checkpoint.verify(f"{there}/step-00000003").ok


def test_only_what_is_selected_is_saved(tmp_path):
    app = {"model": torch.nn.Linear(3, 3), "adapter": torch.nn.Linear(3, 1), "step": 4}
    save(tmp_path, 1, app=app, select=r"^adapter\.|^step$")
    with checkpoint.open(tmp_path / "step-00000001") as reader:
        assert reader.keys() == ["adapter.bias", "adapter.weight", "step"]
    checkpoint.load(tmp_path / "step-00000001", app, select=r"^adapter\.|^step$")
    with pytest.raises(StateError, match="nothing to save"):
        save(tmp_path, 2, app=app, select="lora")
    with pytest.raises(OptionError, match="regex"):
        save(tmp_path, 2, app=app, select="(")
    assert not (tmp_path / "step-00000002" / "manifest.json").exists()
    pending = checkpoint.async_save(tmp_path / "step-00000003", app, select="adapter")
    assert pending.result().tensors == 2


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, rank):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.lora_A = torch.nn.Linear(6, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, 4, bias=False)


def test_adapters_are_exported_as_peft_has_them(tmp_path):
    model = torch.nn.ModuleDict({"q_proj": Adapted(2), "v_proj": Adapted(3), "k_proj": Adapted(2)})
    for step in (1, 2):
        save(tmp_path, step, base=step - 1 or None, app={"model": model, "step": step})
    config = {"lora_alpha": 4, "base_model_name_or_path": "base"}
    checkpoint.export_peft(tmp_path / "step-00000002", tmp_path / "peft", config)
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == [
            f"base_model.model.{name}_proj.lora_{part}.weight" for name in "kqv" for part in "AB"
        ]
        for key in opened.keys():  # noqa: SIM118  # no dict
            assert torch.equal(opened.get_tensor(key), model.state_dict()[key.removeprefix("base_model.model.")])
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (written["r"], written["rank_pattern"], written["lora_alpha"]) == (2, {"v_proj": 3}, 4)
    assert written["target_modules"] == ["k_proj", "q_proj", "v_proj"] and written["peft_type"] == "LORA"
    with pytest.raises(CheckpointExistsError):
        checkpoint.export_peft(tmp_path / "step-00000002", tmp_path / "peft", config)


@pytest.mark.parametrize(
    ("tensors", "options", "said"),
    [
        ({"x.weight": (2, 2)}, {}, "lora_A"),
        ({"x.lora_A.weight": (2, 3)}, {}, "other half"),
        ({"x.lora_A.weight": (2, 3), "x.lora_B.weight": (4, 2)}, {"config": {}}, "lora_alpha"),
        ({"x.lora_A.weight": (2, 3), "x.lora_B.weight": (4, 2)}, {"config": {"r": 8, "lora_alpha": 1}}, "r of x"),
        ({f"x.lora_{part}.{name}.weight": (2, 2) for part in "AB" for name in ("a", "b")}, {}, "adapter="),
    ],
)
def test_what_is_no_adapter_is_refused(tmp_path, tensors, options, said):
    save(tmp_path, 1, app={"model": {key: torch.ones(shape) for key, shape in tensors.items()}})
    with pytest.raises(MismatchError, match=said):
        checkpoint.export_peft(
            tmp_path / "step-00000001", tmp_path / "peft", **{"config": {"lora_alpha": 1}, **options}
        )
    assert not (tmp_path / "peft").exists()


def test_an_adapter_of_several_is_exported_by_its_name(tmp_path):
    tensors = {f"base_model.model.x.lora_{part}.{name}.weight": torch.ones(2, 2) for part in "AB" for name in "ab"}
    save(tmp_path, 1, app={"model": tensors})
    checkpoint.export_peft(tmp_path / "step-00000001", tmp_path / "peft", {"lora_alpha": 1}, adapter="b")
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == [f"base_model.model.x.lora_{part}.weight" for part in "AB"]
