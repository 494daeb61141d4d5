#!/usr/bin/env python3
"""The chat terminal as a person meets it, in a real terminal (tmux): an answer streams, Ctrl-C stops one and
the chat goes on, history, several lines, pasted text, Tab, commands, markdown at any width, a window that
changes its size, thinking and its time, hostile texts, conversations that outgrow their context, and ten turns that each read only their own new tokens. Two screens are drawn as BUILD/terminal*.svg;
`make pictures` puts them into docs/img."""
import fcntl, json, os, pty, re, shutil, struct, subprocess, sys, tempfile, termios, time, unicodedata

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
import term_svg

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.abspath(os.path.join(BUILD, "steel"))
HANG = 300  # seconds after which a silent terminal is taken to hang


servers = []  # one tmux server each, under a name of its own: a dying one must not take the next along


def tmux(*args):
    return subprocess.run(["tmux", "-L", servers[-1], *args], capture_output=True, text=True)


class Terminal:
    def __init__(self, home, args="", env="", columns=100, rows=50):
        servers.append(f"steel-{os.getpid()}-{len(servers)}")
        tmux("-u", "new-session", "-d", "-x", str(columns), "-y", str(rows),
             f"env HOME={home} TERM=screen {env} {STEEL} run {args} 2>{home}/stderr; echo EXIT $?; sleep 1000")
        self.wait(lambda s: s.rstrip().endswith(">>>") or "EXIT" in s, "a prompt")

    def screen(self, *more):
        return tmux("capture-pane", "-p", "-S", "-500", *more).stdout

    def paste(self, text):
        """As terminals paste: in one piece, marked (bracketed paste)."""
        subprocess.run(["tmux", "-L", servers[-1], "load-buffer", "-"], input=text, text=True, check=True)
        tmux("paste-buffer", "-p")

    def wait(self, ready, what):
        end = time.time() + HANG
        while time.time() < end:
            s = self.screen()
            if ready(s):
                return s
            time.sleep(0.05)
        raise AssertionError(f"no {what}; the screen:\n{self.screen()}")

    def keys(self, *keys):
        tmux("send-keys", *keys)

    def type(self, text):
        tmux("send-keys", "-l", text)

    def ask(self, text):
        """Sends a line; returns what was printed until the next prompt."""
        prompts = lambda s: len(re.findall(r"^>>>", s, re.M))
        before = prompts(self.screen())
        self.type(text)
        self.keys("Enter")
        s = self.wait(lambda s: prompts(s) > before and s.rstrip().endswith(">>>"), f"answer to {text!r}")
        return s[s.rindex(text) + len(text):].rsplit(">>>", 1)[0].strip()


def check(ok, what, detail=""):
    print(("ok    " if ok else "FAIL  ") + what)
    if not ok:
        print(detail)
        sys.exit(1)


def saved(t, home):
    """The conversation, as /save writes it."""
    path = os.path.join(home, "saved.json")
    if os.path.exists(path):
        os.remove(path)
    t.type(f"/save {path}")
    t.keys("Enter")
    t.wait(lambda s: os.path.exists(path) and s.rstrip().endswith(">>>"), "the saved conversation")
    return json.load(open(path))


def columns_of(line):
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def drops(home):
    """A picture that is dropped is its path: in quotes, with a backslash, as a URL, before the question and after it, or alone."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, "demo/see")
    import pictures
    if subprocess.run([STEEL, "show", "builtin-see", "--brief"], capture_output=True).returncode:
        print("skipped: dropped pictures: this build carries no model that sees")
        return
    canvas = pictures.Canvas(200, 150, (255, 255, 255))
    canvas.fill(pictures.turn(pictures.outline("circle"), 90, 70, 40, 40, 0), pictures.COLOURS["blue"])
    path = os.path.join(home, "a circle.png")
    open(path, "wb").write(pictures.png(200, 150, bytes(canvas.rgb)))
    t = Terminal(home, "builtin-see --temp 0", columns=160)
    for line in f"'{path}' What is this?", path.replace(" ", "\\ ") + " What is this?", f"What is this? 'file://{path.replace(' ', '%20')}'":
        got = t.ask(line)
        check("A blue circle." in got, "a dropped picture: " + line.replace(home, ""), got)
        t.ask("/clear")
    check("the picture is part of your next message" in t.ask(f'"{path}"'), "a picture alone waits for its question")
    check("A blue circle." in t.ask("What is this?"), "and is seen with it")
    t.ask("/clear")
    got = t.ask("/home/nobody/x.png what")
    check("/help" in got, "a path without a file is no picture", got)
    messages = saved(t, home)["messages"]
    check(messages == [], "and no message", messages)
    t.keys("C-d")
    t.wait(lambda s: "EXIT 0" in s, "the end")


def paste_and_tab(home):
    t = Terminal(home, "--temp 0 --think off", columns=60)
    t.paste("one\n\ntwo äé 一二\n/three\\")
    t.wait(lambda s: "/three\\" in s, "the pasted lines")
    t.type(" more")
    t.wait(lambda s: s.rstrip().endswith("more"), "typing behind what was pasted")
    check("..." not in t.screen(), "newlines that are pasted send nothing", t.screen())
    t.keys("Enter")
    t.wait(lambda s: s.rstrip().endswith(">>>"), "an answer to pasted lines")
    got = saved(t, home)["messages"]
    check([m["role"] for m in got] == ["user", "assistant"] and got[0]["content"] == "one\n\ntwo äé 一二\n/three\\ more",
          "what is pasted is one message", got)
    t.paste("/clear")
    t.keys("Enter")
    t.wait(lambda s: "is cleared" in s, "a pasted command")
    t.paste("x\033[2Jy\n")  # tmux itself may drop the escape; nothing of it may act
    t.wait(lambda s: "y" in s.split(">>>")[-1], "pasted text with an escape sequence")
    check("is cleared" in t.screen(), "pasted escape sequences do not act", t.screen())
    t.keys("C-c")
    t.wait(lambda s: s.rstrip().endswith(">>>"), "a new prompt")

    os.makedirs(os.path.join(home, "chats", "deep"), exist_ok=True)
    open(os.path.join(home, "chats", "deep", "talk one.json"), "w").write('{"messages": [{"role": "user", "content": "x"}]}')
    t.type("/cl")
    t.keys("Tab")
    t.wait(lambda s: s.rstrip().endswith(">>> /clear"), "/cl<Tab>")
    t.keys("C-u")
    t.type("/s")
    t.keys("Tab")
    s = t.wait(lambda s: "/system" in s and "/save" in s and s.rstrip().endswith(">>> /s"), "the choices of /s<Tab>")
    t.keys("C-u")
    t.type("/load ~/ch")
    t.keys("Tab")
    t.wait(lambda s: s.rstrip().endswith("/load ~/chats/"), "a folder by <Tab>")
    t.type("d")
    t.keys("Tab")
    t.type("ta")
    t.keys("Tab")
    t.wait(lambda s: s.rstrip().endswith("/load ~/chats/deep/talk one.json"), "a file by <Tab>")
    t.keys("Enter")
    t.wait(lambda s: "1 messages loaded" in s, "the file that Tab has found")
    t.type("/set over")
    t.keys("Tab")
    t.type("e")
    t.keys("Tab")
    t.wait(lambda s: s.rstrip().endswith("/set overflow error"), "settings and their values by <Tab>")
    t.keys("Enter")
    check("overflow = error" in t.wait(lambda s: "overflow = error" in s, "the setting"), "Tab completes commands, paths and settings")
    check("No such file" in t.ask("/image cat.png"), "/image names a file that is missing")
    check("this model reads text only" in t.ask("/image README.md"), "/image is refused with a reason")
    check("did you mean /system" in t.ask("/sytem"), "a misspelt command is recognised")


TALK = """# Rivers
Some **bold words** here, *leaning ones*, `code` and 一二三四五六七八九十 wide ones that go on, é too, to the edge.

- first item that is long enough to wrap on a narrow screen
- second
  1. nested

```python
def f(x):
    return x ** 2
```

| name | length in km |
|---|---:|
| Nile | 6650 |
| Amazon | **6400** |

> quoted words
done."""


def markdown(home):
    """The model is made to write TALK by a grammar; what the screen shows of it is checked at several widths."""
    grammar = os.path.join(home, "talk.gbnf")
    open(grammar, "w").write("root ::= " + json.dumps(TALK, ensure_ascii=False))
    for columns in (100, 40, 24):
        t = Terminal(home, f"--temp 0 --think off --grammar {grammar}", columns=columns, rows=60)
        t.type("Go")
        t.keys("Enter")
        s = t.wait(lambda s: "done." in s and s.rstrip().endswith(">>>"), "the text")
        raw, body = t.screen("-e"), s.partition("Go\n")[2]
        lines = body.split("done.")[0].split("\n")
        at = f" at {columns} columns"
        check(all(columns_of(l) < columns for l in lines), "no line is too wide" + at, body)
        check("**" not in body.replace("x ** 2", "") and "# Rivers" not in body and "`" not in body, "marks are gone" + at, body)
        words = re.sub(r"[│─┼╭╰]", " ", body.split("done.")[0])
        for word in ("bold words", "leaning ones", "first item that is long enough to wrap on a narrow screen", "quoted words", "nested"):
            check(word in " ".join(words.split()), f"{word!r} in whole words" + at, body)
        check(re.search(r"╭─ python ─+\ndef f\(x\):\n    return x \*\* 2\n╰─+\n", body), "code has a frame and can be copied" + at, body)
        check("• first" in body and "  1. nested" in body, "lists" + at, body)
        check(re.search(r"name +│ +length", body) and re.search(r"Nile +│ +6650", body) and "┼" in body, "a table" + at, body)
        check(re.search(r"\033\[1mbold", raw) and re.search(r"\033\[3mleaning", raw) and re.search(r"\033\[36mcode", raw), "bold, italics, code" + at, raw)
        check(re.search(r"[\d.]+ tok/s, \d+ tokens left", " ".join(body.split())), "a quiet line tells speed and room" + at, body)
    t.ask("/set markdown off")
    s = t.ask("Go")
    check("**bold" in s and "```python" in s, "/set markdown off shows what the model writes", s)
    t = Terminal(home, f"--temp 0 --think off --grammar {grammar}", "NO_COLOR=1", columns=40, rows=60)
    t.type("Go")
    t.keys("Enter")
    s = t.wait(lambda s: "done." in s and s.rstrip().endswith(">>>"), "the text")
    check("\033[" not in t.screen("-e").replace("\033[39m", "").replace("\033[49m", "") and "**bold" in s, "without colours marks stay", s)
    out = subprocess.run([STEEL, "run", "-p", "Go", "-q", "--think", "off", "--grammar", grammar], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL)
    check(out.stdout.rstrip("\n") == TALK, "a pipe gets what the model writes", out.stdout)


def narrow(home):
    """At 40 columns: the commands, typing over the edge, and another size of the window in the middle of it all."""
    t = Terminal(home, "--temp 0 --think off", columns=40)
    s = t.ask("/help")
    check("system prompt" in " ".join(s.split()) and all(len(l) < 40 for l in s.split("\n")), "/help wraps at words", s)
    t.type("What is the sum of these two numbers, please: 2 + 2?")
    t.keys("Enter")
    t.wait(lambda s: s.rstrip().endswith(">>>") and "tokens left" in s, "an answer to a line over the edge")
    got = saved(t, home)["messages"][0]["content"]
    check(got == "What is the sum of these two numbers, please: 2 + 2?", "a line over the edge is one message", got)
    t.type("Tell me a sh")
    tmux("resize-window", "-x", "62", "-y", "40")
    time.sleep(0.3)
    t.type("ort story.")
    t.wait(lambda s: s.rstrip().endswith("short story."), "typing goes on after a change of size")
    t.keys("Enter")
    s = t.wait(lambda s: s.rstrip().endswith(">>>") and s.count("tokens left") == 2, "a story")
    story = s.split("short story.")[-1].split("\n")
    check(40 < max(map(len, story)) < 62, "an answer fills the new width", s)


def resize(home):
    """The window changes its size while a line is edited and while an answer streams: there is one prompt, with the line."""
    t = Terminal(home, "--temp 0 --think off", "STEEL_ISA=ref", columns=80, rows=40)
    tty = tmux("display-message", "-p", "#{pane_tty}").stdout.strip()

    def resized(width):
        """tmux tells the program some time after it has wrapped the screen anew."""
        tmux("resize-window", "-x", str(width), "-y", "40")
        end = time.time() + HANG
        while os.get_terminal_size(fd).columns != width:
            assert time.time() < end, "the terminal keeps its size"
            time.sleep(0.01)

    def shows(text, width):
        """Whether the screen ends with the prompt and the text, wrapped at the width."""
        whole = ">>> " + text
        want = [whole[i:i + width].rstrip() for i in range(0, len(whole), width)]
        return lambda s: [l.rstrip() for l in s.split("\n") if l.strip()][-len(want):] == want

    fd = os.open(tty, os.O_RDONLY | os.O_NOCTTY)
    line, at = "Tell me a short story about the sea, the sand", 45
    for _ in range(2):  # tmux moves the top of an empty screen into its history, out of reach
        t.ask("/set")
    prompts = t.screen().count(">>>")
    t.type(line)
    t.wait(shows(line, 80), "the line")
    for middle in (False, True):
        for width in (52, 30, 20, 60, 100, 25, 47, 80):
            resized(width)
            t.type("_")  # it comes after the change of size
            s = t.wait(shows(line[:at] + "_" + line[at:], width), f"one line at {width} columns")
            check(s.count(">>>") == prompts and "Ctrl-D" in " ".join(s.split()), f"one prompt at {width} columns", s)
            t.keys("BSpace")
            t.wait(shows(line, width), f"the line at {width} columns")
        if not middle:  # once more, with the cursor in the middle of the line
            at = 24
            t.keys("C-a")
            for _ in range(at):
                t.keys("Right")
    t.keys("C-e")
    t.type(" X")
    t.wait(shows(line + " X", 80), "typing after it")
    t.keys("C-u")
    t.type("Tell me a long story.")
    t.keys("Enter")
    t.wait(lambda s: len(s.partition("long story.")[2].split()) > 3, "the start of a story")
    for width in (50, 30, 70, 44):
        resized(width)
        seen = len(t.screen().split())
        t.wait(lambda s: len(s.split()) > seen or "tokens" in s, "more of the story")
    s = t.wait(lambda s: s.rstrip().endswith(">>>") and "tokens" in s, "the end of the story")
    check(s.count(">>>") == prompts + 1, "one prompt after an answer during which the size changed", s)
    t.type("What is 2 + 2?")
    t.wait(shows("What is 2 + 2?", 44), "typing after it")
    os.close(fd)


def recorded(home, args, env):
    """The bytes that a terminal gets of one answer."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(STEEL, [STEEL, "run", "-q", "--temp", "0", *args], {"HOME": home, "LANG": "C.UTF-8", "TERM": "xterm", **env})
    out = b""
    try:
        while more := os.read(fd, 65536):
            out += more
    except OSError:
        pass
    os.waitpid(pid, 0)
    return re.sub(rb"^[^\033]*\r\033\[K", b"", out)  # the progress of loading


HOSTILE = ("<think>t\033[2J \033]0;t\007 \u009b2J</think>a\033[2Jb \033]52;c;eA==\007 \u009b2J **\033[1m** `\033[2J`\n"
           "[x](http://a.b/\033\\\033[2J) [y\007](http://a.b/c) [z](http://a.b/\u009c)\n\n"
           "| a\033[2J | b |\n|---|---|\n| [q\007](http://a.b/d) | \033]8;;http://e.v\033\\ |\n\n"
           "```python\033[2J\nif 1: \033[2J '\033]0;s\007' # \033[2J\n```\n"
           "```\033]0;u\007\n\033[2J\r\b\n```\nend")


def escapes(home):
    """Whatever the model writes, the terminal gets only Steel's own sequences: styles, and links to web addresses."""
    grammar = os.path.join(home, "hostile.gbnf")
    open(grammar, "w").write("root ::= " + json.dumps(HOSTILE).replace("\\b", "\\x08"))
    ours = re.compile(rb"\033\[[0-9;]*m|\033\]8;;(https?://[!-\[\]-~]*)?\033\\|\r\033\[K")
    for more, env in ((["--think", "off"], {"FORCE_HYPERLINK": "1"}), (["--think", "hide"], {}), (["--plain"], {}), ([], {"NO_COLOR": "1"}),
                      (["--plain"], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"}), (["--raw"], {})):
        out = recorded(home, ["-p", "Go", "--grammar", grammar, *more], env)
        what = f"{' '.join(more)} {env}"
        rest = ours.sub(b"", out).decode()
        bad = [c for c in rest if (ord(c) < 32 and c not in "\r\n\t") or 127 <= ord(c) < 160]
        check("end" in rest and "^[" in rest and not bad, "no control character of the model gets through: " + what, (bad, out))
        check(not env or "FORCE_HYPERLINK" in env or b"\033[" not in out.replace(b"\033[K", b""), "no styles where there are none: " + what, out)
        if "FORCE_HYPERLINK" in env:
            check(re.findall(rb"\033\]8;;([^\033]+)", out) == [b"http://a.b/c", b"http://a.b/%C2%9C", b"http://a.b/d"], "links: " + what, out)
            check(b"\033[0;35mif" in out and b"Thought for" in out, "code has colours: " + what, out)
    out = subprocess.run([STEEL, "run", "-q", "--think", "off", "-p", "Go", "--grammar", grammar], capture_output=True, stdin=subprocess.DEVNULL)
    check(out.stdout.decode().rstrip("\n") == HOSTILE.split("</think>")[1] and b"Think" not in out.stderr.replace(b"<think>", b""),
          "a pipe gets the bytes as they are", out)


def thinking(home):
    """The line that tells of thinking: live, then its time; with the text or without it."""
    t = Terminal(home, "--temp 0")
    took = r"Thought for \d+\.\d s\n\n"
    a = t.ask("What is 17 + 25?")
    check(re.match(r"Thinking\.\.\.\n.*ones.*\n" + took + r"17 \+ 25 = 42", a, re.S), "thinking is shown, and how long it took", a)
    check(re.search("\033\\[2mThinking", t.screen("-e")), "it is dim", t.screen("-e"))
    for command in ("/think hide", "/set think hide"):
        t.ask("/think on")
        check("hide" in t.ask(command), command)
        a = t.ask("What is 17 + 25?")
        check(re.match(took + r"17 \+ 25 = 42", a), command + " leaves only the time", a)
    check("off" in t.ask("/set nothink"), "/set nothink")
    a = t.ask("What is 17 + 25?")
    check(a.startswith("17 + 25 = 42"), "no thinking, no line", a)
    check("thinking is on" in t.ask("/set think"), "/set think")
    for more in (["--hidethinking"], ["--think", "hide"]):
        out = recorded(home, ["-p", "What is 17 + 25?", *more], {})
        check(re.match(rb"\033\[2mThinking\.\.\.\033\[0m\r\033\[K(\033\[2mThinking\.\.\. \d+ s\033\[0m\r\033\[K)*\033\[2mThought for [\d.]+ s\033\[0m\r\n\r\n17", out),
              f"{more}: one line that changes", out)
        out = recorded(home, ["-p", "What is 17 + 25?", *more], {"NO_COLOR": "1"})
        check(re.match(rb"Thinking\.\.\.\r\nThought for [\d.]+ s\r\n\r\n17", out), f"{more}: without colours, two lines", out)
        out = subprocess.run([STEEL, "run", "-q", "--temp", "0", "-p", "What is 17 + 25?", *more], capture_output=True, stdin=subprocess.DEVNULL)
        check(out.stdout == b"17 + 25 = 42.\n" and out.stderr == b"", f"{more}: nothing of it in a pipe", out)


def settings(home):
    """/set knows every sampling setting, shows what is in force, and an answer follows it."""
    t = Terminal(home, "--temp 0 --think off --top-nsigma 1.5 --samplers top_k")
    a = t.ask("/set")
    for line in ("temp = 0", "top_n_sigma = 1.5", "typical_p = 1", "xtc_threshold = 0.1", "dry_base = 1.75", "dry_penalty_last_n = -1",
                 "mirostat_tau = 5", "dynatemp_exponent = 1", "repeat_last_n = 64", "samplers = top_k"):
        check(line in a.split("\n"), f"/set lists {line}", a)
    for name, value in (("xtc_probability", "0.5"), ("dry_multiplier", "0.75"), ("mirostat", "2"), ("dynatemp_range", "0.25"), ("samplers", "top_k;temperature")):
        check(f"{name} = {value}" in t.ask(f"/set {name} {value}"), f"/set {name}")
    check("takes a number in 0..2" in t.ask("/set mirostat 3") and "unknown" in t.ask("/set samplers nonsense"), "what is out of range is refused")
    check("samplers = default" in t.ask("/set samplers default"), "/set samplers default")
    for line in ("/set mirostat 0", "/set xtc_probability 0", "/set dry_multiplier 0", "/set dynatemp_range 0", "/set top_n_sigma 0", "/set temp 0"):
        t.ask(line)
    say = lambda: (t.ask("/clear"), re.sub(r"\n\d.* left", "", t.ask("Tell me a short story.")))[1]
    usual = say()
    t.ask("/set dry_multiplier 5")
    t.ask("/set dry_allowed_length 1")
    check(say() != usual, "DRY changes the answer")
    t.ask("/set dry_multiplier 0")
    check(say() == usual, "and no longer")


def long_chat(home):
    """A context of 256 tokens: the chat outlives it."""
    t = Terminal(home, "--temp 0 --think off -c 256 --system 'You are Rolf.'")
    for i in range(12):
        a = t.ask(f"What is {i + 2} + {i + 3}?")
        check(str(2 * i + 5) in a and "steel:" not in a, f"turn {i + 1} is answered", a)
        if "are dropped" in a or "is dropped" in a:
            break
    check("are dropped" in a or "is dropped" in a, "dropped turns are told of", t.screen())
    all_of_it = saved(t, home)
    check(len(all_of_it["messages"]) == 2 * (i + 1) and all_of_it["system"] == "You are Rolf.", "/save has the dropped turns too", all_of_it)
    a = t.ask("/show")
    check("You are Rolf." in a and "older ones dropped" in a, "the system prompt stays", a)
    t.paste(" ".join(map(str, range(300))))
    t.keys("Enter")
    t.wait(lambda s: "it is discarded" in " ".join(s.split()) and s.rstrip().endswith(">>>"), "the refusal")
    check("299" not in json.dumps(saved(t, home)), "a message that can never fit is not kept", t.screen())
    a = t.ask("What is 2 + 2?")
    check("4" in a and "steel:" not in a, "and the chat goes on", a)

    t = Terminal(home, "--temp 0 --think off -c 128 --context-overflow error")
    for i in range(12):
        a = t.ask(f"What is {i + 2} + {i + 3}?")
        if "the conversation has" in a:
            break
    words = " ".join(a.split())
    check("the conversation has" in words and "--context-overflow drop" in words, "--context-overflow error refuses, with the numbers", a)
    check(len(saved(t, home)["messages"]) == 2 * i, "what is refused is not kept")
    check("5" in (t.ask("/undo"), t.ask("/undo"), t.ask("What is 2 + 3?"))[-1], "after /undo there is room again")


def other_model(home):
    t = Terminal(home, "--temp 0 --think off")
    t.ask("What is 2 + 2?")
    check("No such file" in t.ask("/model nowhere.gguf") and "4" in t.ask("What is 1 + 3?"), "/model with no such file keeps the model")
    open(os.path.join(home, "bad.gguf"), "w").write("GGUF no")
    check("bad.gguf" in t.ask(f"/model {home}/bad.gguf") and "4" in t.ask("What is 1 + 3?"), "/model with a bad file keeps the model")
    folder = os.path.abspath("demo/steel-demo")
    a = t.ask(f"/model {folder}")
    check("switched to" in a, "/model opens another", a)
    check("6" in t.ask("What is 3 + 3?") and len(saved(t, home)["messages"]) == 8, "the conversation goes on with it")
    t.ask("/system You are a pirate.")
    check(saved(t, home)["system"] == "You are a pirate." and "pirate" in t.ask("/system"), "/system")


def narrow_bar(home):
    """The bar of a long job stays in one line of a narrow terminal."""
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        os.execv(STEEL, [STEEL, "quantize", "demo/steel-demo.gguf", os.path.join(home, "q.gguf"), "Q8_0", "--allow-requantize"])
    out = b""
    try:
        while more := os.read(fd, 65536):
            out += more
    except OSError:
        pass
    os.waitpid(pid, 0)
    bars = [b for b in re.split(r"[\r\n]", out.decode()) if b.startswith("quantising")]
    check(bars and max(map(len, bars)) < 40, "progress fits 40 columns", out)


def picture(home):
    t = Terminal(home, "--temp 0 --seed 3", columns=76, rows=34)
    for text in ("What is 17 + 25?", "Tell me a short story.", "/set temp 0.7"):
        t.ask(text)
    t.type("/s")
    t.keys("Tab")
    t.wait(lambda s: s.rstrip().endswith(">>> /s"), "the choices")
    with open(os.path.join(BUILD, "terminal.svg"), "w") as f:
        f.write(term_svg.draw(tmux("capture-pane", "-p", "-e").stdout, "steel run"))
    grammar = os.path.join(home, "talk.gbnf")
    open(grammar, "w").write("root ::= " + json.dumps(TALK, ensure_ascii=False))
    t = Terminal(home, f"--temp 0 --think off --grammar {grammar}", columns=64, rows=34)
    t.ask("Write some markdown.")
    with open(os.path.join(BUILD, "terminal-markdown.svg"), "w") as f:
        f.write(term_svg.draw(tmux("capture-pane", "-p", "-e").stdout, "steel run --grammar talk.gbnf"))
    svg = open(os.path.join(BUILD, "terminal.svg")).read()
    check("17 + 25 = 42." in svg and svg.rstrip().endswith("</svg>"), "the screen is drawn")


def main():
    if not shutil.which("tmux"):
        print("no tmux here")
        sys.exit(77)
    if subprocess.run([STEEL, "show", "builtin", "--brief"], capture_output=True).returncode:
        print("this build carries no model")
        sys.exit(77)
    parts = [paste_and_tab, drops, markdown, narrow, resize, escapes, thinking, settings, long_chat, other_model, narrow_bar, picture]
    wanted = sys.argv[2:]
    for part in parts:
        if not wanted or part.__name__ in wanted:
            with tempfile.TemporaryDirectory() as home:
                part(home)
    if wanted and "talk" not in wanted:
        return
    with tempfile.TemporaryDirectory() as home:
        t = Terminal(home, "--temp 0 --think off", "STEEL_ISA=ref")  # slow enough to be interrupted
        a = t.ask("Hello! Who are you?")
        check(len(a) > 3, "an answer", a)
        a = t.ask("/tokens")
        check("tok/s" in a, "/tokens tells the speed", a)

        t.type("Tell me a long story about Emberton.")
        t.keys("Enter")
        t.wait(lambda s: len(s.partition("Emberton.")[2].split()) > 3, "the start of a story")
        t.keys("C-c")
        s = t.wait(lambda s: s.partition("Emberton.")[2].rstrip().endswith(">>>"), "the prompt after Ctrl-C")
        check("(stopped)" in s, "Ctrl-C stops the answer and gives the prompt back", s)
        a = t.ask("What is 2 + 2?")
        check("4" in a, "the chat goes on after Ctrl-C", a)
        t.type("What is 9")
        t.wait(lambda s: s.rstrip().endswith("What is 9"), "what is typed")
        t.keys("C-c")
        t.wait(lambda s: s.rstrip().endswith(">>>"), "a new prompt after Ctrl-C")
        a = t.ask("What is 3 + 3?")
        check("6" in a, "Ctrl-C drops a line that is being typed", a)

        a = t.ask("/clear")
        check("cleared" in a, "/clear", a)
        a = t.ask("/show")
        check("0 messages" in a, "the conversation is gone", a)
        a = t.ask("/nonsense")
        check("/help" in a, "an unknown command points to /help", a)
        check("/retry" in t.ask("/help"), "/help lists the commands")

        t.keys("Up")
        t.keys("Up")
        t.wait(lambda s: s.rstrip().endswith(">>> /nonsense"), "an earlier line by Up")
        t.keys("C-u")
        t.wait(lambda s: s.rstrip().endswith(">>>"), "an empty line")

        t.type('"""first line')
        t.keys("Enter")
        t.wait(lambda s: s.rstrip().endswith("..."), "the prompt for more lines")
        t.type('second line"""')
        t.keys("Enter")
        t.wait(lambda s: s.rstrip().endswith(">>>"), "an answer to several lines")
        t.type("one \\")
        t.keys("Enter")
        t.wait(lambda s: s.rstrip().endswith("..."), "the prompt for more lines")
        t.type("two")
        t.keys("Enter")
        t.wait(lambda s: s.rstrip().endswith(">>>"), "an answer to a continued line")
        saved = os.path.join(home, "chat.json")
        check("saved" in t.ask(f"/save {saved}"), "/save")
        text = open(saved).read()
        check("first line\\nsecond line" in text and "one \\ntwo" in text, "several lines are one message", text)
        check("removed" in t.ask("/undo"), "/undo")
        check("loaded" in t.ask(f"/load {saved}"), "/load")

        t.ask("/clear")
        t.ask("/set verbose on")
        for turn in range(10):
            message = f"What is {turn + 3} + {turn + 11}?"
            a = t.ask(message)
            m = re.search(r"prompt (\d+) tokens(?: \((\d+) read, (\d+) cached\))?", a)
            check(bool(m), f"turn {turn + 1} shows its counter", a)
            read = int(m.group(2) or m.group(1))
            ids = subprocess.run([STEEL, "tokenize", "builtin", "--ids", message], capture_output=True, text=True).stdout.split()
            glue = 16  # the template's own tokens around a message and before an answer
            check(read <= len(ids) + glue, f"turn {turn + 1}: {read} of {m.group(1)} tokens read, message has {len(ids)}", a)
        t.keys("C-d")
        t.wait(lambda s: "EXIT 0" in s, "the end after Ctrl-D")
        check(True, "Ctrl-D leaves with exit 0")

        t = Terminal(home, "--temp 0 --think off", "NO_COLOR=1")
        t.ask("Hello!")
        raw = tmux("capture-pane", "-p", "-e").stdout
        check("\033[2m" not in raw, "NO_COLOR is honoured")

    out = subprocess.run([STEEL, "run", "--temp", "0"], input="Hello!\n/bye\n", capture_output=True, text=True)
    check(out.returncode == 0 and out.stdout.strip() and ">>>" not in out.stdout, "pipes work", out.stdout + out.stderr)


try:
    main()
finally:
    for name in servers:
        subprocess.run(["tmux", "-L", name, "kill-server"], capture_output=True)
