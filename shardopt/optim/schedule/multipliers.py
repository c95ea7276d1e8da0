"""The multipliers of warm-up policies, as plain functions of the iteration.

    i   the iteration: steps done since training began; its multiplier is that of step i + 1
    s   the iteration at which the stage before ended, 0 for the first stage: a stage is s < i <= N and, if first, i = 0
    N   the stage's `max_iters`
    v   the stage's `value`

In a first stage each function gives what torchrec's policy of that name gives, where that is finite. A later stage
begins its own curve where the one before ended, at the multiplier that the curve has in a first stage at i = 0:
torchrec goes on counting from the beginning of training, so that a later LINEAR begins in its middle and a POLY below
the rate that it is to decay from.
"""

from __future__ import annotations

import math


def linear(v: float, s: int, N: int, i: int) -> float:
    """`v + (1 − v)·(i − s)/(N − s)`: from v to 1 over the stage.

    Source: the gradual warm-up of Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2.
    """
    return v + (1.0 - v) * (i - s) / (N - s)


def poly(v: float, s: int, decay_iters: int, i: int) -> float:
    """`max(0, 1 − (i − s)/(decay_iters − s))^v`: from 1 to 0 at iteration `decay_iters`, and 0 from there on.

    Source: the "poly" policy of Liu et al. 2015, "ParseNet", arXiv:1506.04579, section 3.3; begun at an iteration other
    than 0 it is the decay of MLPerf's DLRM reference.
    """
    return float(max(0.0, 1.0 - (i - s) / (decay_iters - s)) ** v)


def step(v: float, s: int, decay_iters: int, i: int) -> float:
    """`v^(⌊i/decay_iters⌋ − ⌊s/decay_iters⌋)`: times v at every multiple of `decay_iters`, counted from iteration 0.

    Source: the step decay of Goyal et al. 2017, arXiv:1706.02677, section 5.1.
    """
    return float(v ** (i // decay_iters - s // decay_iters))


def inverse_sqrt(s: int, i: int) -> float:
    """`√max(s, 1) / √max(i, 1)`: 1 until iteration 1 or the begin of the stage, then falling with the root of i.

    Source: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, equation 3, after the warm-up.
    """
    return math.sqrt(max(s, 1)) / math.sqrt(max(i, 1))


def cosine_restarts(v: float, period: int, s: int, N: int, i: int) -> float:
    """`v + (1 − v)·(1 + cos(π·t/period))/2`, `t = (i − s) mod period`: from 1 to v in each period, then 1 again.

    A period that ends with the stage ends at v; torchrec restarts there, and so leaves a full cosine at the full rate.

    Source: SGDR with T_mult = 1, Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.
    """
    t = (i - s) % period
    if t == 0 and i == N:
        t = period
    return v + (1.0 - v) * 0.5 * (1.0 + math.cos(math.pi * t / period))


def interpolate(v: float, end_value: float, start_interpolating_iters: int, N: int, i: int) -> float:
    """`v + (end_value − v)·(i − a)/(N − a)` with `a = start_interpolating_iters`, and v as long as i < a.

    Source: torchrec's INTERPOLATE, which goes below v (or above) before iteration a.
    """
    a = start_interpolating_iters
    return v + (end_value - v) * max(0, i - a) / (N - a)
