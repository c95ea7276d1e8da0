"""Rows in 8 bits, by hand: a row at a time, in NumPy's fp32."""

import numpy as np
import torch


def by_hand(name, table):
    """What is published of a table as "int8_rows", from the whole of it."""
    codes, scales, offsets = [], [], []
    for row in table.detach().float().numpy():
        low, high = np.float32(row.min()) + np.float32(0), np.float32(row.max())
        scale = max(np.float32((high - low) / np.float32(255)), np.float32(2.0**-126))
        codes.append(np.rint((row - low) / scale).astype(np.uint8))
        scales.append(scale)
        offsets.append(low)
    made = {
        name: torch.tensor(np.array(codes, np.uint8).reshape(table.shape)),
        f"{name}_scale": torch.tensor(np.array(scales, np.float32)),
        f"{name}_offset": torch.tensor(np.array(offsets, np.float32)),
    }
    return made
