"""RecordedReads of a storage, recorded by one rank and replayed by others."""

import pytest

from shardopt.checkpoint.storage import RecordedReads, ReplayStorage, recorded_reads, storage_of


@pytest.fixture
def stored(tmp_path):
    storage = storage_of(tmp_path / "c")
    storage.make()
    storage.write("a", [memoryview(b"0123456789" * 10)])
    storage.write("empty", [])
    return storage


class Silent:
    """A storage that must not be asked."""

    url, is_remote = "silent://c", True

    def parent(self):
        return Silent(), "c"


def ask(storage):
    """Asks what is asked of a checkpoint on opening; returns the answers."""
    with pytest.raises(FileNotFoundError, match="absent"):
        storage.size("absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        storage.read("absent", 0, 5)
    return [
        storage.exists("absent"),
        storage.exists("a"),
        storage.names(),
        storage.size("a"),
        storage.read("a"),
        storage.read("a", 3, 7),
        storage.read_rest("a", 90, 100),
        storage.read("empty"),
        storage.as_file(),
    ]


def replayed(recorded):
    return RecordedReads.unpack(recorded.pack())


def test_what_one_has_asked_others_need_not_ask(stored):
    recorded = RecordedReads()
    found = ask(ReplayStorage(stored, recorded))
    assert found[:5] == [False, True, ["a", "empty"], 100, b"0123456789" * 10]
    assert found[5:] == [b"3456", b"0123456789", b"", None]
    assert ask(ReplayStorage(Silent(), replayed(recorded))) == found
    recorded.replay()
    assert ask(ReplayStorage(Silent(), recorded)) == found
    with pytest.raises(AttributeError):
        ReplayStorage(Silent(), recorded).read("a", 3, 8)  # which nobody has asked
    recorded.close()
    with pytest.raises(AttributeError):
        ReplayStorage(Silent(), recorded).size("a")


def test_a_file_is_known_by_the_directory_above(stored, tmp_path):
    def ask_file(storage):
        directory, name = storage.as_file()
        return name, directory.size(name), directory.read(name, 0, 3)

    recorded = RecordedReads()
    assert ask_file(ReplayStorage(storage_of(tmp_path / "c" / "a"), recorded)) == ("a", 100, b"012")
    assert ask_file(ReplayStorage(Silent(), replayed(recorded))) == ("a", 100, b"012")


def test_of_two_answers_the_later_one_counts(stored):
    """As where another save is committed between a look at a size and the read."""
    recorded = RecordedReads()
    storage = ReplayStorage(stored, recorded)
    with pytest.raises(FileNotFoundError):
        storage.size("new")
    stored.write("new", [memoryview(b"12")])
    assert storage.size("new") == 2
    stored.remove("a")
    with pytest.raises(FileNotFoundError):
        storage.read("a", 0, 10)
    other = ReplayStorage(Silent(), replayed(recorded))
    assert other.size("new") == 2
    with pytest.raises(FileNotFoundError):
        other.read("a", 0, 10)


def test_no_more_is_kept_than_a_manifest_may_have(stored, monkeypatch):
    monkeypatch.setattr(recorded_reads, "_MOST_BYTES", 150)
    recorded = RecordedReads()
    storage = ReplayStorage(stored, recorded)
    for _ in range(3):  # one answer, though it is given three times
        assert len(storage.read("a")) == 100
    assert len(storage.read("a", 0, 60)) == 60
    assert storage.read("a", 0, 50) == b"0123456789" * 5
    other = ReplayStorage(Silent(), replayed(recorded))
    assert len(other.read("a")) == 100 and len(other.read("a", 0, 50)) == 50
    with pytest.raises(AttributeError):
        other.read("a", 0, 60)
