"""The print of an accelerator's memory, which every device computes, so also the CPU."""

import pytest
import torch

from shardopt.checkpoint.stream import changes

MASK = (1 << 64) - 1


def by_hand(data):
    """SplitMix64 of each word of 8 bytes and its place, summed; as a number with a sign."""
    total = 0
    data += bytes(-len(data) % 8)
    for place in range(len(data) // 8):
        word = int.from_bytes(data[8 * place : 8 * place + 8], "little") + place * 0x9E3779B97F4A7C15 & MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
        total += word ^ word >> 31
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex128])
def test_a_print_is_of_all_bytes_in_their_order(dtype):
    for shape in ((), (1,), (5, 7), (64,)):
        whole = torch.randn(*shape, 2).abs().to(dtype)
        for piece in (whole[..., 1], whole[..., 0].clone()):  # a view of every second element, and plain memory
            data = piece.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
            assert changes.print_of(piece).item() == by_hand(data)


def test_any_change_of_a_word_is_seen():
    tensor = torch.zeros(96, dtype=torch.int64)
    prints = {changes.print_of(tensor).item()}
    for place in (0, 1, 95):
        for bit in range(64):
            tensor[place] ^= 1 << bit if bit < 63 else -(1 << 63)
            prints.add(changes.print_of(tensor).item())
            tensor[place] = 0
    assert len(prints) == 3 * 64 + 1
    swapped = torch.arange(96)
    before = changes.print_of(swapped).item()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert changes.print_of(swapped).item() != before
