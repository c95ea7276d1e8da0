"""Elementwise algorithms that store state, or parameters, in fewer bits than they compute with.

**The promise.** State is keyed by name and laid out by global shape; given bit-identical global gradients, codes,
scales, masters and stochastically rounded parameters have the same bits on any mesh, on the same kind of device.

**A step** (`optimizer.py`) goes through each parameter in chunks of bounded size (`chunks.py`):

    load      parameter or master, gradient and state of a chunk, as fp32 in scratch memory       (`codes.decode`)
    compute   one step of the algorithm's own class for one tensor, on the scratch                 (`inner.py`)
    store     parameter, master and state, rounded to nearest or at random                         (`codes`, `noise`)

so there is never an fp32 copy of more than a chunk. On GPUs, torch's fused kernel takes the step where it has one, and
fp32 memory of one chunk then serves as scratch itself; Triton's kernels compute the bits of `codes`
(`code_kernels.py`).

**Elements, not positions.** torch computes whole vectors and what is left at the end of a tensor (or of a thread's
share of it) with different instructions. With AVX2 and torch 2.13, add, mul, div, sqrt, lerp, addcmul, addcdiv,
maximum, sign and conversions of dtypes gave the same bits in both, and pow did not; with other instructions other
operations may not. So nothing depends on it: scratch is padded with zeros to whole vectors, and on the CPU a chunk is
small enough for one thread. All else here is arithmetic on integers, comparisons, look-ups in a table, and single
products and quotients, which IEEE 754 rounds in one way.

**8 bits** (`chunks.py`, `codes.py`). A row is all elements with one index of the first dimension, flattened; it is
cut into blocks of 256 elements (the last may be shorter), by the global shape alone. Each block has a scale, the
largest absolute value in it, in a tensor [rows, blocks of a row] placed as the parameter along its rows. Codes are
uint8, placed as the parameter. Tensors below 4,096 elements, and those whose rows have fewer than 64 (1-dimensional
ones among them), keep fp32 state.

The code is a float with 3 bits of mantissa, linear below its least exponent: x / scale = ±c with 15 binades for entries
that may be negative, and c with 31 binades for those that may not (second moments), whose range is then the square of
the first's. fp8 has too few: e4m3 ends 18 binades below the largest number in a block, where second moments span more,
and e5m2 has two bits of mantissa. A table of quantiles ("dynamic" codes) needs a search for each element.
A positive number is never stored as 0, so that no step divides by eps alone.

**Cut blocks** (`shared_scales.py`). Where ranks share rows, each finds the largest values of its own elements of the
new state, without storing it; one all-reduce (MAX) for each process group, for all parameters, makes them those of
whole rows; then the step is taken. These parameters are computed twice, and no new state is kept in the meantime.

**Rounding at random** (`noise.py`) is keyed by the name, the entry, the step in the state, and the element's global
index.
"""
