"""Whether paceline and huggingface_hub share one cache.

    python crates/hub/tests/interop.py target/release/paceline

Serves a small repository on this machine, lets each program fetch it into a cache of its own, and compares the caches
link by link; then each reads what the other has fetched, offline. Needs the package huggingface_hub.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/model"
FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": b"{}",
    "sub/extra.json": b"[]",
    "model.safetensors": bytes(range(256)) * 5000,
}


def is_large(name):
    return name.endswith(".safetensors")


def etag(name):
    data = FILES[name]
    return hashlib.sha256(data).hexdigest() if is_large(name) else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, body=b"", **headers):
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            siblings = [{"rfilename": n, "size": len(b)} for n, b in FILES.items()]
            if "/tree/" in path:
                answer = [{"type": "file", "path": n, "size": len(b), "oid": etag(n)} for n, b in FILES.items()]
            else:
                answer = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.send(200, json.dumps(answer).encode(), Content_Type="application/json")
        name = path.split(f"/resolve/{COMMIT}/")[-1].split("/resolve/main/")[-1]
        if name not in FILES:
            return self.send(404, X_Error_Code="EntryNotFound")
        data, facts = FILES[name], {"ETag": f'"{etag(name)}"', "X_Repo_Commit": COMMIT}
        if is_large(name) and not path.startswith("/cdn"):
            facts |= {"X_Linked_Etag": f'"{etag(name)}"', "X_Linked_Size": str(len(data))}
            place = f"http://localhost:{self.server.server_port}/cdn{path}"
            return self.send(302, Location=place, **facts)
        if wanted := self.headers.get("Range"):
            begin, end = wanted.removeprefix("bytes=").split("-")
            begin, end = int(begin), int(end or len(data) - 1)
            part = data[begin : end + 1]
            return self.send(206, part, Content_Range=f"bytes {begin}-{begin + len(part) - 1}/{len(data)}", **facts)
        if self.command == "HEAD":
            facts["Content_Length"] = str(len(data))
        self.send(200, data, **facts)

    do_HEAD = do_GET


def tree(cache):
    """Files by contents, links by target; without locks and what only one program keeps for itself."""
    root = Path(cache) / f"models--{REPO.replace('/', '--')}"
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file() and not name.startswith((".", "trees/")):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def main(paceline):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/ours", f"{folder}/theirs"
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HOME": folder, "HF_HUB_DISABLE_XET": "1"}

        def pull(cache, *more, **changes):
            command = [paceline, "pull", REPO, *more]
            return subprocess.run(
                command, env=environment | {"HF_HUB_CACHE": cache} | changes, capture_output=True, text=True
            )

        def snapshot(cache, offline):
            code = (
                "import huggingface_hub as h\n"
                f"print(h.snapshot_download('{REPO}', local_files_only={offline}))"
            )
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=environment | {"HF_HUB_CACHE": cache}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip().splitlines()[-1]

        done = pull(ours)
        assert done.returncode == 0, done.stderr
        path = snapshot(theirs, False)
        assert path.replace(theirs, ours) == done.stdout.strip(), (path, done.stdout)
        assert tree(ours) == tree(theirs), (tree(ours), tree(theirs))
        # huggingface_hub finds what paceline has fetched, and asks nobody.
        assert snapshot(ours, True) == done.stdout.strip()
        # paceline finds all that huggingface_hub has fetched, and takes over what it has begun.
        before = tree(theirs)
        assert pull(theirs).returncode == 0 and tree(theirs) == before
        blob = Path(theirs) / "models--org--model/blobs" / etag("model.safetensors")
        data = blob.read_bytes()
        blob.unlink()
        blob.with_name(blob.name + ".incomplete").write_bytes(data[:700_000])
        assert pull(theirs).returncode == 0 and tree(theirs) == before
        listed = subprocess.run(
            [paceline, "list", "--json"], env=environment | {"HF_HUB_CACHE": theirs}, capture_output=True, text=True
        )
        models = json.loads(listed.stdout)["models"]
        assert [(m["id"], m["incomplete"]) for m in models] == [(REPO, None)], models
    print(f"{len(before)} entries alike")


if __name__ == "__main__":
    main(sys.argv[1])
