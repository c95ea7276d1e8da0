"""Boxes for tests: what they mean, and exact covers made of them."""

import itertools

from hypothesis import strategies as st

from shardopt.sharding.box import Box, whole


def elements(box):
    """The slow, obvious meaning of a box: the set of its indices."""
    return set(itertools.product(*(range(start, end) for start, end in zip(box.offsets, box.ends, strict=True))))


@st.composite
def partitions(draw, shape=None):
    """A shape and boxes that cover it exactly: the whole, cut in two again and again, somewhere."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple)) if shape is None else shape
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 12))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.sizes[dim] - 1))
        for start, size in ((0, cut), (cut, box.sizes[dim] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))
