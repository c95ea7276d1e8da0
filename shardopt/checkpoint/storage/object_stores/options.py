"""Options of s3fs, gcsfs and adlfs: each is translated into obstore's, or has no effect here, or is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from shardopt.errors import OptionError, Problem

# They are about what s3fs, gcsfs and adlfs keep in memory, and how they cut, time and check requests.
_WITHOUT_EFFECT = {
    *("access", "assume_container_exists", "asynchronous", "batch_size", "block_size", "blocksize", "cache_regions"),
    *("cache_timeout", "check_connection", "consistency", "default_block_size", "default_cache_type"),
    *("default_fill_cache", "default_location", "exclude_environment_credential", "fixed_upload_size"),
    *("listings_expiry_time", "loop", "max_concurrency", "max_paths", "max_single_get_size", "max_single_put_size"),
    *("project", "skip_instance_cache", "socket_timeout", "timeout", "use_listings_cache"),
    *("config_kwargs.max_pool_connections", "config_kwargs.retries", "config_kwargs.tcp_keepalive"),
    *("config_kwargs.request_checksum_calculation", "config_kwargs.response_checksum_validation"),
}
# Only what obstore does anyway.
_AS_IT_IS = {
    "version_aware": (False,),
    "location_mode": ("primary",),
    "config_kwargs.signature_version": ("s3v4", "v4"),
}


class Options:
    """Options of fsspec's file system by name. Each is taken once; what nobody takes is refused."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def take(self, name: str) -> Any:
        """Returns an option, None if it was not given; one within another by "config_kwargs.read_timeout"."""
        first, _, rest = name.partition(".")
        if not rest:
            return self._options.pop(first, None)
        within = self._options.get(first)
        if not isinstance(within, Mapping):
            return None
        inner = Options(within)
        value = inner.take(rest)
        self._options[first] = inner._options
        return value

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns those of some names that were given, under obstore's names for them."""
        taken = ((theirs, self.take(ours)) for ours, theirs in names.items())
        return {theirs: value for theirs, value in taken if value is not None}

    def is_on(self, name: str, default: bool = False) -> bool:
        """Returns an option that is on or off, of the environment as text."""
        value = self.take(name)
        return default if value is None else str(value).lower() in ("true", "1", "yes", "on")

    def left(self) -> list[str]:
        """Returns the names of options that nobody has taken, and that would have an effect."""
        return sorted(_names_in(self._options))


class Bucket(NamedTuple):
    """How to make obstore's store of a bucket.

    Args:
        store: its class.
        name: of the bucket.
        config: obstore's, by name.
        client: options of its HTTP client.
        place: which of several stores it is in: its endpoint, and on Azure its account.
        may_lack_conditions: see `ObjectStore`.
    """

    store: Callable[..., Any]
    name: str
    config: dict[str, Any]
    client: dict[str, Any]
    place: Mapping[str, str]
    may_lack_conditions: bool = False


def checked_endpoint(endpoint: str) -> str:
    """Returns an endpoint without a slash at its end. Raises OptionError if it has no scheme."""
    if not endpoint.startswith(("http://", "https://")):
        problem = Problem("the endpoint", endpoint, "http:// or https:// at its beginning", "write it with the scheme")
        raise OptionError("invalid arguments", [problem])
    return endpoint.rstrip("/")


def client_of(options: Options, endpoint: str | None, certificates: str = "") -> dict[str, Any]:
    """Returns the options of obstore's HTTP client. They take the place of those in the environment.

    Args:
        certificates: the variable that names a file of those that are trusted.
    """
    client: dict[str, Any] = {"allow_http": bool(endpoint and endpoint.startswith("http://"))}
    options.take("client_kwargs.use_ssl")  # the endpoint says it
    verify = options.take("client_kwargs.verify")
    path = verify if isinstance(verify, str) else os.environ.get(certificates)
    try:
        for name in ("read_timeout", "connect_timeout"):
            if seconds := options.take(f"config_kwargs.{name}"):
                client[name] = timedelta(seconds=float(seconds))
        if verify is False:
            client["allow_invalid_certificates"] = True
        elif path:
            with open(path, "rb") as file:
                client["root_certificate"] = file.read()
    except (OSError, ValueError) as error:
        required = "seconds in timeouts, and a file of certificates in verify"
        raise OptionError("invalid arguments", [Problem("storage_options", str(error), required, "mend it")]) from None
    return client


def _names_in(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in options.items():
        full = f"{prefix}{name}"
        if full in _WITHOUT_EFFECT or value in (None, "", {}) or value in _AS_IT_IS.get(full, ()):
            continue
        if isinstance(value, Mapping):
            yield from _names_in(value, f"{full}.")
        else:
            yield full
