"""Buffers whose module takes another shape in a load resume; those whose module does not are refused."""

import pytest
import torch
from torch import nn
from torch.ao import quantization

from shardopt import checkpoint
from shardopt.errors import MismatchError


def quantized():
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 16), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_observers_before_their_first_batch_get_what_was_saved(tmp_path):
    model = quantized()
    model(torch.randn(4, 8))
    checkpoint.save(tmp_path / "one", {"model": model})
    fresh = quantized()
    report = checkpoint.load(tmp_path / "one", {"model": fresh})
    assert len(set(report.loaded)) == len(report.loaded)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    inputs = torch.randn(4, 8)
    assert torch.equal(model(inputs), fresh(inputs))


def test_a_hook_that_resizes_nothing_is_no_reason_to_read(tmp_path):
    checkpoint.save(tmp_path / "one", {"model": nn.BatchNorm1d(4, affine=False)})
    narrow = nn.BatchNorm1d(3, affine=False)
    with pytest.raises(MismatchError, match="running_mean"):
        checkpoint.load(tmp_path / "one", {"model": narrow})
