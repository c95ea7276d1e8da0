"""Algorithms that precondition whole blocks of parameters, each on the rank that owns it: SOAP and Shampoo."""
