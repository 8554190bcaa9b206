"""A local stand-in for the HTTP API of the Hugging Face Hub, as far as pushing a folder needs it."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "hf_right"


class Hub(ThreadingHTTPServer):
    """Repositories by name, with what was committed to each. `fails` maps the start of a step to a status."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by sha256."""
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, private: bool) -> None:
        self.repositories[name] = {"private": private, "files": {}, "messages": []}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words):
        pass

    def answer(self, status: int, body: object = None, **headers: str) -> None:
        data = json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        step = next((name for name, pattern, _ in _ROUTES if re.fullmatch(pattern, path)), "unknown")
        self.server.calls.append(step)
        if step != "store" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if step in self.server.fails:
            status = self.server.fails[step]
            if status == 0:  # the connection breaks
                return self.connection.close()
            return self.answer(status, {"error": f"{step} failed on purpose"})
        for _, pattern, function in _ROUTES:
            if found := re.fullmatch(pattern, path):
                return function(self, body, *found.groups())
        return self.answer(404, {"error": path})

    do_GET = do_POST = do_PUT = handle_any

    def whoami(self, body):
        self.answer(200, {"name": "me", "type": "user", "orgs": []})

    def info(self, body, name):
        if name not in self.server.repositories:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        private = self.server.repositories[name]["private"]
        return self.answer(200, {"id": name, "private": private, "sha": "0" * 40, "siblings": [], "tags": []})

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in self.server.repositories:
            return self.answer(409, {"error": "exists", "url": f"{self.server.address}/{name}"})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.server.add(name, private)
        return self.answer(200, {"url": f"{self.server.address}/{name}", "name": name})

    def validate(self, body):
        content = json.loads(body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no metadata"}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body, name):
        files = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular"}
            for one in json.loads(body)["files"]
        ]
        self.answer(200, {"files": [{"shouldIgnore": False, "oid": None, **one} for one in files]})

    def batch(self, body, name):
        objects = [
            {
                "oid": one["oid"],
                "size": one["size"],
                **(
                    {}
                    if one["oid"] in self.server.stored
                    else {"actions": {"upload": {"href": f"{self.server.address}/store/{one['oid']}"}}}
                ),
            }
            for one in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body, digest):
        assert hashlib.sha256(body).hexdigest() == digest
        self.server.stored[digest] = body
        self.answer(200)

    def commit(self, body, name):
        repository = self.server.repositories[name]
        for row in map(json.loads, body.splitlines()):
            value = row["value"]
            if row["key"] == "header":
                repository["messages"].append(value["summary"])
            elif row["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            else:
                repository["files"][value["path"]] = self.server.stored[value["oid"]]
        url = f"{self.server.address}/{name}/commit/{'1' * 40}"
        self.answer(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url})


_ROUTES = [
    ("whoami", r"/api/whoami-v2", _Handler.whoami),
    ("create", r"/api/repos/create", _Handler.create),
    ("validate", r"/api/validate-yaml", _Handler.validate),
    ("preupload", r"/api/models/(\w+/[\w.-]+)/preupload/main", _Handler.preupload),
    ("commit", r"/api/models/(\w+/[\w.-]+)/commit/main", _Handler.commit),
    ("info", r"/api/models/(\w+/[\w.-]+)", _Handler.info),
    ("batch", r"/(\w+/[\w.-]+)\.git/info/lfs/objects/batch", _Handler.batch),
    ("store", r"/store/(\w+)", _Handler.store),
]


@contextmanager
def running_hub():
    """A running stub, which ends with the `with`."""
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
