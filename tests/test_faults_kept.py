#!/usr/bin/env python3
"""Allocations fail one by one, alone and eight in a row (tests/faults.c), in requests for what a server keeps: responses,
background responses, conversations, slots. The server lives on, what it has stays readable, and at the end it stops with 0.
usage: test_faults_kept.py BUILD [all]: without "all" a sample."""
import ctypes
import http.client
import json
import mmap
import os
import sys
import tempfile

from serverlib import Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
MOST = 10**9 if len(sys.argv) > 2 else 8
NEW = {"items": [{"role": "user", "content": "one two three"}], "metadata": {"a": "b"}}
SHORT = {"input": "hi", "max_output_tokens": 4}


class Control(ctypes.Structure):  # as in tests/faults.c
    _fields_ = [("kind", ctypes.c_int), ("at", ctypes.c_int), ("row", ctypes.c_int), ("n_failed", ctypes.c_int), ("count", ctypes.c_int * 5)]


def test_kept():
    with tempfile.TemporaryDirectory() as d:
        with open(d + "/faults", "wb") as f:
            f.write(bytes(4096))
        with open(d + "/faults", "r+b") as f:
            control = Control.from_buffer(mmap.mmap(f.fileno(), 4096))
        env = dict(os.environ, STEEL_FAULTS=d + "/faults", LD_PRELOAD=os.path.abspath(BUILD + "/tests/faults.so"),
                   ASAN_OPTIONS="verify_asan_link_order=0:allocator_may_return_null=1:exitcode=99", TSAN_OPTIONS="exitcode=99")
        os.mkdir(d + "/slots")
        s = Server(BUILD, "--slot-save-path", d + "/slots", "-c", "2048", env=env)

        def ask(method, path, body=None):
            try:
                status, _, text = s.request(method, path, None if body is None else json.dumps(body))
                return status, text
            except (ConnectionError, ValueError, http.client.HTTPException) as e:
                return type(e).__name__, ""

        conv = json.loads(ask("POST", "/v1/conversations", NEW)[1])["id"]
        ask("POST", "/completion", {"prompt": [97] * 300, "n_predict": 4})
        steps = {
            "create": ("POST", "/v1/conversations", NEW), "add": ("POST", f"/v1/conversations/{conv}/items", {"items": NEW["items"]}),
            "list": ("GET", f"/v1/conversations/{conv}/items"), "update": ("POST", f"/v1/conversations/{conv}", {"metadata": {"x": "y"}}),
            "continue": ("POST", "/v1/responses", dict(SHORT, conversation=conv)), "background": ("POST", "/v1/responses", dict(SHORT, background=True)),
            "stream": ("POST", "/v1/responses", dict(SHORT, background=True, stream=True)), "save": ("POST", "/slots/0?action=save", {"filename": "a"}),
            "restore": ("POST", "/slots/0?action=restore", {"filename": "a"}), "slots": ("GET", "/slots")}
        for name, step in steps.items():
            control.at = 0
            for i in range(5):
                control.count[i] = 0
            control.kind = 0
            assert ask(*step)[0] == 200, name
            n, seen = control.count[0], {}
            for row in (0, 7):
                for k in range(1, n + 1) if n <= MOST else sorted({1 + i * n // MOST for i in range(MOST)}):
                    control.at = control.n_failed = 0
                    control.row = row
                    for i in range(5):
                        control.count[i] = 0
                    control.at = k
                    status, _ = ask(*step)
                    control.at = 0
                    seen[status] = seen.get(status, 0) + 1
                    assert s.proc.poll() is None, (name, row, k, s.log()[-1500:])
            print(f"{name}: {n} allocations: {seen}", flush=True)
            while True:
                m = s.metrics()
                if m["steel_requests_running"] + m["steel_requests_waiting"] == 0:
                    break
        page = json.loads(ask("GET", f"/v1/conversations/{conv}/items?limit=100")[1])
        assert page["data"][-1]["content"] == [{"type": "input_text", "text": "one two three"}], page
        assert os.listdir(d + "/slots") == ["a"] and ask("POST", "/slots/0?action=restore", {"filename": "a"})[0] == 200
        assert s.stop() == 0, s.log()[-2000:]


run_tests([test_kept])
