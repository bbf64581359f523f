"""Models of the Hub, from a server of this machine, read in processes of their own."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longctx.hub_snapshot import is_snapshot, model_name
from tests.processes import finished

OLD, NEW = "a" * 40, "b" * 40
TOKEN = "hf_secretsecretsecret"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    **dict.fromkeys(("model.safetensors", "consolidated.safetensors"), b"weights"),
    **dict.fromkeys(("pytorch_model.bin", "modeling_llama.py", "onnx/config.json"), b"not ours"),
}
SETTINGS = {"config.json", "tokenizer.json", "chat_template.jinja"}
# Model → status and code, as the Hub answers, and words of the line that says so
ERRORS = {
    "me/gated": (403, "GatedRepo", ["gated", "HF_TOKEN"]),
    "me/missing": (401, "RepoNotFound", ["no such folder here", "HF_TOKEN"]),
    "me/broken": (500, "", ["500", "try again later"]),
    "me/often": (429, "", ["429", "try again later"]),
    "me/small@nosuch": (404, "RevisionNotFound", ["revision"]),
}
SCRIPT = """
import sys
from longctx import hub_snapshot
for name in sys.argv[1].split(","):
    try:
        name = hub_snapshot.pinned(name, "init")
        print(name)
        print(hub_snapshot.folder(name, "init", sys.argv[2:]))
    except (ValueError, OSError) as error:
        print(f"error: {error}")
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's protocol that downloads need."""

    commit = NEW
    requests: list[str] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.requests.append(path)
        parts = path.removeprefix("api/models/").split("/")
        asked = "/".join(parts[:2]) + ("@nosuch" if "nosuch" in parts else "")
        status, code, _ = ERRORS.get(asked, (200, "", []))
        if status != 200:
            self.answer(status, b"no", {"X-Error-Code": code, "X-Error-Message": code})
        elif "tree" in parts:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{number:040x}"}
                for number, (name, content) in enumerate(FILES.items())
            ]
            self.answer(200, listed)
        elif path.startswith("api/"):
            sha = OLD if parts[-1] == "old" else type(self).commit
            self.answer(200, {"id": "me/small", "sha": sha, "siblings": []})
        else:
            etag = f'"{list(FILES).index("/".join(parts[4:])):040x}"'
            headers = {"ETag": etag, "X-Repo-Commit": parts[3]}
            self.answer(200, FILES["/".join(parts[4:])], headers)

    def answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


Answer = tuple[int, list[str], str]  # exit code, lines of stdout, stderr


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Answer]]:
    """Run a script in a process with a cache of its own, and the Hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Hub.commit = NEW
    Hub.requests.clear()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    settings = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN}

    def run(*words: str, script: str = SCRIPT, **variables: str) -> Answer:
        process = finished("-c", [script, *words], Path.cwd(), **settings | variables)
        assert TOKEN not in process.stdout + process.stderr
        return process.returncode, process.stdout.splitlines(), process.stderr

    yield run
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_name_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_name("me/small") == ("me/small", None)
    assert model_name("me/small-1.5@v1.0") == ("me/small-1.5", "v1.0")
    for path in ("small", "./me", "/me", "~/me", "me/small/", "a/b/c", "me/../small", "me/s p", ""):
        assert model_name(path) is None
    (tmp_path / "me").mkdir()
    assert model_name("me/small") is None  # misspelt, as runs/NAME may be
    assert model_name("me/small@main") == ("me/small", "main")
    (tmp_path / "you").mkdir()
    (tmp_path / "you" / "small@main").mkdir()
    assert model_name("you/small@main") is None


def test_a_folder_of_the_cache_is_known_on_another_machine():
    place = f"/elsewhere/hub/models--me--small/snapshots/{OLD}"
    assert is_snapshot(place, f"me/small@{OLD}")
    assert not is_snapshot(place, f"me/small@{NEW}")
    assert not is_snapshot("me/small", "me/small") and not is_snapshot(None, "runs/a")


def test_only_settings_and_named_weights_arrive(machine, tmp_path):
    code, (name, place), err = machine("me/small", "model.safetensors")
    assert code == 0, err
    assert name == f"me/small@{NEW}"
    assert Path(place) == tmp_path / "models--me--small" / "snapshots" / NEW
    there = {str(file.relative_to(place)) for file in Path(place).rglob("*")}
    assert there == SETTINGS | {"model.safetensors"}
    assert all((Path(place) / name).read_bytes() == FILES[name] for name in there)
    assert not any(".bin" in path or ".py" in path for path in Hub.requests)

    Hub.commit = OLD  # the branch moves on; what a run has recorded does not
    Hub.requests.clear()
    assert machine(name, "model.safetensors")[1] == [name, place]
    assert not Hub.requests
    assert machine("me/small@old")[1][0] == f"me/small@{OLD}"


def test_what_another_program_has_left_out_of_the_cache_is_downloaded(machine, tmp_path):
    place = tmp_path / "models--me--small" / "snapshots" / NEW
    place.mkdir(parents=True)
    (place / "config.json").write_bytes(FILES["config.json"])
    name = f"me/small@{NEW}"
    assert machine(name, "model.safetensors")[:2] == (0, [name, str(place)])
    assert {path.name for path in place.iterdir()} == SETTINGS | {"model.safetensors"}


PICKLES = """
from longctx.hf.model_folder import with_weights
try:
    with_weights("me/small", "init")
except OSError as error:
    print(error)
"""


def test_a_model_of_pickles_alone_is_no_matter_of_a_login(machine, monkeypatch):
    monkeypatch.delitem(FILES, "model.safetensors")
    code, [line], err = machine(script=PICKLES)
    assert code == 0 and "give one in safetensors" in line and "log in" not in line, err


FULL = """
import errno, os, huggingface_hub
from longctx import files, hub_snapshot

def full(*args, **options):
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise RuntimeError("no chunk could be written") from error

huggingface_hub.snapshot_download = full
try:
    hub_snapshot.pinned("me/small", "init")
except Exception as error:
    print(files.is_full(error), error)
"""


def test_a_full_disk_is_no_matter_of_a_login(machine):
    assert machine(script=FULL) == (0, ["True no chunk could be written"], "")


def test_the_cache_answers_without_the_hub_if_it_is_whole(machine, monkeypatch):
    lines = machine("me/small", "model.safetensors")[1]
    Hub.requests.clear()
    offline = machine("me/small", "model.safetensors", HF_HUB_OFFLINE="1")
    assert offline == (0, lines, "")
    assert not Hub.requests
    unreachable = machine("me/small", HF_ENDPOINT="http://127.0.0.1:9")
    monkeypatch.setitem(ERRORS, "me/small", (429, "", []))
    for code, cached, err in (unreachable, machine("me/small")):
        assert (code, cached) == (0, lines)
        assert "using the cache" in err
    for file in ("model.safetensors", "tokenizer.json"):
        Path(lines[1], file).unlink()
        *_, line = machine(lines[0], "model.safetensors", HF_HUB_OFFLINE="1")[1]
        assert line.startswith(f"error: init={lines[0]}: ") and "pickles" not in line
    where = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "refused" in machine("me/small", "model.safetensors", **where)[1][-1]


def test_a_sweep_asks_for_one_commit_once(machine):
    script = "import json, sys; from longctx.cli.commands import checked_jobs; "
    script += "print(json.dumps(checked_jobs(sys.argv[1:])))"
    words = ("init=me/small", "data=embedded", "seq_len=64,128", "lr=0.1,0.2", "device=cpu")
    code, [jobs], err = machine(*words, script=script)
    assert code == 0, err
    assert [job[0] for job in json.loads(jobs)] == [f"init=me/small@{NEW}"] * 4
    questions = [path for path in Hub.requests if path.startswith("api/models/")]
    assert len(questions) == len(set(questions)) > 0


OFFLINE = {name: ["HF_HUB_OFFLINE"] for name in ("me/small", f"me/small@{NEW}")}


@pytest.mark.parametrize(
    ("answers", "variables"),
    [
        ({name: words for name, (_, _, words) in ERRORS.items()}, {}),
        (OFFLINE, {"HF_HUB_OFFLINE": "1"}),
        ({"me/small": ["refused", "local path"]}, {"HF_ENDPOINT": "http://127.0.0.1:9"}),
    ],
    ids=["refused", "offline", "unreachable"],
)
def test_what_cannot_be_had_is_one_line(machine, answers, variables):
    code, lines, err = machine(",".join(answers), **variables)
    assert code == 0 and "Traceback" not in err, err
    for line, (name, words) in zip(lines, answers.items(), strict=True):
        assert line.startswith(f"error: init={name}: ")
        assert all(word in line for word in words), line
