"""Muon on sharded matrices."""
