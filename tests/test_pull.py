"""steel pull, list, rm and models by name, against a server that plays the Hub: redirects, tokens, cuts, wrong bytes, no room."""
import hashlib
import json
import os
import re
import pty
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))
from hub_server import SHA, Hub
from serverlib import HANG, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.abspath(BUILD + "/steel")
DIR = tempfile.TemporaryDirectory(prefix="steel-pull-")
subprocess.run([BUILD + "/tests/toy_gguf", DIR.name + "/toy.gguf"], check=True)
with open(DIR.name + "/toy.gguf", "rb") as f:
    TOY = f.read()


class Cache:
    def __init__(self, hub):
        self.dir = tempfile.TemporaryDirectory(prefix="steel-hub-")
        self.env = {"HOME": self.dir.name, "HF_HOME": self.dir.name, "HF_ENDPOINT": hub.url, "PATH": os.environ["PATH"]}
        self.repo = lambda r: f"{self.dir.name}/hub/models--" + r.replace("/", "--")

    def steel(self, *args, rc=0, env=(), **kw):
        p = subprocess.run([STEEL, *args], capture_output=True, text=True, env=dict(self.env, **dict(env)), stdin=subprocess.DEVNULL, timeout=HANG, **kw)
        assert p.returncode == rc, (args, p.returncode, p.stdout, p.stderr)
        return p.stdout if rc == 0 else p.stderr


def sum_of(data):
    return hashlib.sha256(data).hexdigest()


BIG = bytes(range(256)) * 8192  # 2 MB
REPO = "some/Toy-GGUF"


def fresh():
    hub = Hub()
    hub.add(REPO, {"Toy-Q4_K_M.gguf": TOY, "Toy-Q8_0.gguf": BIG, "mmproj-Toy-F16.gguf": b"eyes", "README.md": b"hello",
                   "Toy-F16-00001-of-00002.gguf": b"one" * 1000, "Toy-F16-00002-of-00002.gguf": b"two" * 1000})
    return hub, Cache(hub)


def test_pull(_):
    """The Hub's layout, by its own rules: blobs named by checksum, links, refs; nothing is asked for twice."""
    hub, c = fresh()
    path = c.steel("pull", REPO).strip()  # Q4_K_M is what one gets
    root = c.repo(REPO)
    assert path == f"{root}/snapshots/{SHA}/Toy-Q4_K_M.gguf" and open(path, "rb").read() == TOY
    assert os.readlink(path) == "../../blobs/" + sum_of(TOY) and open(root + "/refs/main").read() == SHA
    assert os.listdir(root + "/blobs") == [sum_of(TOY)] and os.listdir(root + f"/snapshots/{SHA}") == ["Toy-Q4_K_M.gguf"]
    n = len(hub.log)
    assert c.steel("pull", f"hf://{REPO}:q4_k_m").strip() == path
    assert [l[0] for l in hub.log[n:]] == [f"/api/models/{REPO}/revision/main"]  # the list, and no byte of the file
    # other ways to say it; a split file is all its parts
    assert c.steel("pull", f"{hub.url}/{REPO}/resolve/main/Toy-Q8_0.gguf").strip().endswith("/Toy-Q8_0.gguf")
    assert c.steel("pull", f"{REPO}@{SHA}:F16").strip().endswith("/Toy-F16-00001-of-00002.gguf")
    assert sorted(os.listdir(root + f"/snapshots/{SHA}")) == ["Toy-F16-00001-of-00002.gguf", "Toy-F16-00002-of-00002.gguf", "Toy-Q4_K_M.gguf", "Toy-Q8_0.gguf"]
    # what is not there is named, with what is
    e = c.steel("pull", REPO + ":Q2_K", rc=1)
    assert "Q2_K" in e and "Q4_K_M" in e and "Q8_0" in e and "F16" in e
    assert "qwen3" in c.steel("pull", "--names")
    for bad in ("nothing", "a/b/c", "../x", "a/..", "some/x:..", "a b/c", ""):
        c.steel("pull", bad, rc=1)
    c.steel("pull", rc=2)


def test_folder(_):
    """A folder of safetensors: weights, configuration, tokenizer; not the same again in other forms."""
    hub, c = fresh()
    want = {"config.json": b"{}", "model-00001-of-00002.safetensors": b"a" * 5000, "model-00002-of-00002.safetensors": b"b" * 5000,
            "model.safetensors.index.json": b"{}", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "chat_template.jinja": b"x", "merges.txt": b""}
    hub.add("some/Folder", dict(want, **{"pytorch_model.bin": b"p", "README.md": b"r", "onnx/model.onnx": b"o", "original/consolidated.safetensors": b"c"}))
    path = c.steel("pull", "some/Folder").strip()
    assert path == f"{c.repo('some/Folder')}/snapshots/{SHA}" and {n: open(f"{path}/{n}", "rb").read() for n in os.listdir(path)} == want
    blob = hashlib.sha1(b"blob 2\0{}").hexdigest()
    assert os.readlink(path + "/config.json") == "../../blobs/" + blob
    assert "some/Folder " in c.steel("list")
    os.unlink(path + "/model-00002-of-00002.safetensors")
    assert "incomplete" in c.steel("list") and "steel pull" in c.steel("show", "some/Folder", rc=1)
    hub.add("some/Empty", {"README.md": b"r"})
    assert "neither" in c.steel("pull", "some/Empty", rc=1)


def test_token(_):
    """Asked for where it is missing; sent to the Hub, from the variable or the file; never to the store it redirects to."""
    hub, c = fresh()
    hub.token = "hf_secret"
    e = c.steel("pull", REPO, rc=1)
    assert "401" in e and "HF_TOKEN" in e
    c.steel("pull", REPO, env={"HF_TOKEN": "hf_secret"})
    with open(c.dir.name + "/token", "w") as f:
        f.write("hf_secret\n")
    c.steel("pull", REPO + ":Q8_0")
    stored = [l for l in hub.log if l[0].startswith("store")]
    assert len(stored) == 2 and all(l[2] is None for l in stored)
    hub.plan["store"] = [403]
    os.unlink(c.repo(REPO) + "/blobs/" + sum_of(BIG))
    assert "403" in c.steel("pull", REPO + ":Q8_0", rc=1)


def test_short_names(_):
    """A short name that is not on this machine: the repository, the file and the size are told, and nothing is pulled."""
    hub, c = fresh()
    repo = "Qwen/Qwen3-30B-A3B-GGUF"
    hub.add(repo, {"Qwen3-30B-A3B-Q4_K_M.gguf": BIG, "Qwen3-30B-A3B-Q8_0.gguf": BIG + BIG})
    for args in (["run", "qwen3", "-p", "hi"], ["run", "QWEN3", "hi"], ["show", "qwen3"], ["serve", "qwen3", "--port", "0"]):
        e = c.steel(*args, rc=1)
        assert f"{args[1]} is neither a file nor a cached model; 'steel pull {repo}:Q4_K_M' downloads it (Qwen3-30B-A3B-Q4_K_M.gguf, 2.10 MB) from {hub.url}" in e, e
        assert e.count("\n") == 1, e
    assert not [l for l in hub.log if "resolve" in l[0]] and not os.path.exists(c.dir.name + "/hub")
    c.steel("pull", "qwen3")
    n = len(hub.log)
    assert "Q4_K_M" in c.steel("list") and c.steel("show", "qwen3", rc=1) and len(hub.log) == n  # no model, but no network either
    # split files and folders are counted; a Hub that says nothing is asked once
    assert "404" in c.steel("run", "some/Nothing", "-p", "hi", rc=1)
    assert "(2 files, 6.00 kB)" in c.steel("run", REPO + ":F16", "-p", "hi", rc=1)
    hub.plan = {"api": [500, 500]}
    e = c.steel("run", REPO, "-p", "hi", rc=1)
    assert "cannot be listed" in e and "500" in e and len(hub.plan["api"]) == 1, e
    hub.plan = {}
    n = len(hub.log)
    assert "HF_HUB_OFFLINE" in c.steel("run", REPO, "-p", "hi", rc=1, env={"HF_HUB_OFFLINE": "1"}) and len(hub.log) == n
    # what the Hub calls a file cannot reach the terminal
    hub.add(REPO, {"Toy-\x9b2J-Q4_K_M.gguf": TOY})
    e = c.steel("run", REPO, "-p", "hi", rc=1)
    assert "\x9b" not in e and "Q4_K_M" in e, e
    names = c.steel("pull", "--names").split("\n")
    assert len(names) > 20 and all(re.fullmatch(r"[a-z0-9.:-]+ +[\w.-]+/[\w.-]+:\w+", l) for l in names if l), names


def test_plan(_):
    """A model that is not on this machine: heads only, of a file or a folder; nothing is left behind."""
    hub, c = fresh()
    big = TOY + bytes(64 << 20)  # tensors may be followed by anything
    hub.add(REPO, {"Toy-Q4_K_M.gguf": big})
    tmp = tempfile.mkdtemp(dir=c.dir.name)
    env = {"TMPDIR": tmp}
    p = json.loads(c.steel("plan", REPO, "--json", "--no-probe", "--device", "cpu", env=env))
    local = json.loads(c.steel("plan", DIR.name + "/toy.gguf", "--json", "--no-probe", "--device", "cpu"))
    assert p["here"]["parts"] == local["here"]["parts"] and p["model"] == REPO
    assert 0 < hub.sent <= 4 << 20 and os.listdir(tmp) == [] and not os.path.exists(c.dir.name + "/hub")
    assert json.loads(c.steel("plan", REPO, "--tp", "2", "--json", env=env))["one"] == json.loads(c.steel("plan", DIR.name + "/toy.gguf", "--tp", "2", "--json"))["one"]
    # a server that knows no ranges
    hub.plan["store"] = ["no range"]
    c.steel("plan", REPO, "--no-probe", env=env)
    # a head that is longer than the first request; a file that is no model
    vocabulary = (6 << 20) + 8  # 32 bytes with its key: tensors stay aligned
    long = bytearray(TOY)
    n_kv = struct.unpack_from("<Q", long, 16)[0]
    struct.pack_into("<Q", long, 16, n_kv + 1)
    long[24:24] = struct.pack("<Q", 4) + b"long" + struct.pack("<IQ", 8, vocabulary) + b"x" * vocabulary
    hub.add(REPO, {"Toy-Q4_K_M.gguf": bytes(long)})
    hub.sent = 0
    p = json.loads(c.steel("plan", REPO, "--json", "--no-probe", "--device", "cpu", env=env))
    assert p["here"]["parts"] == local["here"]["parts"] and hub.sent > 8 << 20
    hub.add(REPO, {"Toy-Q4_K_M.gguf": b"GGUF" + bytes(100000)})
    assert REPO in c.steel("plan", REPO, rc=1, env=env)
    # a folder: no tokenizer, no weights
    folder = "tests/golden/qwen3"
    files = {n: open(f"{folder}/{n}", "rb").read() for n in os.listdir(folder) if n.endswith((".json", ".safetensors"))}
    hub.add("some/Folder", dict(files, **{"tokenizer.json": b"not fetched"}))
    n = len(hub.log)
    p = json.loads(c.steel("plan", "some/Folder", "--json", "--no-probe", "--device", "cpu", env=env))
    assert p["here"]["parts"] == json.loads(c.steel("plan", folder, "--json", "--no-probe", "--device", "cpu"))["here"]["parts"]
    assert not [l for l in hub.log[n:] if "tokenizer" in l[0]] and os.listdir(tmp) == []
    assert "HF_HUB_OFFLINE" in c.steel("plan", "some/Folder", rc=1, env={"HF_HUB_OFFLINE": "1"})
    hub.plan["api"] = [404]
    assert "404" in c.steel("plan", "some/Nothing", rc=1, env=env)


def test_missing(_):
    hub, c = fresh()
    e = c.steel("pull", "some/Nothing", rc=1)
    assert "some/Nothing" in e and "404" in e
    assert "404" in c.steel("pull", REPO + "@other", rc=1)
    assert not os.path.exists(c.dir.name + "/hub")  # nothing was made for nothing
    hub.plan["store"] = [404]
    assert "404" in c.steel("pull", REPO, rc=1)


def test_busy(_):
    """429 and failures of the server: waited for, as long as it says, and tried again; not for ever."""
    hub, c = fresh()
    hub.plan = {"api": [429, 503], "store": [429, 500]}
    t = time.time()
    c.steel("pull", REPO)
    assert time.time() - t > 1.9  # Retry-After was 1, twice
    hub.plan = {"api": [500] * 50}
    assert "500" in c.steel("pull", REPO, rc=1) and len(hub.plan["api"]) == 50 - 6


def test_cut(_):
    """Cut connections: the rest is asked for, not the whole; also by the next pull, also where ranges are not known."""
    hub, c = fresh()
    hub.plan = {"store": ["cut", "cut", "cut"]}
    path = c.steel("pull", REPO + ":Q8_0").strip()
    assert open(path, "rb").read() == BIG
    ranges = [l[1] for l in hub.log if l[0].startswith("store")]
    size = len(BIG)
    assert ranges == [None] + [f"bytes={size - size // 2 ** k}-" for k in (1, 2, 3)], ranges
    assert not [n for n in os.listdir(c.repo(REPO) + "/blobs") if "incomplete" in n]
    # begun before, by whoever
    blob = c.repo(REPO) + "/blobs/" + sum_of(BIG)
    for wrong, first in (("whole", "bytes=1000000-"), ("no range", "bytes=1000000-")):
        os.unlink(blob)
        with open(blob + ".incomplete", "wb") as f:
            f.write(BIG[:1000000])
        hub.plan, hub.log[:] = {"store": [wrong]}, []
        c.steel("pull", REPO + ":Q8_0")
        assert open(path, "rb").read() == BIG and [l[1] for l in hub.log if l[0].startswith("store")] == [first]
    # a server that gives nothing more: it ends, and what came stays
    os.unlink(blob)
    hub.plan = {"store": ["cut"] + [503] * 20}
    assert "kept" in c.steel("pull", REPO + ":Q8_0", rc=1)
    assert os.path.getsize(blob + ".incomplete") == size // 2
    hub.plan = {}
    assert open(c.steel("pull", REPO + ":Q8_0").strip(), "rb").read() == BIG


def test_wrong_bytes(_):
    """What is not what its name says is asked for once more, and never kept."""
    hub, c = fresh()
    blob = c.repo(REPO) + "/blobs/" + sum_of(TOY)
    for wrong in ("bytes", "more"):
        hub.plan = {"store": [wrong]}
        assert open(c.steel("pull", REPO).strip(), "rb").read() == TOY
        os.unlink(blob)
    hub.plan = {"store": ["bytes", "bytes"]}
    e = c.steel("pull", REPO, rc=1)
    assert "checksum is wrong" in e and sum_of(TOY) in e
    assert not os.path.exists(blob) and not os.path.exists(blob + ".incomplete")
    # a partial file that somebody spoiled
    with open(blob + ".incomplete", "wb") as f:
        f.write(b"spoiled")
    hub.plan = {}
    assert open(c.steel("pull", REPO).strip(), "rb").read() == TOY


def test_no_room(_):
    """Refused before the first byte where it cannot fit; a write that fails is told, and what came stays."""
    hub, c = fresh()
    hub.plan = {"more": [{"rfilename": "Toy-Q6_K.gguf", "size": 10 ** 17, "lfs": {"sha256": "a" * 64, "size": 10 ** 17}}]}
    e = c.steel("pull", REPO + ":Q6_K", rc=1)
    assert "free" in e and "HF_HOME" in e and not [l for l in hub.log if l[0].startswith("store")]

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    e = c.steel("pull", REPO + ":Q8_0", rc=1, preexec_fn=limit)
    assert "too large" in e and "kept" in e, e
    assert os.path.getsize(c.repo(REPO) + "/blobs/" + sum_of(BIG) + ".incomplete") == 1 << 20
    assert open(c.steel("pull", REPO + ":Q8_0").strip(), "rb").read() == BIG
    os.chmod(c.repo(REPO), 0o755)


def test_hostile_hub(_):
    """A list that would write elsewhere, or is no list."""
    hub, c = fresh()
    evil = {"lfs": {"sha256": "b" * 64, "size": 4}, "size": 4}
    hub.plan = {"more": [dict(evil, rfilename=n) for n in ("../../evil-Q3_K_S.gguf", "/tmp/evil-Q3_K_S.gguf", "a/../../evil-Q3_K_S.gguf", "a//evil-Q3_K_S.gguf", "x\u0001-Q3_K_S.gguf", "")] +
                [{"rfilename": "evil-Q3_K_S.gguf", "size": 4, "lfs": {"sha256": "../../../evil", "size": 4}}, {"rfilename": "neg-Q3_K_S.gguf", "size": -4, "blobId": "c" * 40}, 5, None]}
    assert "no quantisation Q3_K_S" in c.steel("pull", REPO + ":Q3_K_S", rc=1)
    # sizes whose sum overflows
    hub.plan = {"more": [{"rfilename": f"Huge-Q3_K_L-0000{i}-of-00002.gguf", "lfs": {"sha256": f"{i}" * 64, "size": 2 ** 62}} for i in (1, 2)]}
    assert "no quantisation Q3_K_L" in c.steel("pull", REPO + ":Q3_K_L", rc=1)
    for body in (b"", b"[]", b"{}", b'{"sha":"x","siblings":[]}', b'{"sha":"%s","siblings":{}}' % SHA.encode(), b"[" * 100000):
        class Odd(Hub):
            def answer(self, h, body=body):
                self.reply(h, 200, body)
        odd = Odd()
        assert "list" in c.steel("pull", REPO, rc=1, env={"HF_ENDPOINT": odd.url})


def test_url(_):
    """Any other address: into the folder one is in."""
    hub, c = fresh()
    there = tempfile.TemporaryDirectory()
    url = f"http://127.0.0.1:{hub.store}/{REPO}/Toy-Q4_K_M.gguf?x=1"
    hub.plan = {"store": ["cut"]}
    assert c.steel("pull", url, cwd=there.name).strip() == "Toy-Q4_K_M.gguf"
    assert open(there.name + "/Toy-Q4_K_M.gguf", "rb").read() == TOY and len(os.listdir(there.name)) == 1
    assert "already" in c.steel("pull", url, rc=1, cwd=there.name)
    c.steel("pull", "ftp://x/y.gguf", rc=1)


class Files(Hub):
    """A server of one file, `data`, with `etag` (None: nothing says which version it is). `plan`: "cut", a status, "rest": Range
    is honoured and If-Range is not, or a Content-Range to lie with; then all is well."""

    def __init__(self, data, etag):
        self.data, self.etag = data, etag
        super().__init__()
        self.plan = []

    def answer(self, h):
        begin = re.fullmatch(r"bytes=(\d+)-", h.headers.get("Range") or "")
        self.log.append((h.path, h.headers.get("Range"), h.headers.get("If-Range")))
        what, data = self.plan.pop(0) if self.plan else "", self.data
        if isinstance(what, int):
            return self.reply(h, what)
        same = what == "rest" or h.headers.get("If-Range") in (None, self.etag)
        at = int(begin.group(1)) if begin and same else 0
        h.send_response(206 if at else 200)
        if at:
            h.send_header("Content-Range", what if what.startswith("bytes") else f"bytes {at}-{len(data) - 1}/{len(data)}")
        if self.etag:
            h.send_header("ETag", self.etag)
        n = len(data) - at
        h.send_header("Content-Length", str(n))
        h.end_headers()
        h.wfile.write(data[at:at + (n // 2 if what == "cut" else n)])
        h.wfile.flush()
        if what == "cut":
            h.close_connection = True
            h.connection.shutdown(socket.SHUT_RDWR)
        return None


def test_url_changed(_):
    """A cut download of a URL is resumed only from the same URL and the same file there."""
    old, new = b"A" * 400000, b"B" * 400000

    def twice(etag, data, url="/a/x.bin", plan=(), was='"1"'):
        """A pull of `old` that is cut in the middle and refused then, and another pull after the server's file is `data`."""
        s, d = Files(old, was), tempfile.TemporaryDirectory()
        c = Cache(Hub())
        s.plan = ["cut", 404]
        c.steel("pull", s.url + "/a/x.bin", rc=1, cwd=d.name)
        assert os.path.getsize(d.name + "/x.bin.incomplete") == (200000 if was else 0)
        s.data, s.etag, s.plan, s.log[:] = data, etag, list(plan), []
        c.steel("pull", s.url + url, cwd=d.name)
        assert open(d.name + "/x.bin", "rb").read() == data and os.listdir(d.name) == ["x.bin"], (os.listdir(d.name), s.log)
        return s.log
    rest = ("/a/x.bin", "bytes=200000-", '"1"')
    assert twice('"1"', old) == [rest]
    assert twice('"2"', new) == [rest]
    assert twice('"2"', new, plan=["rest"]) == [rest, ("/a/x.bin", None, None)]  # a server that ignores If-Range
    assert twice('"1"', old, plan=["bytes 100-200099/400000"]) == [rest, ("/a/x.bin", None, None)]
    assert twice('"2"', new, url="/b/x.bin") == [("/b/x.bin", None, None)]  # the same name at another URL
    assert twice(None, new, was=None) == [("/a/x.bin", None, None)]
    # cuts in one pull, of a server that says nothing about its file: whole each time, and not for ever
    s, d = Files(old, None), tempfile.TemporaryDirectory()
    s.plan = ["cut"] * 20
    assert "closed" in Cache(Hub()).steel("pull", s.url + "/x.bin", rc=1, cwd=d.name) and [l[1] for l in s.log] == [None] * 6
    # a link in place of the partial file is not written through
    open(d.name + "/theirs", "wb").write(b"theirs")
    os.symlink("theirs", d.name + "/y.bin.incomplete")
    Cache(Hub()).steel("pull", s.url + "/y.bin", rc=1, cwd=d.name)
    assert open(d.name + "/theirs", "rb").read() == b"theirs"


def test_names(_):
    """Names where a model is expected; list and rm over the same cache, which is shared with other tools."""
    hub, c = fresh()
    e = c.steel("run", REPO, "-p", "hi", rc=1)
    assert "steel pull " + REPO in e and len(hub.log) == 1  # nobody is at a terminal to be asked
    c.steel("pull", REPO)
    n = len(hub.log)
    assert c.steel("run", f"{REPO}:Q4_K_M", "-p", "hi", "-n", "3", "--temp", "0") == c.steel("run", DIR.name + "/toy.gguf", "-p", "hi", "-n", "3", "--temp", "0")
    assert "parameters" in c.steel("show", REPO, "--brief") and c.steel("tokenize", REPO, "hi")
    assert len(hub.log) == n  # what is here needs no network
    assert "Q8_0" in c.steel("run", REPO + ":Q8_0", "-p", "hi", rc=1)
    c.steel("pull", REPO + ":F16")
    c.steel("pull", REPO + ":Q8_0")
    lines = c.steel("list").splitlines()
    assert [l.split()[0] for l in lines[1:]] == [REPO + ":" + q for q in ("F16", "Q4_K_M", "Q8_0")], lines
    c.steel("rm", REPO + ":F16")
    assert sorted(os.listdir(c.repo(REPO) + "/blobs")) == sorted([sum_of(TOY), sum_of(BIG)])
    assert "Q2_K" in c.steel("rm", REPO + ":Q2_K", rc=1)
    # a second snapshot shares a blob: it stays as long as one shows it
    other = c.repo(REPO) + "/snapshots/" + "f" * 40
    os.makedirs(other)
    os.symlink("../../blobs/" + sum_of(BIG), other + "/Renamed-Q5_K_M.gguf")
    c.steel("rm", REPO + ":Q8_0")
    assert os.path.exists(c.repo(REPO) + "/blobs/" + sum_of(BIG)) and not os.path.lexists(c.repo(REPO) + f"/snapshots/{SHA}/Toy-Q8_0.gguf")
    c.steel("rm", REPO)
    assert not os.path.exists(c.repo(REPO)) and c.steel("list") == "" and "not in the cache" in c.steel("rm", REPO, rc=1)
    # other places
    with tempfile.TemporaryDirectory() as d:
        env = {"HF_HUB_CACHE": d + "/x"}
        assert c.steel("pull", REPO, env=env).startswith(d + "/x/models--some--Toy-GGUF/")
        assert REPO in c.steel("list", env=env) and REPO not in c.steel("list")


def test_rm_revision(_):
    """rm owner/name@rev removes that revision: its links, its ref, and the blobs that nothing else uses."""
    hub, c = fresh()
    c.steel("pull", REPO)
    c.steel("pull", REPO + ":Q8_0")
    root, old = c.repo(REPO), "f" * 40
    os.makedirs(root + f"/snapshots/{old}")
    os.symlink("../../blobs/" + sum_of(TOY), root + f"/snapshots/{old}/Toy-Q4_K_M.gguf")
    os.symlink("../../blobs/" + "e" * 64, root + f"/snapshots/{old}/Old-Q8_0.gguf")
    open(root + "/blobs/" + "e" * 64, "wb").write(b"old")
    open(root + "/refs/v1", "w").write(old)
    assert "no revision v2" in c.steel("rm", REPO + "@v2", rc=1)
    assert "no revision" in c.steel("rm", REPO + "@" + "a" * 40, rc=1)
    c.steel("rm", REPO + "@v1")
    assert os.listdir(root + "/snapshots") == [SHA] and os.listdir(root + "/refs") == ["main"]
    assert sorted(os.listdir(root + "/blobs")) == sorted([sum_of(TOY), sum_of(BIG)])
    # one quantisation of one revision
    os.makedirs(root + f"/snapshots/{old}")
    os.symlink("../../blobs/" + sum_of(BIG), root + f"/snapshots/{old}/Toy-Q8_0.gguf")
    c.steel("rm", f"{REPO}@{SHA}:Q8_0")
    assert os.listdir(root + f"/snapshots/{SHA}") == ["Toy-Q4_K_M.gguf"] and os.path.exists(root + f"/snapshots/{old}/Toy-Q8_0.gguf")
    c.steel("rm", REPO + "@main")
    assert os.listdir(root + "/snapshots") == [old] and os.listdir(root + "/blobs") == [sum_of(BIG)]
    c.steel("rm", REPO + "@" + old)
    assert not os.path.exists(root)


def test_rm_links(_):
    """rm removes nothing outside the model's folder, whatever links in it lead to."""
    hub, c = fresh()
    path = c.steel("pull", REPO).strip()
    root = c.repo(REPO)
    away = c.dir.name + "/elsewhere/blobs"
    os.makedirs(away)
    for name in ("theirs", "Toy-Q5_K_M.gguf"):
        open(f"{away}/{name}", "wb").write(b"keep me")
    os.symlink(away + "/theirs", root + f"/snapshots/{SHA}/Toy-Q8_0.gguf")
    c.steel("rm", REPO + ":Q8_0")
    assert os.path.exists(away + "/theirs") and not os.path.lexists(root + f"/snapshots/{SHA}/Toy-Q8_0.gguf")
    os.symlink(away, root + f"/snapshots/{SHA}/more")
    assert "leaves the cache" in c.steel("rm", REPO + ":Q5_K_M", rc=1)
    os.symlink(away, root + "/snapshots/" + "d" * 40)
    assert "leaves the cache" in c.steel("rm", REPO + ":Q5_K_M", rc=1)
    c.steel("rm", REPO + "@" + "d" * 40)
    assert os.path.exists(path) and not os.path.lexists(root + "/snapshots/" + "d" * 40)
    c.steel("rm", REPO)
    assert not os.path.exists(root) and sorted(os.listdir(away)) == ["Toy-Q5_K_M.gguf", "theirs"]


def test_asked(_):
    """At a terminal one is asked, and Ctrl-C ends a download that is kept."""
    hub, c = fresh()
    size = b"%.2f kB" % (len(TOY) / 1e3)
    for answer, rc in ((b"n\n", 1), (b"\n", 1), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        p = subprocess.Popen([STEEL, "run", REPO, "-p", "hi", "-n", "3"], env=c.env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(ours, 1000)
        assert b"Pull some/Toy-GGUF (Toy-Q4_K_M.gguf, " + size + b") from " + hub.url.encode() in seen, seen
        assert [l[0] for l in hub.log] == [f"/api/models/{REPO}/revision/main"], hub.log  # the list only
        hub.log.clear()
        os.write(ours, answer)
        try:
            while piece := os.read(ours, 1000):
                seen += piece
        except OSError:
            pass
        assert p.wait() == rc, seen
        os.close(ours)
    assert b"MB/s" in seen or b"B/s" in seen, seen
    hub.plan = {"store": ["stall"]}
    p = subprocess.Popen([STEEL, "pull", REPO + ":Q8_0"], env=c.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    hub.stalled.wait()
    blob = c.repo(REPO) + "/blobs/" + sum_of(BIG)
    while not os.path.exists(blob + ".incomplete") or os.path.getsize(blob + ".incomplete") < 1000:
        time.sleep(0.01)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate()
    assert p.returncode == 130 and out == "" and "interrupted" in err and os.path.getsize(blob + ".incomplete") == 1000
    hub.go_on.set()


def test_together(_):
    """Two pulls of one model at once: one file, whole."""
    hub, c = fresh()
    ps = [subprocess.Popen([STEEL, "pull", REPO + ":Q8_0"], env=c.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outs = [p.communicate() for p in ps]
    assert all(p.returncode == 0 for p in ps), outs
    assert open(outs[0][0].strip(), "rb").read() == BIG and os.listdir(c.repo(REPO) + "/blobs") == [sum_of(BIG)]
    assert len([l for l in hub.log if l[0].startswith("store")]) == 1


probe = Cache(Hub())
out = subprocess.run([STEEL, "pull", "a/b"], capture_output=True, text=True, env=probe.env).stderr
if "need libcurl" in out:
    print("skipped: test_pull.py: no libcurl here")
    sys.exit(77)
tests = [test_pull, test_folder, test_token, test_short_names, test_plan, test_missing, test_busy, test_cut, test_wrong_bytes, test_no_room, test_hostile_hub, test_url, test_names, test_rm_revision, test_rm_links, test_url_changed, test_asked, test_together]
if len(sys.argv) > 2:
    tests = [t for t in tests if any(a in t.__name__ for a in sys.argv[2:])]
run_tests(tests, None)
