"""Weights that flow: a publisher writes those of each step, and followers take them over in place."""
