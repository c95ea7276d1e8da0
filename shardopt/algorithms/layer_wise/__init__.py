"""Algorithms that scale each parameter's update by norms of the whole parameter: LAMB and LARS."""
