"""Opens buckets of S3, GCS and Azure by URL, with the options and the configuration of fsspec's file systems for them.

Each option is translated into obstore's, or has no effect here, or is refused by name: none is dropped in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

from fsspec.config import conf  # type: ignore[import-untyped]  # has no type hints
from obstore.store import AzureStore, GCSStore, S3Store

from shardopt.checkpoint.storage import retry
from shardopt.checkpoint.storage.object_store import ObjectStore
from shardopt.errors import CheckpointError, OptionError, Problem

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
_NO_KEY = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})
_AZURE_DOMAIN = "core.windows.net"
_KEYS_SECONDS = 8 * 60  # botocore gives none that are valid for less than 10 minutes
_opened: dict[tuple[str, ...], ObjectStore] = {}  # they hold connections


_REQUIRED = "options that docs/remote.md lists"


class _Options:
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
        inner = _Options(within)
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
    if "//" in path:
        problem = Problem(url, "an empty part of the path", "one slash between parts", "write it with one slash")
        raise CheckpointError(f"cannot open {url}", [problem])
    given = {**configured, **options}
    key = (protocol, bucket, repr(sorted(given.items())), repr(retry.RETRY_POLICY))
    if key not in _opened:
        taken = _Options(given)
        found = translate(bucket, taken)
        if left := taken.left():
            remedy = "leave them out, or install fsspec's own package (s3fs, gcsfs, adlfs) in the place of obstore"
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
            "client_kwargs.region_name": "region",
            "config_kwargs.region_name": "region",
            "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
            "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
        }
    )
    if options.is_on("requester_pays"):
        config["request_payer"] = True
    endpoint = options.take("endpoint_url") or options.take("client_kwargs.endpoint_url")
    keys = [
        options.take(name) or options.take(other) or options.take(f"client_kwargs.aws_{third}")
        for name, other, third in (
            ("key", "username", "access_key_id"),
            ("secret", "password", "secret_access_key"),
            ("token", "token", "session_token"),
        )
    ]
    style = options.take("config_kwargs.s3.addressing_style")
    with _named_errors("cannot open S3"):
        session = _botocore_session(options.take("profile"))
        profile = {} if session is None else session.get_scoped_config()
        if session is not None and (region := session.get_config_variable("region")):
            config.setdefault("region", region)
        if options.is_on("anon"):
            config["skip_signature"] = True
        elif any(keys):
            config["credential_provider"] = _given_keys(*keys)
        elif session is not None:
            config["credential_provider"] = _found_keys(session)
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = endpoint or next(filter(None, map(os.environ.get, names)), None) or _endpoint_of(session, profile)
    style = style or (profile.get("s3") or {}).get("addressing_style")
    if not options.is_on("use_ssl", True) and endpoint is None:
        endpoint = "http://s3.amazonaws.com"
    if endpoint is None and str(config.get("region", "")).startswith("cn-"):
        endpoint = f"https://s3.{config['region']}.amazonaws.com.cn"
    if endpoint is not None:
        endpoint = _checked(endpoint)
        scheme, _, host = endpoint.partition("://")
        # With buckets in the name of the host, obstore takes the endpoint for that of the bucket.
        config["endpoint"] = f"{scheme}://{bucket}.{host}" if style == "virtual" else endpoint
    config["virtual_hosted_style_request"] = style == "virtual"
    # TLS protects what is sent; without it the signature does, which costs more than all else of an upload.
    config["unsigned_payload"] = endpoint is None or endpoint.startswith("https://")
    config["disable_bulk_delete"] = True  # of one file at a time, which not all compatible stores have
    is_amazon = endpoint is None or ".amazonaws.com" in endpoint
    return _Bucket(S3Store, bucket, config, _client(options, endpoint, "AWS_CA_BUNDLE"), not is_amazon)


def _checked(endpoint: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        problem = Problem("the endpoint", endpoint, "http:// or https:// at its beginning", "write it with the scheme")
        raise OptionError("invalid arguments", [problem])
    return endpoint.rstrip("/")


def _endpoint_of(session: Any, profile: Mapping[str, Any]) -> str | None:
    """Returns the endpoint that a profile of AWS has for S3, or for all services."""
    services = {} if session is None else session.full_config.get("services", {}).get(profile.get("services"), {})
    found: str | None = services.get("s3", {}).get("endpoint_url") or profile.get("endpoint_url")
    return found


@contextmanager
def _named_errors(doing: str) -> Iterator[None]:
    """Makes a CheckpointError of what botocore raises: no profile, a part of a key, a sign-on that is over."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("botocore."):
            raise
        remedy = "see `aws configure list`; for single sign-on, `aws sso login`"
        problem = Problem("credentials of AWS", f"{type(error).__name__}: {error}", "keys that can be read", remedy)
        raise CheckpointError(doing, [problem]) from None


def _botocore_session(profile: str | None) -> Any:
    """Returns botocore's session, which reads `~/.aws`, signs on and refreshes; None if boto3 is not installed."""
    if find_spec("boto3") is None:
        if profile is not None:
            problem = Problem("storage_options", "profile", "boto3, which reads profiles", "pip install 'shardopt[s3]'")
            raise OptionError("invalid arguments", [problem])
        return None
    from botocore.session import Session  # type: ignore[import-untyped]  # has no type hints

    return Session(profile=profile)


def _given_keys(key: str | None, secret: str | None, token: str | None) -> Callable[[], dict[str, Any]]:
    """Returns a provider of given keys, so that obstore adds none from the environment to them."""
    if not key or not secret:
        problem = Problem("storage_options", "a part of a key", '"key" and "secret"', "give both, or neither")
        raise OptionError("invalid arguments", [problem])
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}


def _found_keys(session: Any) -> Callable[[], dict[str, Any]]:
    """Returns a provider of the keys that botocore finds, and renews."""
    credentials = session.get_credentials()
    if credentials is None:
        required = "keys in storage_options, the environment, ~/.aws or the machine's role"
        remedy = 'give some, or storage_options={"anon": True} for a public bucket (docs/remote.md)'
        raise CheckpointError("cannot open S3", [Problem("credentials", "none", required, remedy)])

    def provide() -> dict[str, Any]:
        keys = credentials.get_frozen_credentials()
        end = datetime.now(UTC) + timedelta(seconds=_KEYS_SECONDS)
        names = {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token}
        return {**names, "expires_at": end}

    provide()  # what cannot be had is told here
    return provide


def _gcs(bucket: str, options: _Options) -> _Bucket:
    config: dict[str, Any] = {}
    token, endpoint = options.take("token"), options.take("endpoint_url")
    if endpoint is None and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
        endpoint = emulator if "://" in emulator else f"http://{emulator}"
    if token == "anon" or (token is None and endpoint is not None):
        config |= {"skip_signature": True, "service_account_key": _NO_KEY}  # for reads, and for writes
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
        config["base_url"] = _checked(endpoint)
    return _Bucket(GCSStore, bucket, config, _client(options, endpoint))


def _azure(bucket: str, options: _Options) -> _Bucket:
    container, _, host = bucket.partition("@")  # abfs://container@account.dfs.core.windows.net
    parts = options.take("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    text = dict(part.strip().partition("=")[::2] for part in parts.split(";") if "=" in part)
    config: dict[str, Any] = options.renamed({name: name for name in ("tenant_id", "client_id", "client_secret")})
    if text.get("UseDevelopmentStorage", "").lower() == "true":
        config["use_emulator"] = True
    of_host, _, domain = host.partition(".")
    account = options.take("account_name") or of_host or text.get("AccountName")
    if account:
        config["account_name"] = account
    suffix = domain.partition(".")[2] or text.get("EndpointSuffix") or _AZURE_DOMAIN
    endpoint = text.get("BlobEndpoint")
    if account_host := options.take("account_host"):
        endpoint = f"https://{account_host}"
    elif endpoint is None and suffix != _AZURE_DOMAIN:
        endpoint = f"{text.get('DefaultEndpointsProtocol', 'https')}://{account}.blob.{suffix}"
    if endpoint is not None:
        config["endpoint"] = _checked(endpoint)
    credential = options.take("credential")
    key, signature = options.take("account_key"), options.take("sas_token")
    if isinstance(credential, str):
        key, signature = (key, credential) if "sig=" in credential else (credential, signature)
    if not (key or signature or credential):
        key, signature = text.get("AccountKey"), text.get("SharedAccessSignature")
    if options.is_on("anon"):
        config["skip_signature"] = True
    elif signature:  # by providers, so that obstore takes no others from the environment
        config["credential_provider"] = lambda: {"sas_token": signature.lstrip("?"), "expires_at": None}
    elif key:
        config["credential_provider"] = lambda: {"access_key": key, "expires_at": None}
    elif credential:
        from obstore.auth.azure import AzureCredentialProvider

        config["credential_provider"] = AzureCredentialProvider(credential)
    return _Bucket(AzureStore, container, config, _client(options, endpoint))


def _client(options: _Options, endpoint: str | None, certificates: str = "") -> dict[str, Any]:
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
