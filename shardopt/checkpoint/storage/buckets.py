"""Opens buckets of S3, GCS and Azure by URL, with the options and the configuration of fsspec's file systems for them.

Each option is translated into obstore's, or has no effect here, or is refused by name: none is dropped in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

from fsspec.config import conf  # type: ignore[import-untyped]  # has no type hints
from obstore.store import AzureStore, GCSStore, S3Store

from shardopt.checkpoint.storage import retry
from shardopt.checkpoint.storage.object_store import ObjectStore
from shardopt.errors import CheckpointError, OptionError, Problem

# They are about what s3fs, gcsfs and adlfs keep in memory, and how they cut and time requests.
_WITHOUT_EFFECT = {
    *("access", "asynchronous", "batch_size", "block_size", "blocksize", "cache_regions", "cache_timeout"),
    *("check_connection", "consistency", "default_block_size", "default_cache_type", "default_fill_cache"),
    *("default_location", "fixed_upload_size", "listings_expiry_time", "loop", "max_concurrency", "max_paths"),
    *("project", "skip_instance_cache", "timeout", "use_listings_cache"),
    *("config_kwargs.max_pool_connections", "config_kwargs.retries", "config_kwargs.tcp_keepalive"),
}
_opened: dict[tuple[str, ...], ObjectStore] = {}  # they hold connections


_REQUIRED = "options that docs/remote.md lists"


class _Options:
    """Options of fsspec's file system by name. Each is taken once; what nobody takes is refused."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def take(self, name: str) -> Any:
        """Returns an option, None if it was not given; of one within another by "config_kwargs.read_timeout"."""
        first, _, rest = name.partition(".")
        if not rest:
            return self._options.pop(first, None)
        within = self._options.get(first)
        if not isinstance(within, Mapping):
            return None
        inner = _Options(within)
        value = inner.take(rest)
        self._options[first] = inner._options
        return value

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns those of some names that were given, under obstore's names for them."""
        taken = ((theirs, self.take(ours)) for ours, theirs in names.items())
        return {theirs: value for theirs, value in taken if value is not None}

    def left(self) -> list[str]:
        """Returns the names of options that nobody has taken, and that would have an effect."""
        return sorted(_names_in(self._options))


class _Bucket(NamedTuple):
    """How to make obstore's store of a bucket.

    Args:
        store: its class.
        name: of the bucket.
        config: obstore's, by name.
        client: options of its HTTP client.
        may_lack_conditions: see `ObjectStore`.
    """

    store: Callable[..., Any]
    name: str
    config: dict[str, Any]
    client: dict[str, Any]
    may_lack_conditions: bool = False


def open_bucket(url: str, options: Mapping[str, Any]) -> tuple[ObjectStore, str]:
    """Returns the object store of a URL, and the path in it.

    Args:
        options: arguments of the file system that fsspec has for the protocol, by name.

    Raises:
        OptionError: an option that obstore has no equivalent of.
        CheckpointError: there are no credentials.
    """
    protocol, _, path = url.partition("://")
    of_protocol, translate = _PROTOCOLS[protocol]
    configured = {name: value for each in of_protocol for name, value in conf.get(each, {}).items()}
    bucket, path = path.partition("/")[0], path.rstrip("/")
    given = {**configured, **options}
    key = (protocol, bucket, repr(sorted(given.items())), repr(retry.RETRY_POLICY))
    if key not in _opened:
        taken = _Options(given)
        found = translate(bucket, taken)
        if left := taken.left():
            remedy = "leave them out, or uninstall obstore: fsspec's own package for the protocol is then used"
            problem = Problem("storage_options, or fsspec's configuration", ", ".join(left), _REQUIRED, remedy)
            raise OptionError("invalid arguments", [problem])
        _opened[key] = ObjectStore(protocol, _maker(found), found.may_lack_conditions)
    return _opened[key], path


def _maker(bucket: _Bucket) -> Callable[..., Any]:
    def make(client_options: dict[str, Any], retry_config: Mapping[str, Any]) -> Any:
        client = {**client_options, **bucket.client}
        return bucket.store(bucket.name, client_options=client, retry_config=retry_config, **bucket.config)

    return make


def _s3(bucket: str, options: _Options) -> _Bucket:
    config = options.renamed(
        {
            "key": "access_key_id",
            "secret": "secret_access_key",
            "token": "session_token",
            "anon": "skip_signature",
            "requester_pays": "request_payer",
            "client_kwargs.region_name": "region",
            "config_kwargs.region_name": "region",
            "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
            "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
        }
    )
    endpoints = [options.take("endpoint_url"), options.take("client_kwargs.endpoint_url")]
    profile, style = options.take("profile"), options.take("config_kwargs.s3.addressing_style")
    if options.take("use_ssl") is False and not any(endpoints):
        endpoints.append("http://s3.amazonaws.com")
    session = _botocore_session(profile)
    endpoints += [os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL")]
    if session is not None:
        endpoints.append(session.get_scoped_config().get("endpoint_url"))
        if region := session.get_config_variable("region"):
            config.setdefault("region", region)
        if "access_key_id" not in config and not config.get("skip_signature"):
            config["credential_provider"] = _provider(session)
    endpoint = next(filter(None, endpoints), None)
    if endpoint is not None:
        if style == "virtual":  # obstore then takes the endpoint for that of the bucket
            scheme, _, host = endpoint.partition("://")
            endpoint = f"{scheme}://{bucket}.{host}"
        config["endpoint"] = endpoint
    config["virtual_hosted_style_request"] = style == "virtual"
    # TLS protects what is sent; without it the signature does, which costs more than all else of an upload.
    config["unsigned_payload"] = endpoint is None or endpoint.startswith("https://")
    config["disable_bulk_delete"] = True  # of one file at a time, which not all compatible stores have
    is_amazon = endpoint is None or ".amazonaws.com" in endpoint
    return _Bucket(S3Store, bucket, config, _client(options, endpoint), not is_amazon)


def _botocore_session(profile: str | None) -> Any:
    """Returns botocore's session, which reads `~/.aws`, signs on and refreshes; None if boto3 is not installed."""
    if find_spec("boto3") is None:
        if profile is not None:
            problem = Problem("storage_options", "profile", "boto3, which reads profiles", "pip install 'shardopt[s3]'")
            raise OptionError("invalid arguments", [problem])
        return None
    from botocore.exceptions import ProfileNotFound  # type: ignore[import-untyped]  # has no type hints
    from botocore.session import Session  # type: ignore[import-untyped]  # as above

    session = Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound as error:
        problem = Problem("the AWS profile", str(error), "one of ~/.aws/config", "see `aws configure list-profiles`")
        raise CheckpointError("cannot open S3", [problem]) from None
    return session


def _provider(session: Any) -> Any:
    from obstore.auth.boto3 import Boto3CredentialProvider

    if session.get_credentials() is None:
        required = "keys in storage_options, the environment, ~/.aws or the machine's role"
        remedy = 'give some, or storage_options={"anon": True} for a public bucket (docs/remote.md)'
        raise CheckpointError("cannot open S3", [Problem("credentials", "none", required, remedy)])
    return Boto3CredentialProvider(session)


def _gcs(bucket: str, options: _Options) -> _Bucket:
    config: dict[str, Any] = {}
    token = options.take("token")
    endpoint = options.take("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if token == "anon":
        config["skip_signature"] = True
    elif isinstance(token, Mapping):
        config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and os.path.exists(os.path.expanduser(token)):
        config["application_credentials"] = os.path.expanduser(token)
    elif hasattr(token, "refresh"):
        from obstore.auth.google import GoogleCredentialProvider

        config["credential_provider"] = GoogleCredentialProvider(token)
    elif token not in (None, "google_default"):
        required = '"anon", "google_default", the path of a key, its content as a dict, or credentials of google.auth'
        problem = Problem("storage_options['token']", type(token).__name__, required, "give one of these")
        raise OptionError("invalid arguments", [problem])
    if endpoint is not None:
        config["base_url"] = endpoint.rstrip("/")
    return _Bucket(GCSStore, bucket, config, _client(options, endpoint))


def _azure(bucket: str, options: _Options) -> _Bucket:
    container, _, host = bucket.partition("@")  # abfs://container@account.dfs.core.windows.net
    parts = options.take("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    connection = dict(part.partition("=")[::2] for part in parts.split(";") if "=" in part)
    of_connection = {
        "account_name": connection.get("AccountName") or host.partition(".")[0],
        "account_key": connection.get("AccountKey"),
        "sas_key": connection.get("SharedAccessSignature"),
        "endpoint": connection.get("BlobEndpoint"),
    }
    config = {name: value for name, value in of_connection.items() if value}
    names = ("account_name", "account_key", "tenant_id", "client_id", "client_secret")
    config |= options.renamed({**{name: name for name in names}, "sas_token": "sas_key", "anon": "skip_signature"})
    if account_host := options.take("account_host"):
        config["endpoint"] = f"https://{account_host}"
    if credential := options.take("credential"):
        if isinstance(credential, str):
            config["account_key"] = credential
        else:
            from obstore.auth.azure import AzureCredentialProvider

            config["credential_provider"] = AzureCredentialProvider(credential)
    return _Bucket(AzureStore, container, config, _client(options, config.get("endpoint")))


def _client(options: _Options, endpoint: str | None) -> dict[str, Any]:
    """Returns the options of obstore's HTTP client. They take the place of those in the environment."""
    client: dict[str, Any] = {"allow_http": bool(endpoint and endpoint.startswith("http://"))}
    for name in ("read_timeout", "connect_timeout"):
        if seconds := options.take(f"config_kwargs.{name}"):
            client[name] = timedelta(seconds=seconds)
    verify = options.take("client_kwargs.verify")
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        with open(verify, "rb") as file:
            client["root_certificate"] = file.read()
    return client


def _names_in(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in options.items():
        if f"{prefix}{name}" in _WITHOUT_EFFECT:
            continue
        if isinstance(value, Mapping):
            yield from _names_in(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


_AZURE = (("abfs", "az", "abfss"), _azure)
_GCS = (("gs", "gcs"), _gcs)
_S3 = (("s3", "s3a"), _s3)
_PROTOCOLS: Mapping[str, tuple[Sequence[str], Callable[[str, _Options], _Bucket]]] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
}
"""Protocol → the names under which fsspec's configuration has its options, and who translates them."""
