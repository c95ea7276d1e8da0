"""The bytes of tensors of accelerators, which are copied to the host by range."""

import pytest
import torch

from shardopt.checkpoint.format.tensor_bytes import bytes_of
from shardopt.checkpoint.saving.writing import earlier


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy; all tensors are taken for those of an accelerator, and 4 KiB are copied ahead."""
    found = []

    def noted(tensor):
        found.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(earlier, "is_plain_memory", lambda tensor: False)
    monkeypatch.setattr(earlier, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(earlier, "to_host", noted)
    return found


def test_what_is_read_in_order_is_copied_in_few_copies(copied):
    tensor = torch.randn(2560)  # 10 KiB
    whole, memory = bytes(bytes_of(tensor)), earlier.TensorBytes(tensor)
    for _ in range(2):
        for begin in range(0, len(whole), 512):
            assert memory.read(begin, begin + 512) == whole[begin : begin + 512]
    assert copied == [512, 4096, 4096, 2048, 512, 4096, 4096, 2048]  # the first read alone may be a sample
    assert memory.read(10000, 10240) == whole[10000:] and memory.read(10240, 10240) == b""
    assert len(copied) == 8


def test_samples_are_copied_alone(copied):
    tensor = torch.randn(2560)
    whole, memory = bytes(bytes_of(tensor)), earlier.TensorBytes(tensor)
    for begin in (0, 1024, 9216, 4096, 1024):
        assert memory.read(begin, begin + 512) == whole[begin : begin + 512]
    assert memory.read(1536, 6000) == whole[1536:6000]  # more than is copied ahead
    assert copied == [512] * 5 + [6000]


def test_an_empty_tensor_has_no_bytes(copied):
    assert earlier.TensorBytes(torch.empty(0, 3)).read(0, 0) == b"" and copied == []
