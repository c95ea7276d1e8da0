"""Imported last by the fork server: what it has loaded so far, a million objects, is kept out of the garbage
collections of all ranks, which would look at each of them and so copy the memory that they share with the server."""

import gc

gc.collect()
gc.freeze()
