"""Autocompletion in editors: requests of the shapes that llama.vim, llama.vscode and Continue send, and what these plugins read of
the replies. The texts are made up. The model is the toy with fill-in-the-middle tokens."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import Server, fim_model, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
KEYS = {"authorization": "Bearer ", "content-type": "application/json"}
PREFIX = "def area(r):\n    pi = 3.14\n"
SUFFIX = "\n\nprint(area(2))\n"
EXTRA = [{"text": "def side(a):\n    return a\n", "time": 12345, "filename": "shapes.py"}, {"text": "x = 1\n", "filename": "b.py"}]
TIMINGS = ["prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_token_ms",
           "predicted_per_second"]


def vim(**more):
    """A completion in llama.vim."""
    return {"id_slot": 0, "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": EXTRA, "prompt": "    retu", "n_predict": 16, "stop": [],
            "n_indent": 4, "top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True,
            "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
            "response_fields": ["content", *("timings/" + t for t in TIMINGS), "truncated", "tokens_cached"], "model": "", **more}


def test_vim(s):
    """The reply has the fields under the names that were asked for, slashes included, and nothing else."""
    r = s.json("/infill", vim(), headers=KEYS)
    assert set(r) == {"content", "truncated", "tokens_cached", *("timings/" + t for t in TIMINGS)}, r
    assert isinstance(r["content"], str) and r["truncated"] is False and isinstance(r["tokens_cached"], int)
    assert all(isinstance(r["timings/" + t], (int, float)) for t in TIMINGS) and r["timings/predicted_n"] <= 16
    text = s.post("/infill", vim(), headers=KEYS)[2]
    assert text.lstrip().startswith("{") and '"content":"' in text.replace('": "', '":"'), text  # looked for before it is parsed
    # the extra context is in the prompt, before the file, with its names
    whole = s.json("/infill", {k: v for k, v in vim(n_predict=1).items() if k != "response_fields"})
    names = [whole["prompt"].index(n) for n in ("shapes.py", "b.py", "def area")]
    assert names == sorted(names), whole["prompt"]
    assert whole["prompt"].endswith("    retu" + "<|fim_suffix|>" + SUFFIX + "<|fim_middle|>"), whole["prompt"]


def test_vim_ring(s):
    """While nobody types, llama.vim sends its extra context with nothing else. It is computed then, and found later."""
    extra = [{"text": f"def f{i}(x):\n    return x + {i}\n" * 12, "time": i, "filename": "ring.py"} for i in range(12)]
    ring = {"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": extra, "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": [],
            "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""], "model": ""}
    assert s.json("/infill", ring, headers=KEYS) == {}
    first = s.json("/infill", vim(input_extra=extra, response_fields=["timings/cache_n", "tokens_evaluated"], t_max_prompt_ms=-1))
    assert first["tokens_evaluated"] > 4000 and first["timings/cache_n"] > first["tokens_evaluated"] - 150, first


def test_vim_instruct(s):
    """Instructions about a block: a request that fills the cache, then one that streams."""
    messages = [{"role": "system", "content": "You edit text."}, {"role": "user", "content": "Make it shorter:\n" + PREFIX * 20}]
    warm = {"id_slot": 1, "messages": messages, "samplers": [], "n_predict": 0, "stream": False, "cache_prompt": True, "response_fields": [""], "model": ""}
    r = s.json("/v1/chat/completions", warm, headers=KEYS)
    assert r["usage"]["completion_tokens"] <= 1, r["usage"]
    text = s.post("/v1/chat/completions", {"id_slot": 1, "messages": messages, "min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"], "stream": True,
                                          "cache_prompt": True, "model": "", "max_tokens": 8}, headers=KEYS)[2]
    pieces = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    assert all(isinstance(p["choices"][0]["delta"].get("content") or "", str) for p in pieces if p["choices"]) and len(pieces) > 2
    limited = s.json("/v1/chat/completions", {"messages": messages, "n_predict": 3, "ignore_eos": True})
    assert limited["usage"]["completion_tokens"] == 3 and limited["choices"][0]["finish_reason"] == "length"
    both = s.json("/v1/chat/completions", {"messages": messages, "n_predict": 3, "max_tokens": 2, "ignore_eos": True})
    assert both["usage"]["completion_tokens"] == 2
    assert s.json("/v1/chat/completions", {"messages": messages, "n_predict": "x"}, 400)["error"]["param"] == "n_predict"


def vscode(**more):
    """A completion in llama.vscode: several at once, without response_fields."""
    return {"id_slot": 0, "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": EXTRA, "prompt": "    retu", "n_predict": 16, "n_cmpl": 3, "top_k": 40,
            "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4, "t_max_prompt_ms": 500,
            "t_max_predict_ms": 2500, **more}


def test_vscode(s):
    def read(r):
        assert isinstance(r["content"], str) and isinstance(r["truncated"], bool) and isinstance(r["tokens_cached"], int), r
        assert isinstance(r["generation_settings"], dict) and r["generation_settings"]["n_predict"] == 16
        assert all(isinstance(r["timings"][t], (int, float)) for t in TIMINGS), r
    several = s.json("/infill", vscode())
    assert isinstance(several, list) and len(several) == 3
    for r in several:
        read(r)
    one = s.json("/infill", vscode(n_cmpl=1))
    assert isinstance(one, dict)
    read(one)
    assert "n_cmpl" in s.json("/infill", vscode(n_cmpl=0), 400)["error"]["message"]
    fill = {"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0, "samplers": [], "cache_prompt": True,
            "t_max_prompt_ms": 500, "t_max_predict_ms": 1}
    assert s.json("/infill", fill)["tokens_predicted"] == 0


def test_vscode_around(s):
    """What the extension asks the server about itself, and its counts of tokens."""
    assert json.loads(s.get("/health")[2])["status"] == "ok"
    models = json.loads(s.get("/v1/models")[2])["data"]
    assert len(models) == 1 and models[0]["id"] and isinstance(models[0]["meta"], dict)
    for path in ("/props", f"/props?model={models[0]['id']}&autoload=false"):
        props = json.loads(s.get(path)[2])
        assert props["default_generation_settings"]["n_ctx"] == 8192, props
    prompt = s.json("/apply-template", {"messages": [{"role": "user", "content": "hi"}], "model": models[0]["id"]})["prompt"]
    n = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})["usage"]["prompt_tokens"]
    assert len(s.json("/tokenize", {"content": prompt, "add_special": False, "parse_special": True})["tokens"]) == n
    r = s.json("/v1/chat/completions", {"messages": [{"role": "system", "content": "You edit."}, {"role": "user", "content": "x"}], "stream": False,
                                        "cache_prompt": True, "temperature": 0.8, "top_p": 0.95, "max_tokens": 4})
    assert isinstance(r["choices"][0]["message"]["content"], str)


def test_continue(s):
    """Continue with the provider llama.cpp spells the model's tokens in the prompt of /completion and streams."""
    body = {"prompt": "<|fim_prefix|>" + PREFIX + "<|fim_suffix|>" + SUFFIX + "<|fim_middle|>", "stream": True, "n_predict": 12, "temperature": 0.01,
            "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "\n\n", "```"]}
    status, headers, text = s.post("/completion", body, headers={"authorization": "Bearer undefined", "content-type": "application/json"})
    events = [json.loads(e[6:]) for e in text.strip().split("\n\n")]
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and events[-1]["stop"] is True
    assert all(isinstance(e["content"], str) for e in events)
    infill = s.json("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 1})
    assert events[-1]["tokens_evaluated"] == infill["tokens_evaluated"]  # the spelled tokens are single tokens
    # with OpenAI's provider: the legacy completions, with a suffix
    r = s.json("/v1/completions", {"model": "m", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0.01, "top_p": 1, "stop": ["\n\n"], "stream": False})
    assert isinstance(r["choices"][0]["text"], str)


def test_vim_itself(s):
    """llama.vim, unmodified, in Vim: what it shows behind the cursor is the model's completion, and Tab takes it. LLAMA_VIM is a
    folder with the plugin."""
    plugin = os.environ.get("LLAMA_VIM", "")
    if not os.path.exists(os.path.join(plugin, "autoload", "llama.vim")) or not (shutil.which("vim") and shutil.which("tmux")):
        print("skipped: llama.vim itself: no Vim, no tmux, or LLAMA_VIM is not its folder")
        return
    with tempfile.TemporaryDirectory() as d:
        def tmux(*args):
            return subprocess.run(["tmux", "-S", d + "/tmux", *args], capture_output=True, text=True, check=True).stdout

        def screen(fits):
            while not fits(text := tmux("capture-pane", "-p", "-t", "0")):
                time.sleep(0.1)
            return text
        with open(d + "/vimrc", "w") as f:
            f.write(f"set nocompatible\nset rtp+={plugin}\nlet g:llama_config = {{'endpoint_fim': 'http://127.0.0.1:{s.port}/infill', 'show_info': 0, "
                    "'t_max_prompt_ms': 60000, 't_max_predict_ms': 60000, 'n_predict': 12}\n")
        with open(d + "/area.py", "w") as f:
            f.write(PREFIX + SUFFIX)
        tmux("new-session", "-d", "-x", "120", "-y", "30", f"vim -u {d}/vimrc {d}/area.py")
        try:
            screen(lambda t: "pi = 3.14" in t or "ENTER" in t)
            tmux("send-keys", "-t", "0", "Enter")  # older Vims warn
            screen(lambda t: "pi = 3.14" in t)
            tmux("send-keys", "-t", "0", "ggOretu")
            ghost = screen(lambda t: t.startswith("retu") and t.split("\n")[0].rstrip() != "retu").split("\n")[0].rstrip()[4:]
            tmux("send-keys", "-t", "0", "Tab", "Escape")
            tmux("send-keys", "-t", "0", ":w", "Enter")
            screen(lambda t: "written" in t)
            text = open(d + "/area.py").read()
            assert ghost and "retu" + ghost in text and text != PREFIX + SUFFIX, (ghost, text)
        finally:
            tmux("kill-server")


def test_time(s):
    """A prompt that takes longer than t_max_prompt_ms ends without a text; nothing is left running."""
    r = s.json("/infill", vim(input_prefix="x = 1\n" * 4000, t_max_prompt_ms=1, n_predict=4))
    assert r["content"] == "" or r["timings/predicted_n"] <= 4
    s.wait_metric("steel_requests_running", 0)


plain = Server(BUILD)
server = Server(BUILD, model=fim_model(plain, os.path.join(plain.dir.name, "fim.gguf"), QWEN))
run_tests([test_vim, test_vim_ring, test_vim_instruct, test_vscode, test_vscode_around, test_continue, test_vim_itself, test_time], server)
