"""Buckets of GCS."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from obstore.store import GCSStore

from shardopt.checkpoint.storage.object_stores.options import Bucket, Options, checked_endpoint, client_of
from shardopt.errors import OptionError, Problem

NO_KEY = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})


def gcs_bucket(name: str, options: Options) -> Bucket:
    """Returns a bucket of GCS. Raises OptionError."""
    config: dict[str, Any] = {}
    token, endpoint = options.take("token"), options.take("endpoint_url")
    if endpoint is None and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
        endpoint = emulator if "://" in emulator else f"http://{emulator}"
    if token == "anon" or (token is None and endpoint is not None):
        config |= {"skip_signature": True, "service_account_key": NO_KEY}  # for reads, and for writes
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
        config["base_url"] = checked_endpoint(endpoint)
    return Bucket(GCSStore, name, config, client_of(options, endpoint))
