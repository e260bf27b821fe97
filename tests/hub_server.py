"""A stand-in for the Hugging Face hub on 127.0.0.1: repositories are created, and commits of small files are kept."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin"


@dataclass
class Hub:
    """What the server has: repository -> whether it is private, and its files."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    checked_cards: int = 0
    fails_at: str = ""
    """Part of a path whose requests fail."""


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self, code: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "Invalid credentials"})
            if hub.fails_at and hub.fails_at in self.path:
                return self.answer(403, {"error": "no space left for you"})
            if self.path == "/api/repos/create":
                return self.create(json.loads(body))
            if self.path == "/api/validate-yaml":
                hub.checked_cards += 1
                return self.answer(200, {"errors": [], "warnings": []})
            name, action = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", self.path).groups()
            return self.preupload(json.loads(body)) if action == "preupload" else self.commit(name, body)

        def create(self, wanted):
            name = f"{wanted.get('organization', 'me')}/{wanted['name']}"
            if name in hub.private:
                return self.answer(409, {"error": "exists", "url": f"{hub.url}/{name}"})
            private = wanted.get("private") or wanted.get("visibility") == "private"  # by versions of the client
            hub.private[name] = bool(private)
            return self.answer(200, {"url": f"{hub.url}/{name}", "name": name})

        def preupload(self, wanted):
            modes = [{"path": file["path"], "uploadMode": "regular"} for file in wanted["files"]]
            self.answer(200, {"files": [mode | {"shouldIgnore": False} for mode in modes]})

        def commit(self, name, body):
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    hub.files.setdefault(name, {})[value["path"]] = base64.b64decode(value["content"])
            self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
