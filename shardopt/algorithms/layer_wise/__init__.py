"""Algorithms that scale each parameter's update by norms of the whole of it: LAMB and LARS."""
