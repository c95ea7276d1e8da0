"""Containers of Azure's blobs."""

from __future__ import annotations

import os
from typing import Any

from obstore.store import AzureStore

from shardopt.checkpoint.storage.object_stores.options import Bucket, Options, checked_endpoint, client_of

_DOMAIN = "core.windows.net"


def azure_container(name: str, options: Options) -> Bucket:
    """Returns a container, by its name or with its account's host. Raises OptionError."""
    container, _, host = name.partition("@")  # abfs://container@account.dfs.core.windows.net
    parts = options.take("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    text = dict(part.strip().partition("=")[::2] for part in parts.split(";") if "=" in part)
    config: dict[str, Any] = options.renamed({name: name for name in ("tenant_id", "client_id", "client_secret")})
    if text.get("UseDevelopmentStorage", "").lower() == "true":
        config["use_emulator"] = True
    of_host, _, domain = host.partition(".")
    account = options.take("account_name") or of_host or text.get("AccountName")
    if account:
        config["account_name"] = account
    suffix = domain.partition(".")[2] or text.get("EndpointSuffix") or _DOMAIN
    endpoint = text.get("BlobEndpoint")
    if account_host := options.take("account_host"):
        endpoint = f"https://{account_host}"
    elif endpoint is None and suffix != _DOMAIN:
        endpoint = f"{text.get('DefaultEndpointsProtocol', 'https')}://{account}.blob.{suffix}"
    if endpoint is not None:
        config["endpoint"] = checked_endpoint(endpoint)
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
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or ""  # as obstore finds it
    found = config.get("endpoint", "")
    place = {"account": account, "endpoint": "" if found == f"https://{account}.blob.{_DOMAIN}" else found}
    return Bucket(AzureStore, container, config, client_of(options, endpoint), place)
