"""Storage of checkpoints: local directories, and everything else that fsspec opens. No other room tells them apart."""

from shardopt.checkpoint.storage.base import FLUSH as FLUSH
from shardopt.checkpoint.storage.base import ReadInto as ReadInto
from shardopt.checkpoint.storage.base import Span as Span
from shardopt.checkpoint.storage.base import Storage as Storage
from shardopt.checkpoint.storage.base import too_short as too_short
from shardopt.checkpoint.storage.local import LocalStorage as LocalStorage
from shardopt.checkpoint.storage.local import is_temporary as is_temporary
from shardopt.checkpoint.storage.open import absolute_url as absolute_url
from shardopt.checkpoint.storage.open import held_urls as held_urls
from shardopt.checkpoint.storage.open import hold as hold
from shardopt.checkpoint.storage.open import is_in_archive as is_in_archive
from shardopt.checkpoint.storage.open import register_storage as register_storage
from shardopt.checkpoint.storage.open import release as release
from shardopt.checkpoint.storage.open import storage_of as storage_of
from shardopt.checkpoint.storage.open import use_options as use_options
from shardopt.checkpoint.storage.open import wrap_os_errors as wrap_os_errors
from shardopt.checkpoint.storage.recorded_reads import RecordedReads as RecordedReads
from shardopt.checkpoint.storage.recorded_reads import ReplayStorage as ReplayStorage
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
