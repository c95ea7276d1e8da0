"""Averages of weights over training: EMA, SWA, and the batch-norm statistics that suit them."""
