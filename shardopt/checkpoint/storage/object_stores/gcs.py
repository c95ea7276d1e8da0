"""Buckets of GCS."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from obstore.store import GCSStore

from shardopt.checkpoint.storage.object_stores.options import Bucket, Options, checked_endpoint, client_of
from shardopt.errors import OptionError, Problem

_OBSTORES_OWN = ("service_account", "authorized_user")
"""The types of credentials that obstore can read. Workload identity federation has another, "external_account"."""
_GCLOUDS_FILE = "~/.config/gcloud/application_default_credentials.json"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"

NO_KEY = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})


def gcs_bucket(name: str, options: Options) -> Bucket:
    """Returns a bucket of GCS. Raises OptionError."""
    config: dict[str, Any] = {}
    token, endpoint = options.take("token"), options.take("endpoint_url")
    if endpoint is None and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
        endpoint = emulator if "://" in emulator else f"http://{emulator}"
    if token == "anon" or (token is None and endpoint is not None):
        config |= {"skip_signature": True, "service_account_key": NO_KEY}  # for reads, and for writes
    else:
        config |= _credentials(token)
    if endpoint is not None:
        config["base_url"] = checked_endpoint(endpoint)
    place = {"endpoint": config.get("base_url", "").removeprefix("https://storage.googleapis.com")}
    return Bucket(GCSStore, name, config, client_of(options, endpoint), place)


def _credentials(token: Any) -> dict[str, Any]:
    """Returns obstore's options for what a token is, or names. Raises OptionError."""
    if hasattr(token, "refresh"):
        return {"credential_provider": _by_google_auth(token)}
    if isinstance(token, Mapping):
        return {"service_account_key": json.dumps(dict(token))}
    if token in (None, "google_default"):
        path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or os.path.expanduser(_GCLOUDS_FILE)
        # What obstore cannot read, google.auth can. Without a file obstore asks the machine's metadata server.
        return {} if _type_in(path) in (None, *_OBSTORES_OWN) else {"credential_provider": _by_google_auth()}
    if isinstance(token, str) and os.path.exists(path := os.path.expanduser(token)):
        if (found := _type_in(path)) in (None, *_OBSTORES_OWN):
            return {"application_credentials": path}
        found, required = f"a file of type {found!r}", f"one of type {' or '.join(_OBSTORES_OWN)}"
        remedy = "set GOOGLE_APPLICATION_CREDENTIALS to its path, and leave out the token"
    else:
        found, remedy = f"a {type(token).__name__}", "give one of these"
        required = '"anon", "google_default", the path of a key, its content as a dict, or credentials of google.auth'
    raise OptionError("invalid arguments", [Problem("storage_options['token']", found, required, remedy)])


def _type_in(path: str) -> str | None:
    """Returns the type that a file of credentials names. None if there is none; obstore says what is wrong then."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file).get("type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _by_google_auth(credentials: Any = None) -> Any:
    """Returns obstore's provider of some credentials, or of the application's default ones. Raises OptionError."""
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError as error:
        required, remedy = "google-auth and requests", 'pip install "shardopt[gcs]"'
        problem = Problem("credentials for GCS", f"no module {error.name}", required, remedy)
        raise OptionError("invalid arguments", [problem]) from None
    try:
        return GoogleCredentialProvider(credentials or google.auth.default(scopes=[_SCOPE])[0])
    except GoogleAuthError as error:
        required, remedy = "credentials that google.auth can use", "make them again"
        problem = Problem("credentials for GCS", str(error), required, remedy)
        raise OptionError("invalid arguments", [problem]) from None
