"""docs/troubleshooting.md has every message that the library prints, and none that it does not print any more.

A line of a block of text on the page is a pattern, in which `…` stands for what varies. It matches a whole message; of
a problem ("found …; required …; …") the end may be left out.
"""

import re
from functools import cache

from shardopt import errors
from tests.support.messages import LEAST_LETTERS, VARIES, Message, letters_of, messages
from tests.support.source import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PATTERNS = [
    line.removeprefix(f"  - {VARIES}: ").removeprefix("found ")
    for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def matcher(pattern: str) -> re.Pattern[str]:
    fixed = [re.escape(part) for part in pattern.split(VARIES)]
    return re.compile(".*".join(fixed) + "(; .*)?", re.DOTALL)


@cache
def matched() -> dict[str, list[Message]]:
    """The messages that each pattern of the page matches."""
    texts = [(message, message.text.removeprefix("found ")) for message in messages()]
    return {
        pattern: [message for message, text in texts if longest in text and regex.fullmatch(text)]
        for pattern in dict.fromkeys(PATTERNS)
        for regex, longest in [(matcher(pattern), max(pattern.split(VARIES), key=len))]
    }


def test_every_message_is_on_the_page_and_every_one_there_is_printed():
    there = {message for of_pattern in matched().values() for message in of_pattern}
    missing = [f"{message.where}: {message.text}" for message in messages() if message not in there]
    assert not missing, "write what they mean and the way out into docs/troubleshooting.md:\n" + "\n".join(missing)
    stale = [pattern for pattern, of_pattern in matched().items() if not of_pattern]
    assert not stale, "nothing prints this any more:\n" + "\n".join(stale)


def test_no_pattern_stands_for_more_than_a_reader_could_mean():
    vague = [
        f"{pattern} ({len({message.text for message in of_pattern})} messages)"
        for pattern, of_pattern in matched().items()
        if letters_of(pattern) < LEAST_LETTERS or len({message.text for message in of_pattern}) > 16
    ]
    assert not vague


def test_every_class_of_errors_is_in_the_table():
    classes = {name for name, kind in vars(errors).items() if name.endswith("Error") and isinstance(kind, type)}
    assert classes == set(re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE))


def test_messages_are_collected_from_raises_problems_warnings_and_helpers():
    texts = {message.text for message in messages()}
    assert "the checkpoint does not fit the app; nothing was changed" in texts  # of a raise
    assert any(text.startswith("found nothing in the checkpoint; required ") for text in texts)  # of a Problem
    assert "told to stop: saved step …, and leaving" in texts  # of a log
    assert "bytes that fail the seal at their end (torn or changed)" in texts  # of a helper that makes an error
    assert "… died, or ended before this call" in texts  # of a text put together
