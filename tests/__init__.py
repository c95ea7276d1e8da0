"""The tests, cheapest first: unit, contract, numerics, golden, hostile, distributed."""
