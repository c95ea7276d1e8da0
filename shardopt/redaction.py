"""Removes passwords and signatures from URLs in errors, logs, reports, and stored files.

Who opens a URL has it whole. Errors and problems (`errors.py`), lines of the loggers of this package, reports of calls
and what the shell prints go through `redacted`, so that nobody who formats a URL into a message has to think of it.
"""

from __future__ import annotations

import logging
import re

SHOWN_INSTEAD = "***"

_URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")
# A password may have what belongs into no URL: "/" or "?", or an "@".
_USER = re.compile(r"://(?:[^\s/]*|[^\s/@:\[]*:(?!\d*/)[^\s@]*)@")
_ACCOUNT = re.compile(r"(?:abfss?|azure|adl|wasbs?)://[^\s/@:]*\Z")  # whose "container@account" is no secret
_QUERY = re.compile(r"[?#](?=\S*=)\S*|\?\S+")
_VALUE = re.compile(r"=[^\s&;]*")
_END = re.compile(r"""['"`)\]}>:,;.]*\Z""")
_RELATIVE = re.compile(r"(?<=with url: )/\S*\?\S+")  # as urllib3 says it


def redacted(text: str) -> str:
    """Returns a text whose URLs have no user names, passwords, or query values: "s3://***@host/a?sig=***".

    Texts without a URL are returned as they are.
    """
    if "://" in text:
        text = _URL.sub(lambda match: _without_secrets(match[0]), text)
    return _RELATIVE.sub(lambda match: _without_values(match[0]), text) if "with url: " in text else text


def _without_secrets(url: str) -> str:
    def user(match: re.Match[str]) -> str:
        before = url[: match.end() - 1].rpartition("::")[2]
        return match[0] if _ACCOUNT.match(before) else f"://{SHOWN_INSTEAD}@"

    return _without_values(_USER.sub(user, url))


def _without_values(url: str) -> str:
    def query(match: re.Match[str]) -> str:
        end = _END.search(match[0])
        said = match[0][: end.start()] if end else match[0]
        rest = match[0][len(said) :]
        if "=" not in said:
            return said[:1] + SHOWN_INSTEAD + rest
        return _VALUE.sub(f"={SHOWN_INSTEAD}", said) + rest

    return _QUERY.sub(query, url)


def without_secrets(error: BaseException) -> BaseException:
    """Returns an error to be named as a cause: itself, or one without secrets if it contains any.

    Clients put URLs and headers into their errors, which a traceback prints.
    """
    said = f"{error} {error!r}"
    causes = [each for each in (error.__cause__, error.__context__) if each is not None and each is not error]
    is_fit = redacted(said) == said and "authorization" not in said.lower()
    if is_fit and all(without_secrets(each) is each for each in causes):
        return error
    text = redacted(str(error))
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    number = getattr(error, "errno", None)
    try:
        other = known(number, text) if issubclass(known, OSError) and isinstance(number, int) else known(text)
    except TypeError:  # of the few that take other arguments, such as UnicodeDecodeError
        other = Exception(f"{type(error).__name__}: {text}")
    return other.with_traceback(error.__traceback__)


class _Filter(logging.Filter):
    """Redacts what a logger is given, and the errors that it prints."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (said := redacted(message)) != message:
            record.msg, record.args = said, None
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True


LOGGERS = ("shardopt", "shardopt.checkpoint")
"""All loggers of this package, as a filter does not apply to child loggers."""

_filter = _Filter()
for _name in LOGGERS:
    logging.getLogger(_name).addFilter(_filter)
