"""Buckets of S3, and of stores that speak it: keys, regions and endpoints as AWS's own tools find them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from obstore.store import S3Store

from shardopt.checkpoint.storage.object_stores.options import Bucket, Options, checked_endpoint, client_of
from shardopt.errors import CheckpointError, OptionError, Problem
from shardopt.world import utc, world

_KEYS_SECONDS = 8 * 60.0  # after which keys that botocore renews are asked for again
_FILES_SECONDS = 60.0  # after which those in the environment and in files are
_BY_PROCESS = "custom-process"  # botocore's name of `credential_process`
_MARGIN_SECONDS = 30.0  # before the end of keys, in which no request begins with them


def s3_bucket(name: str, options: Options) -> Bucket:
    """Returns a bucket of S3. Raises OptionError, and CheckpointError where there are no keys."""
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
        options.take(first) or options.take(second) or options.take(f"client_kwargs.aws_{third}")
        for first, second, third in (
            ("key", "username", "access_key_id"),
            ("secret", "password", "secret_access_key"),
            ("token", "token", "session_token"),
        )
    ]
    style = options.take("config_kwargs.s3.addressing_style")
    kinds = {kind: options.take(f"config_kwargs.use_{kind}_endpoint") for kind in ("fips", "dualstack")}
    scheme = "https" if options.is_on("use_ssl", True) else "http"
    with _named_errors():
        named = options.take("profile")
        session = _botocore_session(named)
        profile = {} if session is None else session.get_scoped_config()
        if session is not None and (region := session.get_config_variable("region")):
            config.setdefault("region", region)
        of_s3 = (profile.get("s3") or {}).get("use_dualstack_endpoint")  # its older place
        kinds = {kind: _is_wanted(kind, given, session) for kind, given in kinds.items()}
        kinds["dualstack"] = kinds["dualstack"] or str(of_s3).lower() == "true"
        if options.is_on("anon"):
            config["skip_signature"] = True
        elif any(keys):
            config["credential_provider"] = _given_keys(*keys)
        elif session is not None:
            config["credential_provider"] = _FoundKeys(session, named)
    endpoint = endpoint or _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = endpoint or _endpoint_of(session, profile)
    style = style or (profile.get("s3") or {}).get("addressing_style")
    endpoint = endpoint or _amazons_endpoint(
        scheme, config.get("region") or _first("AWS_REGION", "AWS_DEFAULT_REGION"), **kinds
    )
    place = {"endpoint": ""}
    if endpoint is not None:
        endpoint = checked_endpoint(endpoint)
        place = {"endpoint": endpoint.rpartition(".amazonaws.com")[2] if ".amazonaws.com" in endpoint else endpoint}
        scheme, _, host = endpoint.partition("://")
        # With buckets in the name of the host, obstore takes the endpoint for that of the bucket.
        config["endpoint"] = f"{scheme}://{name}.{host}" if style == "virtual" else endpoint
    config["virtual_hosted_style_request"] = style == "virtual"
    # TLS protects what is sent; without it the signature does, which costs more than all else of an upload.
    config["unsigned_payload"] = endpoint is None or endpoint.startswith("https://")
    config["disable_bulk_delete"] = True  # of one file at a time, which not all compatible stores have
    is_amazon = endpoint is None or ".amazonaws.com" in endpoint
    return Bucket(S3Store, name, config, client_of(options, endpoint, "AWS_CA_BUNDLE"), place, not is_amazon)


def _first(*variables: str) -> str | None:
    """Returns the first of some variables of the environment that is not empty."""
    return next(filter(None, map(os.environ.get, variables)), None)


def _endpoint_variables() -> list[str | None]:
    """Returns what says in the environment which store is meant: keys beside another are for that one."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_PROFILE", "AWS_DEFAULT_PROFILE")
    return [os.environ.get(name) or None for name in names]


def _is_wanted(kind: str, given: object, session: Any) -> bool:
    """Whether a kind of Amazon's endpoints is asked for: by an option, in the environment, or by a profile."""
    if given is None and session is not None:
        given = session.get_config_variable(f"use_{kind}_endpoint")
    found = os.environ.get(f"AWS_USE_{kind.upper()}_ENDPOINT") if given is None else given
    return str(found).lower() == "true"


def _amazons_endpoint(scheme: str, region: str | None, fips: bool, dualstack: bool) -> str | None:
    """Returns Amazon's endpoint of some kind; None for the one that obstore takes by itself. Raises OptionError."""
    is_in_china = region is not None and region.startswith("cn-")
    if scheme == "https" and not (fips or dualstack or is_in_china):
        return None
    if region is None and (fips or dualstack):
        remedy = 'set AWS_DEFAULT_REGION, or give storage_options={"client_kwargs": {"region_name": "…"}}'
        problem = Problem("a FIPS or dual-stack endpoint of S3", "no region", "the bucket's region", remedy)
        raise OptionError("invalid arguments", [problem])
    host = "s3" + "-fips" * fips + ".dualstack" * dualstack + (f".{region}" if region else "")
    return f"{scheme}://{host}.amazonaws.com" + ".cn" * is_in_china


def _endpoint_of(session: Any, profile: Mapping[str, Any]) -> str | None:
    """Returns the endpoint that a profile of AWS has for S3, or for all services."""
    services = {} if session is None else session.full_config.get("services", {}).get(profile.get("services"), {})
    found: str | None = services.get("s3", {}).get("endpoint_url") or profile.get("endpoint_url")
    return found


@contextmanager
def _named_errors() -> Iterator[None]:
    """Makes a CheckpointError of what botocore raises: no profile, a part of a key, a sign-on that is over."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("botocore."):
            raise
        remedy = "see `aws configure list`; for single sign-on, `aws sso login`"
        problem = Problem("credentials of AWS", f"{type(error).__name__}: {error}", "keys that can be read", remedy)
        raise CheckpointError("cannot open S3", [problem]) from None


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


class _FoundKeys:
    """A provider of the keys that botocore finds, and renews; or reads again, as others may renew them.

    Args:
        session: of botocore.
        profile: that was asked for.

    Raises:
        CheckpointError: there are none.
    """

    refresh_threshold = timedelta()
    """How long before `expires_at` obstore asks again."""

    def __init__(self, session: Any, profile: str | None) -> None:
        self._profile, self._surroundings = profile, _endpoint_variables()
        self._credentials = session.get_credentials()
        if self._credentials is None:
            required = "keys in storage_options, the environment, ~/.aws or the machine's role"
            remedy = 'give some, or storage_options={"anon": True} for a public bucket (docs/remote.md)'
            raise CheckpointError("cannot open S3", [Problem("credentials", "none", required, remedy)])
        self._credentials.get_frozen_credentials()  # what cannot be had is told here
        self._is_read = True

    def __call__(self) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]  # has no type hints

        end_within = getattr(self._credentials, "refresh_needed", None)  # of those that botocore renews
        if end_within is None and not self._is_read and self._surroundings == _endpoint_variables():
            with suppress(BotoCoreError):  # of a file that is being written
                self._credentials = _botocore_session(self._profile).get_credentials() or self._credentials
        self._is_read = False
        keys, now = self._credentials.get_frozen_credentials(), world().wall_clock()
        names = {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token}
        if end_within is None and self._credentials.method == _BY_PROCESS:  # which may be slow, and has told no end
            return {**names, "expires_at": None}
        lives = _FILES_SECONDS if end_within is None else _KEYS_SECONDS
        while end_within is not None and lives > 1 and end_within(lives + _MARGIN_SECONDS):
            lives /= 2
        return {**names, "expires_at": utc(now + lives)}
