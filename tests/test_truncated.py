#!/usr/bin/env python3
"""A model file that shrinks under its map: the answers under way fail in words, /health says 503 and why, and the
server lives on to say so. Weights that were copied at loading do not need the file any more."""
import json, os, signal, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import HANG, Server

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "temperature": 0}


def serve_and_cut(tmp, keep, *flags):
    """A server whose model is cut to `keep` bytes while it runs."""
    model = os.path.join(tmp, "cut.gguf")
    subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), model], check=True)
    s = Server(BUILD, *flags, model=model)
    before = s.json("/v1/chat/completions", CHAT)
    assert s.get("/health")[0] == 200
    os.truncate(model, int(os.path.getsize(model) * keep) if keep < 1 else os.path.getsize(model) - keep)
    return s, before["choices"][0]["message"]["content"]


def main():
    with tempfile.TemporaryDirectory() as tmp:
        for keep in (0.5, 100):  # half of it is gone; the end of the last page, which never raises a signal
            s, _ = serve_and_cut(tmp, keep, "--no-repack")
            status, _, text = s.post("/v1/chat/completions", CHAT)
            assert status == 500 and "cut.gguf was truncated while in use" in text, (status, text)
            for path in ("/health", "/v1/models"):
                status, _, text = s.get(path)
                assert status == 503 and "was truncated while in use" in text, (path, status, text)
            assert json.loads(s.get("/health")[2])["status"] == "error"
            status, _, text = s.post("/v1/chat/completions", dict(CHAT, stream=True))
            assert status == 503 and "was truncated" in text, (status, text)
            s.wait_line("the engine failed")
            s.proc.send_signal(signal.SIGTERM)
            assert s.proc.wait(HANG) == 0, s.log()
        # an embedding model: 503 that names no path, and /health knows
        model = os.path.join(tmp, "embed.gguf")
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), model], check=True)
        s = Server(BUILD, "--embedding", "e=" + model, "--no-repack")
        assert s.post("/v1/embeddings", {"model": "e", "input": "x"})[0] == 200 and s.get("/health")[0] == 200
        os.truncate(model, os.path.getsize(model) // 2)
        status, _, text = s.post("/v1/embeddings", {"model": "e", "input": "y"})
        assert status == 500 and "embed.gguf" not in text, (status, text)
        status, headers, text = s.post("/v1/embeddings", {"model": "e", "input": "z"})
        assert status == 503 and "embed.gguf" not in text and "failed" in text, (status, text)
        status, _, text = s.get("/health")
        assert status == 503 and "embedding model has failed" in text and "embed.gguf" not in text, (status, text)
        assert "was truncated" in s.wait_line("the embedding model has failed")
        s.proc.send_signal(signal.SIGTERM)
        assert s.proc.wait(HANG) == 0, s.log()
        s, text = serve_and_cut(tmp, 0.5)
        assert s.json("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == text
        assert s.get("/health")[0] == 200
        s.proc.send_signal(signal.SIGTERM)
        assert s.proc.wait(HANG) == 0, s.log()


main()
