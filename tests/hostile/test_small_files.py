"""Small files that stand for something huge, slow or odd: bounded by their size before anything is built."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.sharding.box import Box, cover_faults
from shardopt.state.values import KeyProbes
from tests.hostile.bounds import use
from tests.hostile.small_files import BOXES, CASES, HUGE, SIZE, dict_collisions, own, pinwheel, torch_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


SLOW = ("probe sequence", "300 tensors", "pinwheels")
"""Files of some 300 KB, which take half a second to make, or to refuse."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.exhaustive] * any(map(case.count, SLOW))) for case in CASES]
)
def test_a_small_file_is_small_work(tmp_path, case):
    path = tmp_path / "c"
    path.mkdir()
    CASES[case](path)
    use(path)


def test_an_int_of_more_digits_than_python_writes_is_kept_and_shown(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"n": HUGE, "in": [HUGE, {"a": -HUGE}]})
    app = {"n": 0, "in": None}
    checkpoint.load(tmp_path / "c", app)
    assert app == {"n": HUGE, "in": [HUGE, {"a": -HUGE}]}
    for words in (["show", str(tmp_path / "c")], ["show", str(tmp_path / "c"), "n"]):
        assert main(words) == 0
        assert hex(HUGE)[:20] in capsys.readouterr().out


def test_boxes_that_cannot_be_cut_through_make_up_a_tensor_or_do_not():
    size, cut = pinwheel(50)
    boxes = [Box(*box) for box in cut]
    assert cover_faults((size, size), boxes) == []
    assert cover_faults((size, size), boxes[1:])
    assert cover_faults((size, size), [*boxes, boxes[7]])
    assert cover_faults((size, size), [boxes[1], *boxes[1:]])  # which have the right volume
    assert cover_faults((size + 1, size), boxes)


def test_as_many_boxes_as_can_be_compared_are_told_from_a_tensor():
    size, boxes = SIZE, [Box(*box) for box in BOXES]
    assert cover_faults((size, size), boxes) == []
    (fault, *_) = cover_faults((size, size), [boxes[1], *boxes[1:]])
    assert "boxes" in fault


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        range(5_000),
        range(0, 5_000 << 4, 16),
        [i << 20 for i in range(5_000)],
        [-i for i in range(5_000)],
        [(i, i) for i in range(5_000)],
    ],
    ids=["numbers", "addresses", "high bits", "negative", "tuples"],
)
def test_keys_that_nobody_chose_are_taken(keys, is_set):
    probes = KeyProbes(is_set, keys)
    assert probes._used == len({hash(key) for key in keys})


def test_keys_that_were_chosen_to_collide_are_refused_in_any_order():
    keys = dict_collisions(5_000)
    for given in (keys, keys[::2] + keys[1::2]):
        with pytest.raises(ValueError, match="chosen to collide"):
            KeyProbes(False, given)


def test_a_tensor_of_few_bytes_is_a_value_only_where_it_repeats_little(tmp_path):
    (tmp_path / "small").mkdir()
    torch_file(tmp_path / "small", {"param_groups": [{"lr": torch.ones(1).expand(7)}]})
    with checkpoint.open(tmp_path / "small" / "model.pt") as reader:
        assert not reader.source.unread


def test_tensors_that_share_a_layout_are_verified(tmp_path):
    checkpoint.save(tmp_path / "c", {f"t{i}": torch.full((7, 3), float(i)) for i in range(5)})
    report = checkpoint.verify(tmp_path / "c")
    assert report.ok and report.tensors == 5
    own(tmp_path / "d", lambda tree: tree["tensors"].update(b=["float32", 0, None]))
    assert any("b" in problem.key or "b" in problem.found for problem in checkpoint.verify(tmp_path / "d").problems)
