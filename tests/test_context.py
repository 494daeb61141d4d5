#!/usr/bin/env python3
"""Memory follows use: a file that promises a long context starts in little memory; without -c the context is
what the model says or what fits, and less is said in one line; a -c that cannot fit is refused before loading."""
import os, re, resource, struct, subprocess, sys, tempfile

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
SANITIZED = "san" in BUILD  # sanitizers have memory of their own, and reserve address space
MB = 1 << 20


def run(cmd, address_space=None):
    """(exit code, stderr, peak resident bytes) of a command."""
    with tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            if address_space:
                resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(err.fileno(), 2)
            os.execv(cmd[0], cmd)
        _, status, usage = os.wait4(pid, 0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), err.read().decode(), usage.ru_maxrss * 1024


def with_context(toy, path, context):
    data = open(toy, "rb").read()
    key = b"qwen3moe.context_length" + struct.pack("<I", 4)
    at = data.index(key) + len(key)
    open(path, "wb").write(data[:at] + struct.pack("<I", context) + data[at + 4:])
    return path


def main():
    with tempfile.TemporaryDirectory() as tmp:
        toy = os.path.join(tmp, "toy.gguf")
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), toy], check=True)
        weights = os.path.getsize(toy)
        say = ["-p", "once", "-n", "4", "-t", "2", "--raw", "--temp", "0"]
        for context, extra in ((262144, ["--kv-type", "f32"]), (1 << 26, [])):
            model = with_context(toy, os.path.join(tmp, "long.gguf"), context)
            code, err, peak = run([STEEL, "run", model, *say, *extra])
            print(f"{context} positions: peak {peak / 1e6:.0f} MB")
            assert code == 0, err
            assert SANITIZED or peak < weights + 100 * MB, (context, peak)
        if SANITIZED:
            return
        # 2^26 positions are 17 GB: they do not fit 3 GB, and the context that does is said in one line
        room = 3 << 30
        code, err, peak = run([STEEL, "run", model, *say], room)
        said = re.findall(r"^steel: context of (\d+) tokens, where the model could have 67108864", err, re.M)
        assert code == 0 and len(said) == 1, (code, err)
        fit = int(said[0])
        assert 512 <= fit * 256 <= 0.8 * room, fit
        assert peak < weights + 100 * MB, peak
        # what was said to fit does, a few more do not
        code, err, _ = run([STEEL, "run", toy, *say, "-c", str(fit // 10 * 9)], room)
        assert code == 0 and "context of" not in err, err
        for command in (["run", toy, *say], ["serve", toy, "--port", "0"]):
            code, err, peak = run([STEEL, *command, "-c", "99999999"], room)
            refused = "a context of 99999999 tokens needs 26.40 GB" in err and "tokens would fit" in err
            assert code == 1 and refused and "listening" not in err.split("tokens needs")[-1], (code, err)
            assert peak < 60 * MB, peak
        code, err, _ = run([STEEL, "serve", toy, "--port", "0", "--kv-tokens", "99999999"], room)
        assert code == 1 and "a KV cache of 99999999 tokens needs" in err, (code, err)


main()
