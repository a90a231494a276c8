"""Named data sets, downloaded by the hub's own client from a small local server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from pyarrow import parquet

COMMIT = "c0ffee" * 6 + "c0ff"
READ = """
import json, sys
from itertools import islice
from outrider.data.sources import data_source, suite_source
source = (suite_source if sys.argv[1] == "suite" else data_source)(sys.argv[2])
print(json.dumps([list(islice(source.rows(), 3)), source.fingerprint(), source.describe()]))
"""


class Hub:
    """Data set repositories: one folder for each, `org/name`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []

    def reply(self, path: str) -> tuple[int, Any]:
        """Return status and body: an object for JSON, bytes for a file."""
        parts = [part for part in unquote(urlsplit(path).path).split("/") if part]
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            folder = self.root / parts[2] / parts[3]
            if not folder.is_dir():
                return 404, {"error": "Repository not found"}
            if parts[4:5] in ([], ["revision"]):
                return 200, self.info(folder, "/".join(parts[2:4]))
            entries = self.children(folder, folder.joinpath(*parts[6:]))
            return (200, entries) if entries else (404, {"error": "Entry not found"})
        if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
            file = self.root / parts[1] / parts[2] / "/".join(parts[5:])
            return (200, file.read_bytes()) if file.is_file() else (404, {"error": "no entry"})
        return 404, {"error": "Not here"}

    def info(self, folder: Path, name: str) -> dict[str, Any]:
        files = [{"rfilename": entry["path"]} for entry in self.entries(folder)]
        return {
            "id": name, "sha": COMMIT, "siblings": files, "private": False, "gated": False,
            "disabled": False, "downloads": 0, "likes": 0, "tags": [],
        }  # fmt: skip

    def children(self, folder: Path, under: Path) -> list[dict[str, Any]]:
        """Return one level of the tree: files and folders."""
        folders = [f for f in sorted(under.glob("*")) if f.is_dir()]
        folder_entries = [
            {"type": "directory", "path": str(f.relative_to(folder)), "size": 0, "oid": "0" * 40}
            for f in folders
        ]
        files = {str(f.relative_to(folder)) for f in under.glob("*") if f.is_file()}
        return [*folder_entries, *(e for e in self.entries(folder) if e["path"] in files)]

    def entries(self, folder: Path) -> list[dict[str, Any]]:
        return [
            {
                "type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size,
                "oid": sha1(f.read_bytes()).hexdigest(),
            }
            for f in sorted(folder.rglob("*")) if f.is_file()
        ]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Hub, str]]:
    hub = Hub(tmp_path / "hub")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def answer(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, body = hub.reply(self.path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            total, first = len(data), 0
            if status == 200 and (byte_range := self.headers.get("Range")):
                low, _, high = byte_range.removeprefix("bytes=").partition("-")
                first, status = int(low), 206
                data = data[first : int(high) + 1 if high else None]
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
            if status == 404:
                kind = "EntryNotFound" if "resolve" in self.path else "RepoNotFound"
                self.send_header("X-Error-Code", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{sha1(data).hexdigest()}"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = answer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def read(address: str, home: Path, kind: str, location: str) -> tuple[list[Any], str, str]:
    """Read a source in another process: the client takes its address when it is imported."""
    environ = os.environ | {
        "HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", READ, kind, location], env=environ, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, fingerprint, summary = json.loads(done.stdout.splitlines()[-1])
    return rows, fingerprint, summary


def table(file: Path, *rows: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=1000)


@pytest.mark.slow
def test_a_named_data_set_is_streamed_from_the_hub(hub: tuple[Hub, str], tmp_path: Path) -> None:
    """Split, subset and commit; of many files only the first is downloaded."""
    server, address = hub
    gsm8k = server.root / "openai" / "gsm8k"
    for i in range(3):
        problems = ({"question": f"{i}-{n}?", "answer": "4"} for n in range(100))
        table(gsm8k / "main" / f"train-0000{i}-of-00003.parquet", *problems)
    table(gsm8k / "main" / "test-00000-of-00001.parquet", {"question": "t?", "answer": "4"})
    table(gsm8k / "socratic" / "train-00000-of-00001.parquet", {"question": "s?", "answer": "4"})
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n"
        "- config_name: socratic\n  data_files:\n"
        "  - split: train\n    path: socratic/train-*\n---\n"
    )
    rows, fingerprint, summary = read(address, tmp_path / "home", "data", "gsm8k")
    assert [row["question"] for row in rows] == ["0-0?", "0-1?", "0-2?"]
    assert COMMIT in fingerprint
    assert summary == "gsm8k: openai/gsm8k (train), licence MIT"
    downloads = {line for line in server.requests if line.startswith("GET") and "resolve" in line}
    assert any("train-00000-of" in line for line in downloads)
    assert not any("train-00001-of" in line or "train-00002-of" in line for line in downloads)
    rows, _, _ = read(address, tmp_path / "home", "suite", "gsm8k")
    assert [row["prompt"] for row in rows] == ["t?"]


@pytest.mark.slow
def test_one_file_of_a_repository_is_downloaded_by_the_hubs_client(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    server, address = hub
    folder = server.root / "Aeala" / "ShareGPT_Vicuna_unfiltered"
    folder.mkdir(parents=True)
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    row = {"id": "a_0", "conversations": turns}
    (folder / "ShareGPT_V4.3_unfiltered_cleaned_split.json").write_text(json.dumps([row] * 5))
    (folder / "other.json").write_text("[]")
    rows, _, _ = read(address, tmp_path / "home", "data", "sharegpt")
    assert [r["conversations"] for r in rows] == [turns] * 3
    assert not any("other.json" in line for line in server.requests if "resolve" in line)
