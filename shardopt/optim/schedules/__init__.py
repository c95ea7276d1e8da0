"""The stages of a warm-up: their policies, and the multiplier of each iteration."""
