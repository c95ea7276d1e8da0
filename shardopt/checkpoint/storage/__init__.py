"""Storage of checkpoints: local directories, and all else that fsspec opens. No other room tells them apart."""

from shardopt.checkpoint.storage.answers import AnsweredStorage, Answers
from shardopt.checkpoint.storage.base import ReadInto, Span, Storage
from shardopt.checkpoint.storage.local import LocalStorage, is_temporary
from shardopt.checkpoint.storage.open import absolute_url, storage_of, use_options, wrap_os_errors
from shardopt.checkpoint.storage.remote import RemoteStorage

__all__ = [
    "AnsweredStorage",
    "Answers",
    "LocalStorage",
    "ReadInto",
    "RemoteStorage",
    "Span",
    "Storage",
    "absolute_url",
    "is_temporary",
    "storage_of",
    "use_options",
    "wrap_os_errors",
]
