"""Object stores by URL: options of fsspec's file systems, credentials, errors, forked processes."""

import errno
import http.server
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import urllib.parse
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import obstore
import pytest
from botocore.session import Session
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from shardopt import checkpoint
from shardopt.checkpoint.storage import retry, storage_of
from shardopt.checkpoint.storage.object_stores import errors, gcs, s3
from shardopt.checkpoint.storage.object_stores import open as opening
from shardopt.checkpoint.storage.object_stores.errors import (
    ExhaustedError,
    ExpiredKeysError,
    StateOfObjectError,
    translated,
)
from shardopt.checkpoint.storage.object_stores.options import Options
from shardopt.checkpoint.storage.object_stores.store import ObjectStore
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, OptionError
from tests.harness.object_stores import object_server


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No configuration but the test's."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(opening, "_opened", {})
    monkeypatch.setattr(fsspec.config, "conf", {})
    monkeypatch.setattr(opening, "conf", fsspec.config.conf)


def translate(protocol, bucket="b", **options):
    """What obstore is given for options of fsspec's file system: configuration, client's options."""
    given = Options(options)
    found = opening.PROTOCOLS[protocol][1](bucket, given)
    assert given.left() == []
    if "credential_provider" in found.config:  # in the place of keys, so that obstore adds none from the environment
        keys = found.config.pop("credential_provider")()
        found.config.update({name: value for name, value in keys.items() if value is not None and name != "expires_at"})
    return found


KEYS = {"key": "k", "secret": "s"}
OF_KEYS = {"access_key_id": "k", "secret_access_key": "s"}
AMAZON = {"virtual_hosted_style_request": False, "unsigned_payload": True, "disable_bulk_delete": True}
OTHER = {**AMAZON, "unsigned_payload": False}


@pytest.mark.parametrize(
    ("options", "config", "client"),
    [
        (KEYS, {**OF_KEYS, **AMAZON}, {}),
        ({**KEYS, "token": "t"}, {**OF_KEYS, **AMAZON, "token": "t"}, {}),
        ({"anon": True}, {"skip_signature": True, **AMAZON}, {}),
        ({**KEYS, "requester_pays": True}, {**OF_KEYS, **AMAZON, "request_payer": True}, {}),
        ({**KEYS, "client_kwargs": {"region_name": "eu-west-3"}}, {**OF_KEYS, **AMAZON, "region": "eu-west-3"}, {}),
        (
            {**KEYS, "endpoint_url": "http://minio:9000"},
            {**OF_KEYS, **OTHER, "endpoint": "http://minio:9000"},
            {"allow_http": True},
        ),
        (
            {**KEYS, "client_kwargs": {"endpoint_url": "https://minio:9000", "verify": False}},
            {**OF_KEYS, **AMAZON, "endpoint": "https://minio:9000"},
            {"allow_invalid_certificates": True},
        ),
        (
            {**KEYS, "endpoint_url": "https://oss.example/", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            {**OF_KEYS, **AMAZON, "endpoint": "https://b.oss.example", "virtual_hosted_style_request": True},
            {},
        ),
        (
            {**KEYS, "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id"}},
            {**OF_KEYS, **AMAZON, "server_side_encryption": "aws:kms", "sse_kms_key_id": "id"},
            {},
        ),
        ({"username": "k", "password": "s"}, {**OF_KEYS, **AMAZON}, {}),
        ({"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": "s"}}, {**OF_KEYS, **AMAZON}, {}),
        ({"anon": "true"}, {"skip_signature": True, **AMAZON}, {}),
        ({**KEYS, "anon": "false", "version_aware": False, "session": None}, {**OF_KEYS, **AMAZON}, {}),
        ({**KEYS, "config_kwargs": {"signature_version": "s3v4"}}, {**OF_KEYS, **AMAZON}, {}),
        (
            {**KEYS, "client_kwargs": {"region_name": "cn-north-1"}},
            {**OF_KEYS, **AMAZON, "region": "cn-north-1", "endpoint": "https://s3.cn-north-1.amazonaws.com.cn"},
            {},
        ),
        (
            {**KEYS, "use_listings_cache": False, "config_kwargs": {"retries": {"mode": "legacy"}}},
            {**OF_KEYS, **AMAZON},
            {},
        ),
    ],
)
def test_options_of_s3fs(options, config, client):
    found = translate("s3", **options)
    assert found.config == config
    assert found.client == {"allow_http": False, **client}
    assert found.may_lack_conditions == ("endpoint" in config and ".amazonaws.com" not in config["endpoint"])


@pytest.mark.parametrize(
    ("region", "wanted", "endpoint"),
    [
        ("us-gov-west-1", {"fips"}, "https://s3-fips.us-gov-west-1.amazonaws.com"),
        ("us-east-1", {"fips", "dualstack"}, "https://s3-fips.dualstack.us-east-1.amazonaws.com"),
        ("eu-west-3", {"dualstack"}, "https://s3.dualstack.eu-west-3.amazonaws.com"),
        ("cn-north-1", {"dualstack"}, "https://s3.dualstack.cn-north-1.amazonaws.com.cn"),
    ],
)
@pytest.mark.parametrize("by", ["option", "environment", "environment without boto3", "profile"])
def test_kinds_of_amazons_endpoints(region, wanted, endpoint, by, tmp_path, monkeypatch):
    given = {}
    for kind in wanted:
        if by == "option":
            given[f"use_{kind}_endpoint"] = True
        elif by == "profile":
            with (tmp_path / "config").open("a") as file:
                file.write("[default]\n" * (file.tell() == 0) + f"use_{kind}_endpoint = true\n")
        else:
            monkeypatch.setenv(f"AWS_USE_{kind.upper()}_ENDPOINT", "true")
    if by.endswith("without boto3"):
        monkeypatch.setattr(s3, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="no region"):
        translate("s3", **KEYS, config_kwargs=given)
    monkeypatch.setenv("AWS_REGION", region)
    assert translate("s3", **KEYS, config_kwargs=given).config["endpoint"] == endpoint
    assert translate("s3", **KEYS, endpoint_url="http://h:1", config_kwargs=given).config["endpoint"] == "http://h:1"
    plain = translate("s3", **KEYS, use_ssl=False, config_kwargs=given)
    assert plain.config["endpoint"] == endpoint.replace("https", "http")


def test_a_kind_of_endpoint_may_be_declined(monkeypatch):
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert "endpoint" not in translate("s3", **KEYS, config_kwargs={"use_fips_endpoint": False}).config
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "false")
    assert "endpoint" not in translate("s3", **KEYS).config


def test_timeouts_are_the_clients():
    found = translate("s3", **KEYS, config_kwargs={"read_timeout": 20, "connect_timeout": 3.5})
    assert {name: found.client[name].total_seconds() for name in ("read_timeout", "connect_timeout")} == {
        "read_timeout": 20,
        "connect_timeout": 3.5,
    }


class Federation(http.server.BaseHTTPRequestHandler):
    """Gives tokens for those of another identity provider; knows no object, and who asks for one."""

    asked: ClassVar[list[str]] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append(urllib.parse.parse_qs(body)["subject_token"][0])
        kind = "urn:ietf:params:oauth:token-type:access_token"
        answer = {"access_token": "given", "issued_token_type": kind, "token_type": "Bearer", "expires_in": 3600}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_HEAD(self):
        self.asked.append(self.headers["Authorization"])
        self.send_error(404)

    def log_message(self, *args):
        pass


def test_default_credentials_that_obstore_reads_are_left_to_it(tmp_path, monkeypatch):
    key = tmp_path / "key.json"
    key.write_text('{"type": "authorized_user"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    assert translate("gs").config == {}
    assert translate("gs", token=str(key)).config == {"application_credentials": str(key)}


@pytest.fixture
def federated(tmp_path, monkeypatch):
    """The address of a server, and a file of credentials of workload identity federation with it."""
    monkeypatch.setattr(Federation, "asked", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Federation)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    (tmp_path / "subject").write_text("of another provider")
    described = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/mine",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{address}/token",
        "credential_source": {"file": str(tmp_path / "subject")},
    }
    (tmp_path / "federated.json").write_text(json.dumps(described))
    yield address, str(tmp_path / "federated.json")
    server.shutdown()
    thread.join()
    server.server_close()


def test_default_credentials_of_workload_identity_federation_are_used(federated, monkeypatch):
    address, path = federated
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "mine")  # or google.auth asks Google for it
    options = Options({"endpoint_url": address, "token": "google_default"})
    bucket = gcs.gcs_bucket("b", options)
    store = bucket.store(bucket.name, client_options=bucket.client, **bucket.config)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "a")
    assert Federation.asked == ["of another provider", "Bearer given"]


def test_a_file_that_only_google_auth_reads_is_refused_as_a_token(federated):
    with pytest.raises(OptionError, match="found a file of type 'external_account'; required one of type service_acc"):
        translate("gs", token=federated[1])


def test_credentials_that_google_auth_cannot_use_are_refused(tmp_path, monkeypatch):
    (tmp_path / "odd.json").write_text('{"type": "external_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "odd.json"))
    with pytest.raises(OptionError, match=r"required credentials that google\.auth can use"):
        translate("gs")


def test_without_google_auth_its_credentials_name_what_installs_it(federated, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", federated[1])
    monkeypatch.setitem(sys.modules, "google.auth", None)
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    with pytest.raises(OptionError, match=r'no module google\.auth; .*pip install "shardopt\[gcs\]"'):
        translate("gs")


def test_options_of_gcsfs(tmp_path, monkeypatch):
    key = tmp_path / "key.json"
    key.write_text("{}")
    assert translate("gs").config == {}
    assert translate("gs", token="google_default", project="p").config == {}
    assert translate("gs", token="anon").config == {"skip_signature": True, "service_account_key": gcs.NO_KEY}
    assert translate("gcs", token=str(key)).config == {"application_credentials": str(key)}
    assert translate("gs", token={"type": "service_account"}).config == {
        "service_account_key": '{"type": "service_account"}'
    }
    assert translate("gs", token="anon", endpoint_url="http://h:1/").config["base_url"] == "http://h:1"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    assert translate("gs").config["base_url"] == "http://localhost:4443"
    assert translate("gs").client == {"allow_http": True}
    with pytest.raises(OptionError, match=r"storage_options\['token'\]: found a str") as caught:
        translate("gs", token="browser of mine")
    assert "browser of mine" not in str(caught.value)


def test_options_of_adlfs(monkeypatch):
    named = {"account_name": "a", "access_key": "k"}
    assert translate("az", account_name="a", account_key="k").config == named
    assert translate("az", account_name="a", credential="k").config == named
    for option in ("sas_token", "credential"):
        found = translate("abfs", "c@acc.dfs.core.windows.net", **{option: "?sv=1&sig=2"})
        assert found.config == {"account_name": "acc", "sas_token": "sv=1&sig=2"}
    found = translate("abfs", "c@acc.dfs.core.chinacloudapi.cn", anon=True)
    assert found.config["endpoint"] == "https://acc.blob.core.chinacloudapi.cn"
    text = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k;EndpointSuffix=core.chinacloudapi.cn"
    found = translate("az", connection_string=text)
    assert found.config == {**named, "endpoint": "https://a.blob.core.chinacloudapi.cn"}
    assert translate("az", connection_string="UseDevelopmentStorage=true").config == {"use_emulator": True}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "of the environment")
    assert translate("az", account_name="a", sas_token="t").config == {"account_name": "a", "sas_token": "t"}
    assert translate("abfs", "c@acc.dfs.core.windows.net").name == "c"
    assert translate("az", anon=True, account_host="h").config == {"skip_signature": True, "endpoint": "https://h"}
    text = "AccountName=a;AccountKey=k==;BlobEndpoint=http://h:1/a;EndpointSuffix=e"
    for given in ({"connection_string": text}, {}):
        assert translate("az", **given).config == {
            "account_name": "a",
            "access_key": "k==",
            "endpoint": "http://h:1/a",
        }
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    names = ("tenant_id", "client_id", "client_secret")
    assert set(names) <= set(translate("az", **dict.fromkeys(names, "x")).config)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
        ({"ssl": 1, "config_kwargs": {"signature_version": "s3"}}, "config_kwargs.signature_version, ssl"),
    ],
)
def test_what_obstore_has_no_equivalent_of_is_refused_by_name(options, names):
    with pytest.raises(OptionError, match=rf"found {names}; .*in the place of obstore") as caught:
        checkpoint.save("s3://b/c", {"n": 1}, storage_options={**KEYS, "secret": "hidden", **options})
    assert "hidden" not in str(caught.value)
    fsspec.config.conf["s3"] = {**KEYS, **options}
    with pytest.raises(OptionError, match=rf"found {names}; "):
        storage_of("s3://b/c")


def test_credentials_are_those_of_a_profile(tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text("[two]\naws_access_key_id = k\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text("[profile two]\nregion = eu-west-3\nendpoint_url = https://minio:9000\n")
    for given in ({"profile": "two"}, {}):
        found = translate("s3", **given)
        assert found.config["region"] == "eu-west-3" and found.config["endpoint"] == "https://minio:9000"
        assert OF_KEYS.items() <= found.config.items()
        monkeypatch.setenv("AWS_PROFILE", "two")
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(CheckpointError, match=r"found none; .*anon"):
        storage_of("s3://b/c")
    with pytest.raises(CheckpointError, match=r"credentials of AWS: found ProfileNotFound: .*three"):
        translate("s3", profile="three")
    (tmp_path / "config").write_text(
        "[default]\nservices = mine\ns3 =\n  addressing_style = virtual\n[services mine]\ns3 =\n  endpoint_url = http://h:1\n"
    )
    assert translate("s3", **KEYS).config["endpoint"] == "http://b.h:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://env:1")
    assert translate("s3", **KEYS).config["endpoint"] == "http://b.env:1"
    monkeypatch.setattr(s3, "find_spec", lambda name: None)
    assert "access_key_id" not in translate("s3").config  # obstore looks in the environment by itself
    with pytest.raises(OptionError, match=r"found profile; required boto3"):
        translate("s3", profile="two")


def test_keys_of_the_environment_are_not_mixed_with_those_that_are_given(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the environment")
    assert "of the environment" not in translate("s3", **KEYS).config.values()
    assert translate("s3").config["token"] == "of the environment"
    with pytest.raises(OptionError, match='required "key" and "secret"'):
        translate("s3", key="k")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CheckpointError, match="credentials of AWS: found PartialCredentialsError"):
        translate("s3")


def test_keys_that_botocore_renews_are_asked_for_before_they_end(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert 55 < seconds_left(s3.s3_bucket("b", Options({})).config["credential_provider"]) < 61


def seconds_left(provider):
    """Until obstore asks for keys again."""
    assert not provider.refresh_threshold
    return (provider()["expires_at"] - datetime.now(UTC)).total_seconds()


@pytest.mark.parametrize(("lives", "least", "most"), [(3600, 450, 490), (120, 30, 90), (20, 0, 2)])
def test_keys_are_not_used_beyond_their_end(tmp_path, lives, least, most):
    end = (datetime.now(UTC) + timedelta(seconds=lives)).isoformat()
    keys = {"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": end}
    (tmp_path / "keys").write_text(json.dumps(keys))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/keys\n")
    assert least < seconds_left(s3.s3_bucket("b", Options({})).config["credential_provider"]) < most


def test_a_process_that_tells_no_end_of_its_keys_is_run_once_for_a_store(tmp_path):
    (tmp_path / "keys").write_text(json.dumps({"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s"}))
    command = f"echo >> {tmp_path}/runs; cat {tmp_path}/keys"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = sh -c '{command}'\n")
    provider = s3.s3_bucket("b", Options({})).config["credential_provider"]
    assert provider() == {"access_key_id": "k", "secret_access_key": "s", "token": None, "expires_at": None}
    assert (tmp_path / "runs").read_text() == "\n"
    assert provider()["access_key_id"] == "k"  # of a store that was made anew, as the keys are not taken any more
    assert (tmp_path / "runs").read_text() == "\n\n"


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "InvalidToken"])
def test_keys_that_the_store_does_not_know_are_asked_for_once_more(code):
    made = []

    def make(**unused):
        made.append(len(made))
        return SimpleNamespace(head=partial(head, len(made)))

    def head(number, key):
        if number < 2 or key == "refused":
            raise PermissionDeniedError(answer(403, f"<Code>{code}</Code>"))
        return {"size": 7}

    store = ObjectStore("s3", make, may_lack_conditions=False)
    assert store._request(lambda each: each.head("a")) == {"size": 7} and len(made) == 2
    with pytest.raises(PermissionError):
        store._request(lambda each: each.head("refused"))
    assert len(made) == 3


def test_keys_that_others_renew_are_read_again(tmp_path, monkeypatch):
    def write(key):
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    write("one")
    provider = s3.s3_bucket("b", Options({})).config["credential_provider"]
    assert provider()["access_key_id"] == "one"
    write("two")
    assert provider()["access_key_id"] == "two"
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = half\n")
    assert provider()["access_key_id"] == "two"


def test_what_is_found_beside_options_is_found_again(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    first, _ = opening.open_bucket("s3://b/a", {})
    assert opening.open_bucket("s3://b/c", {}) == (first, "b/c")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio:9000")
    assert opening.open_bucket("s3://b/a", {})[0].place == {"endpoint": "https://minio:9000"}
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (tmp_path / "config").write_text("[default]\nendpoint_url = https://minio:9001\n")
    assert opening.open_bucket("s3://b/a", {})[0].place == {"endpoint": "https://minio:9001"}
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CheckpointError, match="ProfileNotFound"):
        opening.open_bucket("s3://b/a", {})


def test_a_bucket_of_amazon_is_one_at_each_kind_of_endpoint():
    kinds = [{}, {"use_fips_endpoint": True}, {"use_dualstack_endpoint": True, "s3": {"addressing_style": "virtual"}}]
    region = {"client_kwargs": {"region_name": "eu-west-3"}}
    assert [dict(translate("s3", config_kwargs=each, **KEYS, **region).place) for each in kinds] == [
        {"endpoint": ""}
    ] * 3
    china = translate("s3", client_kwargs={"region_name": "cn-north-1"}, **KEYS)
    assert china.place == {"endpoint": ".cn"}
    assert translate("az", account_name="a", account_key="k").place == {"account": "a", "endpoint": ""}


@pytest.mark.parametrize(
    ("protocol", "options", "said"),
    [
        ("s3", {**KEYS, "endpoint_url": "minio:9000"}, "minio:9000; required http:// or https://"),
        ("s3", {**KEYS, "config_kwargs": {"read_timeout": "soon"}}, "required seconds in timeouts"),
        ("s3", {**KEYS, "client_kwargs": {"verify": "/nonexistent.pem"}}, "/nonexistent.pem"),
        ("gs", {"endpoint_url": "h:1"}, "h:1; required http:// or https://"),
    ],
)
def test_options_of_no_use_are_refused(protocol, options, said):
    with pytest.raises(OptionError, match=said):
        translate(protocol, **options)


@pytest.mark.parametrize(
    ("url", "options"),
    [("az://c/a", {}), ("gs://b/a", {"token": {"type": "none"}})],
)
def test_what_obstore_does_not_open_is_told_at_once(url, options):
    fsspec.config.conf["az"] = fsspec.config.conf["gs"] = options
    with pytest.raises(CheckpointError, match=r"cannot open an object store.*\n.*required options and credentials"):
        storage_of(url).names()


def test_a_key_that_is_none_is_told_at_once():
    fsspec.config.conf["az"] = {"account_name": "a", "account_key": "no base64"}
    with pytest.raises(CheckpointError, match=r"cannot list az://c/a.*\n.*no valid credentials.*give credentials"):
        storage_of("az://c/a").names()


def test_an_empty_part_of_a_path_is_refused():
    with pytest.raises(CheckpointError, match="an empty part of the path"):
        storage_of("s3://b//run")


def answer(status, more=""):
    return (
        f"Generic S3 error: Error performing PUT http://h/b - Server returned non-2xx status code: {status} x: {more}"
    )


@pytest.mark.parametrize(
    ("error", "kind", "number"),
    [
        *((GenericError(answer(status)), ConnectionError, None) for status in (408, 425, 429, 500, 502, 503, 504)),
        *((GenericError(answer(status)), OSError, errno.EINVAL) for status in (400, 405, 411, 416)),
        (GenericError(answer(401)), PermissionError, errno.EACCES),
        (PermissionDeniedError(answer(403)), PermissionError, errno.EACCES),
        (PermissionDeniedError(answer(403, "<Code>RequestTimeTooSkewed</Code>")), ConnectionError, None),
        (GenericError(answer(404)), FileNotFoundError, errno.ENOENT),
        (FileNotFoundError(answer(404)), FileNotFoundError, errno.ENOENT),
        (AlreadyExistsError(answer(409)), ConnectionError, None),
        (GenericError(answer(501)), OSError, errno.ENOSYS),
        (GenericError(answer(507)), OSError, errno.ENOSPC),
        (OSError(answer(400, "<Code>InvalidPart</Code>")), ConnectionError, None),
        (FileNotFoundError(answer(404, "<Code>NoSuchUpload</Code>")), ConnectionError, None),
        (
            GenericError("e in 1s, after 3 retries, max_retries: 3, retry_timeout: 9s - HTTP error"),
            ExhaustedError,
            None,
        ),
        (GenericError(answer(400, "<Code>RequestTimeout</Code>")), ConnectionError, None),
        (GenericError(answer(404, "<Code>NoSuchBucket</Code>")), OSError, errno.EINVAL),
        (GenericError(answer(503, "invalid path, redirect, after 3 retries, 169.254.169.254")), ConnectionError, None),
        (GenericError(answer(400, "<Code>ExpiredToken</Code>")), ExpiredKeysError, None),
        *(
            (error(answer(status, f"<Code>{code}</Code>")), StateOfObjectError, errno.EPERM)
            for error, status, code in (
                (PermissionDeniedError, 403, "InvalidObjectState"),
                (AlreadyExistsError, 409, "BlobArchived"),
                (AlreadyExistsError, 409, "BlobImmutableDueToPolicy"),
            )
        ),
        (GenericError("Encountered object with invalid path: run//x"), OSError, errno.EINVAL),
        (GenericError("e\n\nDebug source:\nkind: Request, InvalidCertificate(\n Unknown"), OSError, errno.EINVAL),
        (GenericError("HTTP error: error sending request\n\nDebug source:\nkind: Timeout,"), TimeoutError, None),
        (GenericError("Received redirect without LOCATION, this normally indicates a region"), OSError, errno.EINVAL),
        (GenericError("Wanted range starting at 10, but object was only 10 bytes long"), OSError, errno.EINVAL),
        (
            GenericError("Error performing PUT http://169.254.169.254/latest/api/token - HTTP error"),
            PermissionError,
            errno.EACCES,
        ),
    ],
)
def test_errors_say_what_happened(error, kind, number):
    def fail():
        raise error

    with pytest.raises(OSError) as caught:
        translated(fail)
    assert type(caught.value) is kind and caught.value.errno == number
    assert retry.is_transient(caught.value) == issubclass(kind, ConnectionError | TimeoutError)
    assert "already exists" not in str(caught.value)


@pytest.mark.parametrize("took", ["756.1µs", "1.2s", "30ms"])
def test_an_error_is_the_same_at_each_attempt(took):
    def fail():
        raise GenericError(
            f"Error performing DELETE http://h/in 3s in {took} - Server returned non-2xx status code: 403 F: x"
        )

    with pytest.raises(PermissionError, match=r"h/in 3s - Server"):
        translated(fail)


def test_an_object_in_an_archive_says_what_to_do():
    store = Store(conditions=True)
    store.get = lambda *args, **options: fail(PermissionDeniedError(answer(403, "<Code>InvalidObjectState</Code>")))
    requests = retry.Requests(ObjectStore("s3", lambda **options: store, may_lack_conditions=False))
    with pytest.raises(CheckpointError, match=r"InvalidObjectState; .*restore the object from its archive class"):
        requests.call("read s3://b/a", "cat_file", "b/a")


def test_expired_keys_are_asked_for_anew_also_where_the_answer_has_no_body():
    made = []

    def make(**options):
        store = Store(conditions=True)
        store.files["a"] = b"123"
        if not made:
            store.head = lambda key: fail(GenericError(answer(400)))
            store.get_range = lambda *args, **each: fail(GenericError(answer(400, "<Code>ExpiredToken</Code>")))
        made.append(store)
        return store

    store = ObjectStore("s3", make, may_lack_conditions=False)
    assert retry.Requests(store, retry.RetryPolicy(pause_seconds=0.001)).call("x", "info", "b/a")["size"] == 3
    assert len(made) == 2
    made[1].head = lambda key: fail(PermissionDeniedError(answer(403)))  # and what is no matter of keys is told
    with pytest.raises(PermissionError):
        store.info("b/a")


def fail(error):
    raise error


def test_tokens_in_an_answer_are_not_told():
    def fail():
        raise GenericError(
            answer(400, "<Error><Code>InvalidToken</Code><Message>no</Message><Token-0>T</Token-0></Error>")
        )

    with pytest.raises(OSError, match=r"400 x: InvalidToken no$"):
        translated(fail)


def test_a_panic_is_an_error():
    class PanicException(BaseException):
        pass

    def fail():
        raise PanicException("called unwrap()")

    with pytest.raises(OSError, match="called unwrap"):
        translated(fail)


def test_a_conflict_is_that_a_file_exists_only_where_it_is_created():
    def fail():
        raise AlreadyExistsError(answer(409))

    with pytest.raises(FileExistsError):
        translated(fail, creates=True)


def test_errors_are_short_and_say_why_a_server_is_not_reached():
    store = storage_of_s3("http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"tcp connect error") as caught:
        store.info("b/a")
    assert len(str(caught.value)) < 500

    def long():
        raise GenericError(answer(400, "x" * 100_000))

    with pytest.raises(OSError, match=r"…$") as caught:
        translated(long)
    assert len(str(caught.value)) < 500


def storage_of_s3(endpoint, may_lack_conditions=True):
    def make(client_options, retry_config):
        return obstore.store.S3Store(
            "b",
            endpoint=endpoint,
            region="us-east-1",
            **OF_KEYS,
            client_options={**client_options, "allow_http": True},
            retry_config=retry_config,
        )

    return ObjectStore("s3", make, may_lack_conditions)


class Store:
    """An object store in memory that has conditions or ignores them."""

    def __init__(self, conditions):
        self.conditions, self.files, self.requests = conditions, {}, []

    def put(self, key, data, mode="overwrite", use_multipart=None):
        self.requests.append(f"put {mode}")
        if self.conditions and mode == "create" and key in self.files:
            raise AlreadyExistsError(answer(412))
        self.files[key] = data

    def head(self, key):
        self.requests.append("head")
        if key not in self.files:
            raise FileNotFoundError(answer(404))
        return {"size": len(self.files[key])}

    def get_range(self, key, start, end):
        return self.files[key][start:end]


@pytest.mark.parametrize("conditions", [True, False])
def test_whether_a_store_has_conditions_is_found_out_once_and_said(conditions, caplog):
    store = Store(conditions)
    bucket = ObjectStore("s3", lambda **options: store, may_lack_conditions=True)
    storage = RemoteStorage(bucket, "b/run")
    assert storage.publish_new("a", b"1") is conditions
    assert store.requests[:3] == ["head", "put create", "put create"]
    store.requests.clear()
    assert storage.publish_new("b", b"1") is conditions
    assert store.requests == (["put create"] if conditions else ["head", "put overwrite"])
    with pytest.raises(FileExistsError):
        storage.publish_new("a", b"2")
    assert store.files == {"run/a": b"1", "run/b": b"1"}
    assert [("s3://b ignores conditions" in line) for line in caplog.messages] == ([] if conditions else [True])


@pytest.mark.parametrize("known", [True, None])
def test_a_store_with_conditions_that_refuses_a_request_is_not_written_to_without_one(known):
    """Between the look and the write another job may commit."""
    store = Store(conditions=True)
    storage = RemoteStorage(ObjectStore("s3", lambda **options: store, may_lack_conditions=known is None), "b/run")
    if known is None:
        storage.publish_new("first", b"1")
    put, store.put = store.put, lambda *args, **options: (_ for _ in ()).throw(GenericError(answer(400)))
    with pytest.raises(CheckpointError, match="400"):
        storage.publish_new("a", b"1")
    store.put = put
    assert "put overwrite" not in store.requests
    assert storage.publish_new("a", b"1") is True


def test_a_job_that_commits_before_the_first_condition_is_tried_wins():
    """After this one has looked, and before it has written."""
    store = Store(conditions=True)
    head = store.head

    def late(key):
        store.head = head
        store.files[key] = b"of another"
        raise FileNotFoundError(answer(404))

    store.head = late
    storage = RemoteStorage(ObjectStore("s3", lambda **options: store, may_lack_conditions=True), "b/run")
    with pytest.raises(FileExistsError):
        storage.publish_new("a", b"mine")
    assert store.files == {"run/a": b"of another"}


def test_a_store_is_not_called_exclusive_before_that_is_known():
    store, failures = Store(conditions=False), iter([False, True, False, False])
    put = store.put

    def failing(*args, **options):
        if next(failures, False):
            raise GenericError(answer(503))
        put(*args, **options)

    store.put = failing
    storage = RemoteStorage(ObjectStore("s3", lambda **options: store, may_lack_conditions=True), "b/run")
    assert storage.publish_new("a", b"1") is False


def test_one_range_that_fails_is_not_all():
    class Ranges:
        def get_ranges(self, key, starts, ends, coalesce):
            raise GenericError(answer(503))

        def get_range(self, key, start, end):
            if start == 1:
                raise GenericError(answer(503))
            return bytes(range(start, end))

    bucket = ObjectStore("s3", lambda **options: Ranges(), may_lack_conditions=False)
    found = bucket.cat_ranges(["b/a"] * 3, [0, 1, 2], [1, 2, 3], on_error="return")
    assert [bytes(each) for each in found[::2]] == [b"\0", b"\2"]
    assert isinstance(found[1], ConnectionError)


def test_the_marker_of_a_directory_is_no_file():
    class Marked:
        def list_with_delimiter(self, prefix):
            return {"common_prefixes": [], "objects": [{"path": "run"}, {"path": "run/a"}]}

    bucket = ObjectStore("s3", lambda **options: Marked(), may_lack_conditions=False)
    assert RemoteStorage(bucket, "b/run").names() == ["a"]


def test_a_store_that_may_lack_conditions_is_looked_at_before_it_is_tried():
    """Else what somebody else has committed would be written over."""
    store = Store(conditions=False)
    store.files["run/a"] = b"of another"
    with pytest.raises(FileExistsError):
        ObjectStore("s3", lambda **options: store, may_lack_conditions=True).pipe_file("b/run/a", b"mine", "create")
    assert store.files == {"run/a": b"of another"}


def test_a_conflict_with_a_write_that_came_to_nothing_is_tried_again():
    store = Store(conditions=True)
    store.put = lambda *args, **options: (_ for _ in ()).throw(AlreadyExistsError(answer(409)))
    with pytest.raises(ConnectionError, match="conflict"):
        ObjectStore("s3", lambda **options: store, may_lack_conditions=False).pipe_file("b/a", b"1", "create")


def in_a_fork(queue):
    try:
        storage_of("s3://b/c").names()
    except Exception as error:
        queue.put(str(error))


def test_a_forked_process_is_refused_where_it_would_hang(monkeypatch):
    monkeypatch.setattr(errors, "_users", set())
    fsspec.config.conf["s3"] = {**KEYS, "endpoint_url": "http://127.0.0.1:9"}
    monkeypatch.setattr(retry, "RETRY_POLICY", retry.RetryPolicy(attempts=1))
    with pytest.raises(CheckpointError, match="1 attempts"):
        storage_of("s3://b/c").names()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_fork, args=(queue,))
    child.start()
    said = queue.get(timeout=20)
    child.join(20)
    assert child.exitcode == 0
    assert "forked from one that has used an object store" in said and "spawn" in said


def test_without_obstore_fsspecs_own_package_serves():
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from shardopt.checkpoint.storage import storage_of\n"
        "print(type(storage_of('s3://b/c')._fs).__name__)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "S3FileSystem\n"


def test_pages_of_a_listing_are_all_read():
    with object_server("gs") as server, server.reached():
        storage = storage_of(server.new_root())
        names = [f"{number:03d}" for number in range(120)]
        for name in names:
            storage.write(name, [memoryview(b"1")])
        assert storage.names() == names


def test_a_key_with_an_empty_part_is_named_where_it_hides_a_listing():
    with object_server("s3") as server, server.reached():
        root, keys = server.new_root(), {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
        storage_of(root).write("a", [memoryview(b"1")])
        client = Session().create_client("s3", endpoint_url=server.endpoint, region_name="us-east-1", **keys)
        bucket, _, prefix = root.removeprefix("s3://").partition("/")
        client.put_object(Bucket=bucket, Key=f"{prefix}//stray", Body=b"1")
        with pytest.raises(CheckpointError, match=r'run//" contained empty path segment.*; remove or rename'):
            storage_of(root).names()
        client.delete_object(Bucket=bucket, Key=f"{prefix}//stray")
        assert storage_of(root).names() == ["a"]
