"""Multipart uploads of large files to S3, several parts at a time.

s3fs's own file objects send one part after the other, and its `put` and `pipe` want the whole file on a disk or in
memory; so the parts are sent here, with s3fs's `call_s3`. Nothing exists under the file's name until its upload is
completed. One that fails is aborted, and the store drops its parts.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from shardopt.checkpoint.storage.retry import Requests, run_in_thread
from shardopt.world import Future, world

PART_BYTES = 8 << 20  # S3 takes none below 5 MiB but the last
PARTS_AT_ONCE = 8  # no more are in memory, but for the one that is being made


def has_multipart(fs: Any) -> bool:
    """Whether `upload` can be used: with s3fs, and file systems that derive from it."""
    return hasattr(fs, "call_s3") and hasattr(fs, "split_path")


def upload(fs: Any, requests: Requests, path: str, parts: Iterable[bytearray]) -> int:
    """Uploads the parts of a file, which exists once this returns. Returns its size in bytes.

    Raises:
        ConnectionError: the store has lost parts that it had taken; the file may be sent again.
        OSError, CheckpointError: as `Requests.call`.
    """
    bucket, key, _ = fs.split_path(path)
    doing = f"write {fs.unstrip_protocol(path)}"
    names = {"Bucket": bucket, "Key": key}
    created = requests.call(doing, "call_s3", "create_multipart_upload", **names)
    names["UploadId"] = created["UploadId"]
    running: set[Future[dict[str, Any]]] = set()
    completed: list[dict[str, Any]] = []
    total = 0

    def send(number: int, part: bytearray) -> dict[str, Any]:
        answer = requests.call(
            f"{doing} (part {number})", "call_s3", "upload_part", **names, PartNumber=number, Body=part
        )
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum") and value}
        checksums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def collect_finished() -> None:
        done = world().wait_for_any(running)
        running.difference_update(done)
        completed.extend(future.result() for future in done)

    try:
        for number, part in enumerate(parts, 1):
            total += len(part)
            running.add(run_in_thread(partial(send, number, part)))
            if len(running) == PARTS_AT_ONCE:
                collect_finished()
        while running:
            collect_finished()
        completed.sort(key=lambda part: int(part["PartNumber"]))
        _complete(requests, doing, names, completed)
    except BaseException:
        # Not before the parts have come to an end: one that arrives after the upload is aborted stays, and is paid for.
        world().wait_for_all(running)
        with suppress(Exception):  # the error that is being raised must not be hidden by another
            requests.once("call_s3", "abort_multipart_upload", **names)
        raise
    return total


def _complete(requests: Requests, doing: str, names: dict[str, str], completed: list[dict[str, Any]]) -> None:
    def complete() -> bool:
        """Completes the upload; returns whether the store has all the parts that it had acknowledged."""
        try:
            requests.once("call_s3", "complete_multipart_upload", **names, MultipartUpload={"Parts": completed})
        except FileNotFoundError:
            pass  # no such upload: an attempt before this one has completed it, or the size of the file will tell
        except OSError as error:
            if error.errno == errno.EINVAL:  # InvalidPart, EntityTooSmall
                return False
            raise
        return True

    if not requests.repeat(doing, complete):
        raise ConnectionError("the store has lost parts of an upload")
