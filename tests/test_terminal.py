#!/usr/bin/env python3
"""The chat terminal as a person meets it, in a real terminal (tmux): an answer streams, Ctrl-C stops one and
the chat goes on, history, several lines, commands, and ten turns that each read only their own new tokens."""
import os, re, shutil, subprocess, sys, tempfile, time

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.abspath(os.path.join(BUILD, "steel"))
HANG = 120  # seconds after which a test gives up on a terminal that says nothing


servers = []  # one tmux server each, under a name of its own: a dying one must not take the next along


def tmux(*args):
    return subprocess.run(["tmux", "-L", servers[-1], *args], capture_output=True, text=True)


class Terminal:
    def __init__(self, home, args="", env=""):
        servers.append(f"steel-{os.getpid()}-{len(servers)}")
        tmux("new-session", "-d", "-x", "100", "-y", "50",
             f"env HOME={home} TERM=screen {env} {STEEL} run {args} 2>{home}/stderr; echo EXIT $?; sleep 1000")
        self.wait(lambda s: s.rstrip().endswith(">>>") or "EXIT" in s, "a prompt")

    def screen(self):
        return tmux("capture-pane", "-p", "-S", "-500").stdout

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

    def clear(self):
        tmux("send-keys", "C-l")
        time.sleep(0.1)
        tmux("clear-history")

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


def main():
    if not shutil.which("tmux"):
        print("no tmux here")
        sys.exit(77)
    if subprocess.run([STEEL, "show", "builtin", "--brief"], capture_output=True).returncode:
        print("this build carries no model")
        sys.exit(77)
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

        a = t.ask("/clear")
        check("empty" in a, "/clear", a)
        a = t.ask("/show")
        check("0 messages" in a, "the conversation is gone", a)
        a = t.ask("/nonsense")
        check("/help" in a, "an unknown command points to /help", a)
        check("/retry" in t.ask("/help"), "/help lists the commands")

        t.keys("Up")
        t.keys("Up")
        time.sleep(0.3)
        check(t.screen().rstrip().endswith(">>> /nonsense"), "Up recalls earlier lines", t.screen())
        t.keys("C-u")

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
        check("gone" in t.ask("/undo"), "/undo")
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
