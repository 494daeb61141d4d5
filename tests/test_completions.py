#!/usr/bin/env python3
"""Tab in real shells: bash, zsh and fish, each in a terminal of its own (tmux), with the script that `steel completion`
prints. Commands, options of a command, its value's files."""
import os, shutil, subprocess, sys, tempfile, time

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.abspath(os.path.join(BUILD, "steel"))
HANG = 300

if not shutil.which("tmux"):
    print("skipped: completions in real shells: no tmux here")
    sys.exit(77)

failures = 0
for shell, command, setup in (
        ("bash", "bash --norc --noprofile", "PS1='> '; source {script}"),
        ("zsh", "zsh -f", "PS1='> '; autoload -Uz compinit; compinit -u -d {dir}/dump; source {script}"),
        ("fish", "fish --no-config", "function fish_prompt; echo '> '; end; source {script}")):
    if not shutil.which(shell):
        print(f"skipped: {shell}: not installed")
        continue
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as d:  # a shell may still be writing
        server = f"steel-complete-{os.getpid()}-{shell}"
        tmux = lambda *a: subprocess.run(["tmux", "-L", server, *a], capture_output=True, text=True).stdout
        script = os.path.join(d, "steel." + shell)
        with open(script, "w") as f:
            subprocess.run([STEEL, "completion", shell], stdout=f, check=True, env={**os.environ, "STEEL_CONFIG": ""})
        os.makedirs(d + "/models")
        open(d + "/models/tiny-model.gguf", "w").close()
        try:
            tmux("new-session", "-d", "-x", "200", "-y", "50",
                 f"cd {d} && env HOME={d} TERM=screen PATH={os.path.dirname(STEEL)}:$PATH {command}")
            tmux("send-keys", "-l", setup.format(script=script, dir=d) + "; echo ready $((2 + 3))".replace(
                "$((2 + 3))", "(math 2 + 3)" if shell == "fish" else "$((2 + 3))"))
            tmux("send-keys", "Enter")
            screen = lambda: tmux("capture-pane", "-p")

            def until(ready):
                end = time.time() + HANG
                while time.time() < end and not ready(screen()):
                    time.sleep(0.05)
                return ready(screen())

            assert until(lambda s: "ready 5" in s), f"{shell} does not start:\n{screen()}"
            for typed, want in (("steel ser", "steel serve"), ("steel run --conte", "steel run --context-overflow"),
                                ("steel bench serve --conc", "steel bench serve --concurrency"), ("steel completion fi", "steel completion fish"),
                                ("steel run models/ti", "steel run models/tiny-model.gguf"),
                                ("steel help qua", "steel help quantize")):
                tmux("send-keys", "-l", typed)
                tmux("send-keys", "Tab")
                last = lambda s: s.rstrip().split("\n")[-1]
                ok = until(lambda s: last(s).rstrip().endswith(want))
                print(("ok    " if ok else "FAIL  ") + f"{shell}: {typed}<Tab>")
                if not ok:
                    print(screen())
                    failures += 1
                tmux("send-keys", "C-u", "C-l")  # not C-c: the terminal would drop what is typed after it
                assert until(lambda s: want not in s), f"{shell}: the line stays:\n{screen()}"
        finally:
            tmux("kill-server")
sys.exit(failures > 0)
