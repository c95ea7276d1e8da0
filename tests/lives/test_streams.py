"""Generated lives of streams: each update is whole, or leaves what was there, or is refused by name."""

import pytest

from tests.lives.streams import play

EVENTS = {"publish", "update", "older", "join", "restart", "back", "by_hand", "poll"}
EVENTS |= {"kill_publisher", "kill_follower", "flip", "lose"}


def test_a_dozen_lives_of_streams(tmp_path):
    assert play(str(tmp_path), range(12), events=14).keys() >= EVENTS


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("begin", range(100, 600, 25))
def test_five_hundred_lives_of_streams(tmp_path, begin):
    play(str(tmp_path), range(begin, begin + 25), events=30)
