"""One file for each framework, imported by nobody in here; each needs its framework installed."""
