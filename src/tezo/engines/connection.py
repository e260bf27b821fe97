"""A server at an address: one request is sent, and what comes back is read, up to a limit."""

import json
import os
from dataclasses import dataclass
from typing import Any

import requests
from urllib3.exceptions import HTTPError

from tezo.forward.answers import MalformedError
from tezo.forward.engine import EngineLostError
from tezo.system.errors import RequestError

SECONDS_TO_CONNECT, SECONDS_OF_AN_ANSWER = 5.0, 600.0
PART = 1 << 16
"""Bytes of an answer that are read at once."""
KEY = "VLLM_API_KEY"
"""Variable of the environment: the key of a server."""
JSON = "application/json"
MOST_SHOWN = 80
"""Characters of a wrong answer that an error has."""


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        status: of HTTP.
        kind: type of its content, without parameters; "" where it has none.
        body: its content.
        place: where a redirect leads; "" elsewhere.
    """

    status: int
    kind: str
    body: bytes
    place: str

    @property
    def text(self) -> str:
        """The content as text."""
        return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """Returns the content as JSON.

        Raises:
            MalformedError: it is not JSON, or is not said to be.
        """
        if self.kind != JSON:
            raise MalformedError(f"content of type {shown(self.kind)} in place of {JSON}: {shown(self.text)}")
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise MalformedError(f"text that is not JSON: {shown(self.text)}") from None


def shown(value: Any) -> str:
    """Returns the beginning of a JSON value, in printable characters."""
    text = json.dumps(value[:MOST_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


class Connection:
    """A server.

    Args:
        address: of it, without /v1.

    Attributes:
        address: of it.
    """

    def __init__(self, address: str) -> None:
        if "@" in address:
            raise RequestError(f"model.engine has a password in it; put the key of the server into ${KEY} instead.")
        key = os.environ.get(KEY)
        self.address = address.rstrip("/").removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def send(self, verb: str, path: str, body: Any, most: int) -> Reply:
        """Sends a request, with a body of JSON, and returns the answer; a redirect is not followed.

        Args:
            verb: GET or POST.
            path: behind the address.
            body: JSON value; None: there is none.
            most: bytes of the longest right answer.

        Raises:
            EngineLostError: there is no answer, or not all of one.
            MalformedError: the answer is longer, or cannot be unpacked.
        """
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxy, and no key of another place
                with session.request(
                    verb,
                    self.address + path,
                    json=body,
                    headers=self._headers,
                    timeout=(SECONDS_TO_CONNECT, SECONDS_OF_AN_ANSWER),
                    allow_redirects=False,
                    stream=True,
                ) as answer:
                    content = self._content(answer, most)
        except requests.exceptions.ContentDecodingError:
            raise MalformedError("content that cannot be unpacked") from None
        except (requests.RequestException, HTTPError) as error:
            raise EngineLostError(
                f"model.engine: the server at {self.address} does not answer ({type(error).__name__}); start it, or "
                "give another address."
            ) from None
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Reply(answer.status_code, kind, content, answer.headers.get("Location", ""))

    def _content(self, answer: requests.Response, most: int) -> bytes:
        found = bytearray()
        for part in answer.iter_content(PART):
            found += part
            if len(found) > most:
                raise MalformedError(
                    f"more than {most:,} bytes, which begin with {shown(found[:MOST_SHOWN].decode('latin-1'))}"
                )
        return bytes(found)
