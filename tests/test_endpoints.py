#!/usr/bin/env python3
"""Every row of the table of endpoints, as the server and the gateway treat it. The rows come from test_endpoints --list."""
import json
import os
import subprocess
import sys

from serverlib import HEALTHY, Fake, Gateway, Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
ROWS = [json.loads(line) for line in
        subprocess.run([os.path.join(BUILD, "tests/test_endpoints"), "--list"], check=True, capture_output=True,
                       text=True).stdout.splitlines()]
KEY = {"Authorization": "Bearer secret"}
UNKNOWN = "there is nothing at"


def paths():
    for row in ROWS:
        for path in row["paths"]:
            yield row, path.replace("*", "name")


def has_form(dialect, body):
    """Whether an error has the form of its API."""
    error = json.loads(body)["error"]
    return {"openai": lambda: "code" in error, "anthropic": lambda: json.loads(body)["type"] == "error",
            "ollama": lambda: isinstance(error, str)}[dialect]()


def test_server():
    s = Server(BUILD, "--api-key", "secret")
    for row, path in paths():
        where = f"{row['method']} {path}"
        status, headers, body = s.request("PATCH", path, headers=KEY)
        assert status == (405 if row["served"] else 404), (where, status)
        assert has_form(row["dialect"], body), (where, body)
        if not row["served"]:
            continue
        assert row["method"] in headers["allow"].split(", "), (where, headers)
        post = row["method"] == "POST"
        body = "{}" if post else None
        status, _, text = s.request(row["method"], path, body)
        assert (status == 401) != row["open"], (where, status)
        status, _, text = s.request(row["method"], path, body, headers=KEY)
        assert status not in (401, 405) and status < 500 or "start it with --" in text or (status, row["name"]) == (501, "slot action"), (where, status, text[:300])
        assert UNKNOWN not in text, where
        if post and status != 200:
            assert has_form(row["dialect"], text), (where, text)
    for row in ROWS:
        if row["prepared"]:
            s.wait_count(f"info  {row['name']} id=", len(row["paths"]))
    s.stop()


def answer(head, conn):
    """What a replica with one model says; the port tells replicas apart."""
    name = "m%d" % conn.getsockname()[1]
    body = b"x 1\n"
    if head.split()[1] != b"/metrics":
        body = json.dumps({"data": [{"id": name}], "models": [{"name": name}]}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_gateway_merges():
    fakes = [Fake(answer, quiet=(b"/health",)) for _ in range(2)]
    g = Gateway(BUILD, fakes)
    g.wait_count("replica is in", 2)
    for row, path in paths():
        if row["gateway"] == "forwards":
            continue
        status, _, text = g.request(row["method"], path)
        both = all(str(f.port) in text for f in fakes)
        assert status == 200 and both == (row["gateway"] != "responds"), (path, status, text)
        assert row["gateway"] != "responds" or '"replicas":2' in text, (path, text)
    g.stop()
    for f in fakes:
        f.close()


def sent(fake, row, path):
    """How often a replica had this request."""
    target = f"{row['method']} {path} ".encode()
    return sum(head.startswith(target) for head, _ in fake.seen)


def test_gateway_retries():
    """Replicas that end the connection in place of a reply: the next one is tried where that is safe."""
    fakes = [Fake(lambda head, conn: b"", quiet=(b"/health", b"/v1/models")) for _ in range(2)]
    g = Gateway(BUILD, fakes, "--health-fails", "100")
    g.wait_count("replica is in", 2)
    for row, path in paths():
        if row["gateway"] != "forwards":
            continue
        status, _, text = g.request(row["method"], path, '{"model":"m"}' if row["method"] == "POST" else None)
        tries = sorted(sent(f, row, path) for f in fakes)
        assert status == 502 and has_form(row["dialect"], text), (path, status, text)
        # A kept connection that ends may be replaced by a new one to the same replica.
        assert tries == [0, 1] if row["effect"] == "changes" else tries[0] > 0, (row, path, tries)
    g.stop()
    for f in fakes:
        f.close()


def test_gateway_prefixes():
    """A prompt that was seen before goes where it went: of the endpoints that generate, and of no others."""
    fakes = [Fake(answer, quiet=(b"/health", b"/v1/models")) for _ in range(2)]
    g = Gateway(BUILD, fakes)
    g.wait_count("replica is in", 2)
    for n, (row, path) in enumerate(paths()):
        if row["method"] != "POST":
            continue
        text = f"prompt number {n} " * 50
        body = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
        for again in range(2):
            before = g.metrics()['steel_route_choices_total{by="prefix"}']
            assert g.post(path, body)[0] == 200
            by_prefix = g.metrics()['steel_route_choices_total{by="prefix"}'] - before
            assert by_prefix == (again and row["effect"] == "generates"), (path, again, by_prefix)
    g.stop()
    for f in fakes:
        f.close()


def test_gateway_keys():
    """With a key of its own for the replicas, only open rows pass without the client's."""
    fake = Fake(answer)
    g = Gateway(BUILD, [fake], "--api-key", "secret", "--upstream-api-key", "inner")
    g.wait_count("replica is in", 1)
    for row, path in paths():
        status = g.request(row["method"], path, "{}" if row["method"] == "POST" else None)[0]
        assert status == (200 if row["open"] else 401), (path, status)
        nested = g.request(row["method"], "/prefix" + path, "{}" if row["method"] == "POST" else None)[0]
        assert nested == 401, (path, nested)
    g.stop()
    fake.close()


run_tests([test_server, test_gateway_merges, test_gateway_retries, test_gateway_prefixes, test_gateway_keys])
