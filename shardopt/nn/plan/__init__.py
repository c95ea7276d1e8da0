"""A planner for embedding tables: cuts, and ranks of the pieces."""
