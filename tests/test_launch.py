"""steel launch: with fake agents that record what they get, and with real ones where they are installed."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import script_model
from serverlib import Server, run_tests

B = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.abspath(os.environ.get("STEEL", os.path.join(B, "steel")))
AGENTS = ["claude", "codex", "opencode", "qwen", "pi"]
FAKE = """#!%s
import json, os, signal, sys, time, urllib.request
out = os.environ["FAKE_OUT"]
url = os.environ["FAKE_URL"]
request = urllib.request.Request(url + "/v1/models", headers={"Authorization": "Bearer " + os.environ.get("FAKE_KEY", "")})
models = json.load(urllib.request.urlopen(request))
texts = {}
for path in [os.environ.get("QWEN_CODE_SYSTEM_DEFAULTS_PATH", ""), *sys.argv]:
    if os.path.basename(path).startswith("steel-"):
        texts[os.path.basename(path)] = open(path).read()
def save(how):
    with open(out + ".new", "w") as f:
        json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "files": texts, "models": models, "how": how}, f)
    os.rename(out + ".new", out)
if "wait" in sys.argv:
    def caught(number, frame):
        save(number)
        sys.exit(42)
    signal.signal(signal.SIGINT, caught)
    save("waiting")
    while True:
        time.sleep(1)
save("ran")
sys.exit(7)
""" % sys.executable


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def is_listening(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def tree(folder):
    """Every file below a folder with its bytes."""
    return {os.path.join(at, f): open(os.path.join(at, f), "rb").read() for at, _, files in os.walk(folder) for f in files}


class Place:
    """A folder with fake agents, a home, a place for temporary files and a small model."""

    def __init__(self):
        self.dir = tempfile.TemporaryDirectory(prefix="steel-launch-test-")
        at = self.dir.name
        for name in ["bin", "home", "tmp"]:
            os.mkdir(os.path.join(at, name))
        for agent in AGENTS:
            path = os.path.join(at, "bin", agent)
            with open(path, "w") as f:
                f.write(FAKE)
            os.chmod(path, 0o755)
        for agent, path in {"claude": ".claude/settings.json", "codex": ".codex/config.toml", "qwen": ".qwen/settings.json",
                            "opencode": ".config/opencode/opencode.json", "pi": ".pi/agent/models.json"}.items():
            path = os.path.join(at, "home", path)
            os.makedirs(os.path.dirname(path))
            with open(path, "w") as f:
                f.write("the user's own of " + agent)
        self.model = os.path.join(at, "toy.gguf")
        subprocess.run([os.path.join(B, "tests/toy_gguf"), self.model], check=True)
        self.out = os.path.join(at, "out.json")

    def env(self, port, **more):
        return dict(os.environ, PATH=os.path.join(self.dir.name, "bin") + ":/usr/bin:/bin", HOME=os.path.join(self.dir.name, "home"),
                    TMPDIR=os.path.join(self.dir.name, "tmp"), FAKE_OUT=self.out, FAKE_URL=f"http://127.0.0.1:{port}",
                    ANTHROPIC_API_KEY="the user's own", OPENAI_API_KEY="the user's own", STEEL_CONFIG="", **more)

    def start(self, *args, port, **more):
        return subprocess.Popen([STEEL, "launch", *args], env=self.env(port, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, start_new_session=True)

    def launch(self, *args, port, rc=7, **more):
        """(what the fake agent saw, stdout, stderr)"""
        if os.path.exists(self.out):
            os.unlink(self.out)
        p = self.start(*args, port=port, **more)
        out, err = p.communicate()
        assert p.returncode == rc, (p.returncode, out, err)
        assert not os.listdir(os.path.join(self.dir.name, "tmp"))
        return self.seen(), out, err

    def seen(self):
        return json.load(open(self.out)) if os.path.exists(self.out) else None


def check_settings(agent, seen, port, model, context, key="steel"):
    env, argv, url = seen["env"], seen["argv"], f"http://127.0.0.1:{port}"
    if agent == "claude":
        assert env["ANTHROPIC_BASE_URL"] == url and env["ANTHROPIC_AUTH_TOKEN"] == key and "ANTHROPIC_API_KEY" not in env
        for name in ["ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"]:
            assert env[name] == model, name
        assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == str(context)
    else:
        assert env["OPENAI_API_KEY"] == key
    if agent == "codex":
        assert argv[0::2][:4] == ["-c"] * 4
        assert argv[1:8:2] == ['model_provider="steel"', 'model_providers.steel={name="Steel", base_url="%s/v1", '
                               'env_key="OPENAI_API_KEY", wire_api="responses"}' % url, 'model="%s"' % model,
                               "model_context_window=%d" % context]
    if agent == "opencode":
        config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
        steel = config["provider"]["steel"]
        assert steel["options"] == {"baseURL": url + "/v1", "apiKey": "{env:OPENAI_API_KEY}"}
        assert steel["models"][model]["limit"] == {"context": context, "output": min(32768, context // 4)}
        assert config["model"] == config["small_model"] == "steel/" + model
    if agent == "qwen":
        assert env["OPENAI_BASE_URL"] == url + "/v1" and env["OPENAI_MODEL"] == model
        assert argv[:6] == ["--auth-type", "openai", "--openai-base-url", url + "/v1", "--model", model]
        assert json.loads(seen["files"]["steel-qwen.json"]) == {"model": {"generationConfig": {"contextWindowSize": context}}}
    if agent == "pi":
        assert argv[0] == "--extension" and argv[2:6] == ["--provider", "steel", "--model", model]
        text = seen["files"]["steel-pi.js"]
        for line in [f'baseUrl: "{url}/v1"', f'id: "{model}"', f"contextWindow: {context}", 'apiKey: "OPENAI_API_KEY"']:
            assert line in text, (line, text)


def test_starts_and_stops_a_server():
    place = Place()
    before = tree(place.dir.name + "/home")
    for agent in AGENTS:
        port = free_port()
        seen, out, err = place.launch(agent, place.model, "--port", str(port), "-t", "1", "-c", "96", "--", "-p", "a b", "--print",
                                      port=port)
        model = seen["models"]["data"][0]
        assert model["id"] == "toy" and model["max_model_len"] == 96, model
        check_settings(agent, seen, port, "toy", 96)
        assert seen["argv"][-3:] == ["-p", "a b", "--print"], seen["argv"]
        assert f"starting a server at http://127.0.0.1:{port}" in err and not out
        assert not is_listening(port)
    assert tree(place.dir.name + "/home") == before


def test_uses_a_server_that_runs():
    place = Place()
    s = Server(B, "--api-key", "secret", "-c", "96", model=place.model, env=dict(os.environ, STEEL_CONFIG=""))
    port = str(s.port)
    for model in [[], [place.model], ["-m", os.path.join(os.path.dirname(place.model), ".", "toy.gguf")], ["toy"]]:
        seen, _, err = place.launch("claude", *model, "--port", port, "--api-key=secret", port=port, FAKE_KEY="secret")
        check_settings("claude", seen, port, "toy", 96, key="secret")
        assert "using the server that runs" in err
    assert "no effect" in place.launch("pi", "--api-key", "secret", "-c", "64", "--port", port, port=port, FAKE_KEY="secret")[2]
    assert "no effect" not in place.launch("pi", "--api-key", "secret", "--port", port, port=port, FAKE_KEY="secret")[2]
    seen, _, err = place.launch("claude", "other.gguf", "--port", port, "--api-key", "secret", port=port, rc=1)
    assert not seen and "has the model toy, not other.gguf" in err, err
    seen, _, err = place.launch("claude", "--port", port, port=port, rc=1)
    assert not seen and "--api-key" in err, err
    assert is_listening(s.port)
    s.stop()


def test_print_is_a_script():
    place = Place()
    s = Server(B, "-c", "96", model=place.model, env=dict(os.environ, STEEL_CONFIG=""))
    for agent in AGENTS:
        _, out, _ = place.launch(agent, "--print", "--port", str(s.port), "--", "it's", "$HOME", port=s.port, rc=0)
        rc = subprocess.run(["sh", "-c", out], env=place.env(s.port), cwd=place.dir.name).returncode
        assert rc == 7, (rc, out)
        check_settings(agent, place.seen(), s.port, "toy", 96)
        assert place.seen()["argv"][-2:] == ["it's", "$HOME"]
    s.stop()
    for agent in AGENTS:  # without a server, and without the agent
        port = free_port()
        out = subprocess.run([STEEL, "launch", agent, "a.gguf", "--print", "--port", str(port)], capture_output=True, text=True,
                             env=dict(place.env(port), PATH="/nowhere")).stdout
        assert f"http://127.0.0.1:{port}" in out and "a.gguf" in out, out
        assert not is_listening(port)


def test_errors():
    place = Place()
    port = free_port()
    os.unlink(place.dir.name + "/bin/claude")
    _, _, err = place.launch("claude", place.model, "--port", str(port), port=port, rc=1)
    assert "npm install -g @anthropic-ai/claude-code" in err and not is_listening(port), err
    _, _, err = place.launch("codex", place.dir.name + "/none.gguf", "--port", str(port), port=port, rc=1)
    assert "none.gguf" in err and "the server did not start" in err, err
    _, _, err = place.launch("opencod", port=port, rc=2)
    assert "did you mean opencode" in err, err
    for args in [[], ["codex", "a", "b"], ["codex", "a", "-m", "b"], ["codex", "--port", "0"], ["codex", "--api-key", ""]]:
        place.launch(*args, port=port, rc=2)
    with socket.create_server(("127.0.0.1", 0)) as other:  # something else listens there
        def answer():
            c = other.accept()[0]
            c.recv(4096)
            c.sendall(b"220 mail\r\n\r\n")
            c.close()
        import threading
        threading.Thread(target=lambda: [answer() for _ in range(2)], daemon=True).start()
        port = other.getsockname()[1]
        _, _, err = place.launch("codex", "--port", str(port), port=port, rc=1)
        assert "does not answer with HTTP" in err, err


def wait_for(condition):
    while not condition():
        time.sleep(0.02)


def started(place, port):
    if os.path.exists(place.out):
        os.unlink(place.out)
    p = place.start("claude", place.model, "-t", "1", "--port", str(port), "--", "wait", port=port)
    wait_for(lambda: os.path.exists(place.out) or p.poll() is not None)
    assert place.seen()["how"] == "waiting"
    return p


def test_signals():
    place = Place()
    port = free_port()
    p = started(place, port)
    os.killpg(p.pid, signal.SIGINT)  # as a terminal does
    assert p.wait() == 42 and place.seen()["how"] == signal.SIGINT
    assert not is_listening(port) and not os.listdir(place.dir.name + "/tmp")
    p = started(place, port)
    p.terminate()
    assert p.wait() == 128 + signal.SIGTERM
    assert not is_listening(port) and not os.listdir(place.dir.name + "/tmp")
    p = started(place, port)
    agent = place.seen()["env"]
    assert agent["ANTHROPIC_MODEL"] == "toy"
    p.kill()
    p.wait()
    wait_for(lambda: not is_listening(port))  # the server does not outlive it
    os.killpg(p.pid, signal.SIGKILL)


def test_real_agents():
    """Each finishes a tool loop against the scripted model."""
    calls = {
        "claude": ("Bash", {"command": "echo it-was-run", "description": "Say it"}, ["-p", "go", "--dangerously-skip-permissions"]),
        "codex": ("exec_command", {"cmd": "echo it-was-run"},
                  ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "go"]),
        "opencode": ("bash", {"command": "echo it-was-run", "description": "Say it"}, ["run", "go"]),
        "qwen": ("run_shell_command", {"command": "echo it-was-run", "is_background": False}, ["go", "--yolo"]),
        "pi": ("bash", {"command": "echo it-was-run"}, ["-p", "go"]),
    }
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([os.environ.get("AGENTS_BIN", ""), here + "/clients/agents/node_modules/.bin", os.environ["PATH"]]).strip(os.pathsep)
    for agent, (tool, args, words) in calls.items():
        if not shutil.which(agent, path=path):
            print(f"skipped: launch {agent}: not installed")
            continue
        with tempfile.TemporaryDirectory(prefix="steel-launch-test-") as at:
            model = os.path.join(at, "scripted.gguf")
            script_model.build(model, tool, json.dumps(args))
            work = os.path.join(at, "work")
            os.mkdir(work)
            subprocess.run(["git", "init", "-q", work], check=True)
            port = free_port()
            p = subprocess.run([STEEL, "launch", agent, model, "--port", str(port), "-t", "1", "-c", "131072", "--", *words], cwd=work,
                               env=dict(os.environ, PATH=path, HOME=at, IS_SANDBOX="1", STEEL_CONFIG=""), stdin=subprocess.DEVNULL,
                               capture_output=True, text=True)
            assert p.returncode == 0, (agent, p.returncode, p.stdout, p.stderr)
            assert "All is done." in p.stdout, (agent, p.stdout, p.stderr)
            assert not is_listening(port)
            print(f"      {agent} ended a tool loop", flush=True)


run_tests([test_starts_and_stops_a_server, test_uses_a_server_that_runs, test_print_is_a_script, test_errors, test_signals,
           test_real_agents])
