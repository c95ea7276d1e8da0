"""How many examples hypothesis draws for a test."""

from hypothesis import settings


def examples(most: int) -> int:
    """Returns `most` with --exhaustive, and else the share of them that the profile of `tests/conftest.py` has."""
    return most * settings.default.max_examples // 100
