"""A prompt that exceeds the context, in the words of each API: coding agents recognise the error by its text or its code, and then
compact the conversation instead of sending it again. A row is what one agent looks for, in our words, found in the agents as
installed from npm (Claude Code 2.1.197, Codex 0.169, opencode 1.18, Qwen Code 0.15, pi 0.74, Continue 1.5)."""
import json
import re
import sys

from serverlib import Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
CONTEXT = 8192

# The numbers that an agent reads, as (prompt, context) by name.
NUMBERS = {
    "claude": r"prompt is too long\D*(?P<prompt>\d+) tokens? > (?P<context>\d+)",
    "qwen": r"(?s)maximum context length is\s*(?P<context>\d+) tokens?.*?(?:resulted in|requested|used)\s*(?P<prompt>\d+) tokens?",
    "qwen anthropic": r"(?P<prompt>\d+) tokens? > (?P<context>\d+)",
}


def pi(text):
    return re.search(r"(?i)prompt is too long|maximum context length is \d+ tokens|context[_ ]length[_ ]exceeded", text) \
        and not re.search(r"(?i)rate limit|too many requests", text)


def opencode(text, error):
    return re.search(r"(?i)prompt is too long|maximum context length is \d+ tokens", text) or error.get("code") == "context_length_exceeded"


def qwen(text):
    return re.search(r"(?i)\bcontext[_\s-]?length[_\s-]?exceeded\b|\bmaximum context length\b|\bprompt (is )?too long\b", text) \
        and not re.search(r"(?i)timed? ?out|deadline exceeded", text)


def continue_(text):
    text = text.lower()
    return ("invalid_request_error" in text and "context" in text) or "maximum context length" in text or "context_length_exceeded" in text


def claude(text):
    return "prompt is too long" in text.lower()


def numbers(pattern, text, n):
    m = re.search(pattern, text, re.I)
    assert m and int(m["context"]) == CONTEXT and (n is None or int(m["prompt"]) == n), (pattern, text)


LONG = "word " * 9000
CHAT = {"model": "m", "messages": [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": LONG}]}


def n_tokens(s, body):
    return s.json("/v1/messages/count_tokens", body)["input_tokens"]


def test_chat(s):
    """OpenAI's chat: opencode, Qwen Code, pi and Continue. The SDK's message is the status and the error's message."""
    for more in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}, {"max_completion_tokens": 32000}):
        status, headers, body = s.post("/v1/chat/completions", {**CHAT, **more})
        error = json.loads(body)["error"]
        text = f"{status} {error['message']}"
        assert status == 400 and headers["content-type"].startswith("application/json"), (status, headers)
        assert error["type"] == "invalid_request_error" and error["code"] == "context_length_exceeded", error
        assert pi(text) and opencode(error["message"], error) and qwen(text) and continue_(text), text
        numbers(NUMBERS["qwen"], text, None)
        assert error["n_ctx"] == CONTEXT and error["n_prompt_tokens"] > CONTEXT, error
    for path, request in (("/v1/completions", {"prompt": LONG}), ("/completion", {"prompt": LONG})):
        error = s.json(path, request, 400)["error"]
        assert pi(error["message"]) and qwen(error["message"]) and error["code"] == "context_length_exceeded", error


def test_responses(s):
    """Codex reads the stream only: a response that failed, with the code. opencode's provider of OpenAI reads both."""
    status, headers, body = s.post("/v1/responses", {"input": LONG, "stream": True})
    events = [json.loads(e.split("data: ", 1)[1]) for e in body.strip().split("\n\n") if "data: " in e]
    failed = [e for e in events if e["type"] == "response.failed"]
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and len(failed) == 1 and failed[0] is events[-1], body[:500]
    error = failed[0]["response"]["error"]
    assert failed[0]["response"]["status"] == "failed" and error["code"] == "context_length_exceeded" and pi(error["message"]), error
    error = s.json("/v1/responses", {"input": LONG}, 400)["error"]
    assert opencode(error["message"], error) and pi(error["message"]) and continue_("400 " + error["message"]), error


def test_messages(s):
    """Anthropic's messages: Claude Code, and pi, Qwen Code, opencode and Continue with that API. The SDK's message is the status
    and the body."""
    body = {"model": "m", "max_tokens": 100, "system": [{"type": "text", "text": "You are an agent."}], "messages": [{"role": "user", "content": LONG}]}
    n = n_tokens(s, {k: v for k, v in body.items() if k != "max_tokens"})
    for more in ({}, {"stream": True}):
        status, _, text = s.post("/v1/messages", {**body, **more})
        error = json.loads(text)
        assert status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error", text
        text = f"{status} {text}"
        assert claude(text) and pi(text) and qwen(text) and continue_(text) and opencode(text, {}), text
        numbers(NUMBERS["claude"], text, n)
        numbers(NUMBERS["qwen anthropic"], text, n)


def test_ollama(s):
    """Ollama's API, also where the request bounds its context itself."""
    for path, request in (("/api/chat", {"messages": CHAT["messages"]}), ("/api/generate", {"prompt": LONG})):
        for options in ({}, {"num_ctx": CONTEXT // 2}):
            error = s.json(path, {"model": "m", "options": options, **request}, 400)["error"]
            assert pi(error) and qwen(error) and continue_(error), error


def test_recovers(s):
    """The shorter conversation that follows is answered."""
    assert s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})["choices"]


server = Server(BUILD, "-c", str(CONTEXT))
run_tests([test_chat, test_responses, test_messages, test_ollama, test_recovers], server)
