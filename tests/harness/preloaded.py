"""Imported last by the fork server: makes it cheap to fork, and its ranks cheap to run.

What it has loaded so far, a million objects, is kept out of the garbage collections of all ranks, which would look at
each of them and so copy the memory that they share with the server. And its memory is brought into huge pages: a fork
copies a table of all pages, and its end frees that again, which takes most of the time that a rank needs to start.
"""

import ctypes
import gc
import mmap

_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1; others say that they do not know it
_HUGE_BYTES = 2 << 20


def _into_huge_pages() -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    for addresses, allowed, _, _, inode, *_ in maps:
        if allowed == "rw-p" and inode == "0":  # memory of no file
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
            if begin < end and madvise(begin, end - begin, mmap.MADV_HUGEPAGE) == 0:
                madvise(begin, end - begin, _COLLAPSE)


gc.collect()
gc.freeze()
_into_huge_pages()
