"""A stand-in for the Hub: what huggingface_hub, datasets, transformers and peft call to push and load, on loopback.

Repositories live in memory; a commit is all or nothing. Files of some suffixes go through LFS (basic transfer), as on
the Hub, the others inside the commit. `POST /_fail` makes later requests fail, `GET /_requests` tells what came.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".parquet", ".bin", ".png", ".pt", ".arrow")
WRITER, READER = "hf_" + "WriterCanary0123456789abc", "hf_" + "ReaderCanary0123456789abc"
_ROLES = {WRITER: "write", READER: "read"}
_KIND = r"(?P<kind>model|dataset)s"
_ID = r"(?P<id>[^/]+/[^/]+)"


@dataclass(frozen=True)
class Blob:
    """A file: its bytes, whether it lies in LFS, and its id (sha256 in LFS, else git's sha1)."""

    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The id that clients compare with what they have."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """As `tree` and `paths-info` list it."""
        found: dict[str, Any] = {"type": "file", "path": path, "size": len(self.data), "oid": self.oid}
        if self.lfs:
            found["lfs"] = {"oid": self.oid, "size": len(self.data), "pointerSize": 130}
        return found


@dataclass
class Repo:
    """kind: "model" or "dataset". refs: branch or pull request -> commit. commits: id -> path -> file."""

    id: str
    kind: str
    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, ref: str, files: dict[str, Blob], message: str) -> str:
        """Make `files` the whole content of `ref`."""
        names = "".join(f"{path}{blob.oid}" for path, blob in sorted(files.items()))
        sha = hashlib.sha1(f"{self.kind}{self.id}{len(self.commits)}{message}{names}".encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str | None:
        """The commit that a branch, a pull request or a commit id names."""
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Fault:
    """where: "commit", "put", "batch", "create" or "resolve". how: an HTTP status, or "drop": the connection breaks in
    the middle of the request. times: how often. after: requests that still go well."""

    where: str
    how: str
    times: int
    after: int = 0


class Hub:
    """State of the stand-in, and what tests ask it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.endpoint = ""
        self.store = ""  # of large files: another host, so that clients keep the headers of the redirect

    def files(self, repo: str, revision: str = "main", kind: str = "model") -> dict[str, bytes]:
        """Path -> bytes at a revision."""
        found = self.repos[kind, repo]
        return {path: blob.data for path, blob in found.commits[str(found.sha(revision))].items()}

    def fault(self, where: str) -> str | None:
        """How the request that is being answered must fail."""
        with self.lock:
            for fault in self.faults:
                if fault.where != where or not fault.times:
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault.how
        return None


class RefusalError(Exception):
    """An error answer: status, the code that clients read, a message."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    """Routes: (method, pattern of the raw path) -> method of this class with the pattern's groups."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        """Every request goes through `_answer`."""
        self._answer("GET")

    def do_HEAD(self) -> None:
        """See `do_GET`."""
        self._answer("HEAD")

    def do_POST(self) -> None:
        """See `do_GET`."""
        self._answer("POST")

    def do_PUT(self) -> None:
        """See `do_GET`."""
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self._unread = True
        try:
            if not parts.path.startswith("/_"):
                self.hub.requests.append(f"{method} {unquote(parts.path)}")
            elif method == "PUT":
                self.hub.requests.append("PUT lfs")
            for allowed, pattern, answer in ROUTES:
                match = pattern.fullmatch(parts.path)
                if match and method in allowed:
                    answer(self, **{key: unquote(value or "") for key, value in match.groupdict().items()})
                    return
            raise RefusalError(404, "", f"the stand-in has no route {method} {parts.path}")
        except RefusalError as refusal:
            self._finish_body()
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self._send(refusal.status, {"error": refusal.message}, {k: v for k, v in headers.items() if v})

    # Reading and writing.

    def _body(self) -> bytes:
        self._unread = False
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _finish_body(self) -> None:
        if self._unread:
            self._body()

    def _json(self) -> Any:
        return json.loads(self._body() or b"{}")

    def _send(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        self._finish_body()
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        for name, text in sent.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _maybe_fail(self, where: str) -> None:
        """Raises: RefusalError, or ConnectionAbortedError behind a connection that was cut."""
        how = self.hub.fault(where)
        if how is None:
            return
        if how == "drop":
            self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            raise ConnectionAbortedError
        said = self.headers.get("Authorization", "") if how == "echo" else "the stand-in fails as it was told to"
        raise RefusalError(500 if how == "echo" else int(how), "", said)

    # Who may what.

    @property
    def _role(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in _ROLES:
            raise RefusalError(401, "", "Invalid credentials in Authorization header")
        return _ROLES.get(token)

    def _writable(self) -> None:
        if self._role is None:
            raise RefusalError(401, "", "Invalid username or password.")
        if self._role != "write":
            raise RefusalError(403, "", "You need a token with write access")

    def _repo(self, kind: str, id: str) -> Repo:
        found = self.hub.repos.get((kind, id))
        if found is None or (found.private and self._role is None):
            raise RefusalError(404 if self._role else 401, "RepoNotFound", "Repository not found")
        return found

    def _files(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]]:
        sha = repo.sha(revision or "main")
        if sha is None:
            raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repo.commits[sha]

    # Routes.

    def whoami(self) -> None:
        """Who the token belongs to."""
        if self._role is None:
            raise RefusalError(401, "", "Invalid username or password.")
        token = {"role": self._role, "displayName": "test"}
        self._send(200, {"type": "user", "name": "me", "orgs": [], "auth": {"type": "token", "accessToken": token}})

    def create(self) -> None:
        """A repository with one commit, as on the Hub."""
        self._maybe_fail("create")
        given = self._json()
        self._writable()
        id, kind = f"{given.get('organization') or 'me'}/{given['name']}", given.get("type") or "model"
        if not id.startswith("me/"):
            raise RefusalError(403, "", f"You don't have the rights to create a {kind} under this namespace")
        url = f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{id}"
        with self.hub.lock:
            if (kind, id) in self.hub.repos:
                taken = {"error": "You already created this model repo", "url": url}
                self._send(409, taken)
                return
            repo = Repo(id, kind, given.get("visibility") == "private" or bool(given.get("private")))
            repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}, "initial commit")
            self.hub.repos[kind, id] = repo
        self._send(200, {"url": url, "name": id, "id": id})

    def validate_yaml(self) -> None:
        """Cards are taken as they are."""
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, kind: str, id: str, rev: str) -> None:
        """How each file is to be sent, and what lies there already."""
        given = self._json()["files"]
        self._writable()
        _, present = self._files(self._repo(kind, id), rev)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": present[file["path"]].oid if file["path"] in present else None,
            }
            for file in given
        ]
        self._send(200, {"files": modes})

    def lfs_batch(self, id: str, prefix: str = "") -> None:
        """Where to send large files; those that are here need not come again."""
        self._maybe_fail("batch")
        objects = self._json()["objects"]
        self._writable()
        answers = []
        for wanted in objects:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.lfs:
                verify = {"href": f"{self.hub.endpoint}/_verify"}
                answer["actions"] = {"upload": {"href": f"{self.hub.endpoint}/_lfs/{wanted['oid']}"}, "verify": verify}
            answers.append(answer)
        self._send(200, {"transfer": "basic", "objects": answers})

    def lfs_put(self, oid: str) -> None:
        """A large file; only whole ones are kept."""
        self._maybe_fail("put")
        data = self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            raise RefusalError(422, "", "the content does not match its id")
        self.hub.lfs[oid] = data
        self._send(200, {})

    def lfs_verify(self) -> None:
        """Whether a large file has arrived."""
        wanted = self._json()
        if len(self.hub.lfs.get(wanted["oid"], b"")) != wanted["size"]:
            raise RefusalError(404, "", "not here")
        self._send(200, {})

    def commit(self, kind: str, id: str, rev: str) -> None:
        """All operations, or none."""
        self._maybe_fail("commit")
        lines = [json.loads(line) for line in self._body().splitlines()]
        self._writable()
        repo = self._repo(kind, id)
        with self.hub.lock:
            sha, present = self._files(repo, rev)
            header = next(line["value"] for line in lines if line["key"] == "header")
            if header.get("parentCommit") not in (None, sha):
                raise RefusalError(412, "", "A commit has happened since. Please refresh and try again.")
            files, ref, answer = dict(present), rev, {}
            if self.query.get("create_pr"):
                ref = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in repo.refs)}"
                answer["pullRequestUrl"] = f"{self.hub.endpoint}/{id}/discussions/{ref.rpartition('/')[2]}"
            for line in lines:
                self._apply(line["key"], line["value"], files)
            sha = repo.commit(ref, files, header["summary"])
        prefix = "datasets/" if kind == "dataset" else ""
        url = f"{self.hub.endpoint}/{prefix}{id}/commit/{sha}"
        self._send(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": "", **answer})

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, Blob]) -> None:
        if key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in self.hub.lfs:
                raise RefusalError(422, "", f"{value['path']}: its LFS object has not been uploaded")
            files[value["path"]] = Blob(self.hub.lfs[value["oid"]], True)
        elif key == "deletedFile":
            if value["path"] not in files:
                raise RefusalError(404, "EntryNotFound", "A file with this name doesn't exist")
            del files[value["path"]]
        elif key == "deletedFolder":
            for path in [path for path in files if path.startswith(value["path"].rstrip("/") + "/")]:
                del files[path]

    def info(self, kind: str, id: str, rev: str = "") -> None:
        """What a repository holds."""
        repo = self._repo(kind, id)
        sha, files = self._files(repo, rev)
        siblings = [{"rfilename": path} for path in sorted(files)]
        known = {"private": repo.private, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
        self._send(200, {"id": id, f"{kind}Id": id, "sha": sha, "siblings": siblings, "author": "me", **known})

    def tree(self, kind: str, id: str, rev: str, path: str = "") -> None:
        """Files and folders, one level or all."""
        _, files = self._files(self._repo(kind, id), rev)
        path = path.strip("/")
        below = {name: blob for name, blob in files.items() if not path or name.startswith(f"{path}/")}
        if path and not below:
            raise RefusalError(404, "EntryNotFound", f"{path} does not exist")
        rest = {name: name[len(path) + 1 if path else 0 :] for name in below}
        folders = {name[: len(name) - len(tail)] + part for name, tail in rest.items() for part in _parents(tail)}
        everything = self.query.get("recursive", "").lower() in ("true", "1")
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
            for name in sorted(folders)
            if everything or "/" not in name[len(path) + 1 if path else 0 :]
        ]
        entries += [blob.entry(name) for name, blob in below.items() if everything or "/" not in rest[name]]
        self._send(200, entries)

    def paths_info(self, kind: str, id: str, rev: str) -> None:
        """What lies at some paths; those that do not exist are left out."""
        raw = self._body()
        if self.headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded"):
            paths = parse_qs(raw.decode()).get("paths", [])
        else:
            given = json.loads(raw)["paths"]
            paths = [given] if isinstance(given, str) else given
        _, files = self._files(self._repo(kind, id), rev)
        entries = [files[path].entry(path) for path in paths if path in files]
        entries += [
            {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
            for path in paths
            if path not in files and any(name.startswith(f"{path}/") for name in files)
        ]
        self._send(200, entries)

    def refs(self, kind: str, id: str) -> None:
        """Branches and pull requests."""
        repo = self._repo(kind, id)
        all_refs = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in repo.refs.items()
            if not name.startswith("refs/")
        ]
        self._send(200, {"branches": all_refs, "converts": [], "tags": []})

    def branch(self, kind: str, id: str, rev: str) -> None:
        """A new branch from `main`."""
        self._writable()
        repo = self._repo(kind, id)
        if rev in repo.refs:
            raise RefusalError(409, "", "Reference already exists")
        repo.refs[rev] = repo.refs["main"]
        self._send(200, {})

    def auth_check(self, kind: str, id: str, write: str = "") -> None:
        """Whether the token may read, or write."""
        self._repo(kind, id)
        if write:
            self._writable()
        self._send(200, {})

    def resolve(self, id: str, rev: str, path: str, prefix: str = "") -> None:
        """A file, with the headers that the cache of clients is built on; large ones by a redirect, as on the Hub."""
        self._maybe_fail("resolve")
        repo = self._repo("dataset" if prefix else "model", id)
        sha, files = self._files(repo, rev)
        if path not in files:
            raise RefusalError(404, "EntryNotFound", "Entry not found")
        blob = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            self._data(blob.data, headers)
            return
        headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.data))}
        self._send(302, b"", {**headers, "Location": f"{self.hub.store}/_lfs/{blob.oid}"})

    def lfs_get(self, oid: str) -> None:
        """A large file."""
        self._data(self.hub.lfs[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _data(self, data: bytes, headers: dict[str, str]) -> None:
        headers = {"Content-Type": "application/octet-stream", **headers}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, data, headers)
            return
        start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        self._send(206, data[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"})

    def fail(self) -> None:
        """Later requests fail as told: fields of `Fault`; of an empty list none."""
        self.hub.faults = [Fault(**fault) for fault in self._json()]
        self._send(200, {})

    def told(self) -> None:
        """Requests so far."""
        self._send(200, self.hub.requests)


def _parents(path: str) -> Iterator[str]:
    """`a`, `a/b` of `a/b/c`."""
    parts = path.split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts)))


def _route(methods: str, pattern: str, answer: Callable[..., None]) -> tuple[set[str], re.Pattern[str], Any]:
    return set(methods.split()), re.compile(pattern), answer


_API = rf"/api/{_KIND}/{_ID}"
_PLACE = rf"/(?P<prefix>datasets/)?{_ID}"
ROUTES = [
    _route("GET", "/api/whoami-v2", Handler.whoami),
    _route("POST", "/api/repos/create", Handler.create),
    _route("POST", "/api/validate-yaml", Handler.validate_yaml),
    _route("POST", rf"{_API}/preupload/(?P<rev>[^/]+)", Handler.preupload),
    _route("POST", rf"{_API}/commit/(?P<rev>[^/]+)", Handler.commit),
    _route("GET", _API, Handler.info),
    _route("GET", rf"{_API}/revision/(?P<rev>[^/]+)", Handler.info),
    _route("GET", rf"{_API}/tree/(?P<rev>[^/]+)(?P<path>/.*)?", Handler.tree),
    _route("POST", rf"{_API}/paths-info/(?P<rev>[^/]+)", Handler.paths_info),
    _route("GET", rf"{_API}/refs", Handler.refs),
    _route("GET", rf"{_API}/auth-check(?P<write>/write)?", Handler.auth_check),
    _route("POST", rf"{_API}/branch/(?P<rev>[^/]+)", Handler.branch),
    _route("POST", rf"{_PLACE}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    _route(
        "GET HEAD", r"/(?P<prefix>datasets/)?(?P<id>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)", Handler.resolve
    ),
    _route("PUT", "/_lfs/(?P<oid>[0-9a-f]+)", Handler.lfs_put),
    _route("GET HEAD", "/_lfs/(?P<oid>[0-9a-f]+)", Handler.lfs_get),
    _route("POST", "/_verify", Handler.lfs_verify),
    _route("POST", "/_fail", Handler.fail),
    _route("GET", "/_requests", Handler.told),
]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that a test cuts are no news."""


@contextmanager
def running() -> Iterator[Hub]:
    """The stand-in on a free port of loopback until the block ends."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    hub.store = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


__all__ = ["READER", "WRITER", "Hub", "running"]
