#!/usr/bin/env python3
"""Steel's Vulkan backend, its CUDA backend and llama.cpp's Vulkan backend on one GPU, interleaved in one run. Standard library only.

  vulkan.py --steel build/steel [--llama LLAMA_BIN_DIR] MODEL.gguf.. [--picks gemv_dot,moe_dot] [--rounds 3] [-o vulkan.jsonl]

Every model: one sequence (tg128), 32 sequences at once (tg64 x32, after prompts of 256), a prompt of 2,048 tokens. An engine that is
missing or fails is left out, and says so. llama.cpp must be built with Vulkan alone (-DGGML_VULKAN=ON -DGGML_CUDA=OFF), or it uses CUDA.
--picks measures Vulkan once more with these kernels forced (steel bench --kernels lists them). --quick: short tests, to see that everything
works; with --device cpu in place of CUDA that needs no GPU.

The models of docs/vulkan.md: bench/synth_gguf.py OUT.gguf --shape qwen3-30b-a3b --quant q4_k_m; --shape llama-3.1-8b --quant q4_k_m and
q8_0; --shape gpt-oss-20b. llama.cpp's tools that want text need bench/add_vocab.py.

A machine with NVIDIA's driver and without a loader: put Debian's libvulkan.so.1 on LD_LIBRARY_PATH, and write an ICD file for
VK_DRIVER_FILES: {"file_format_version": "1.0.0", "ICD": {"library_path": "libEGL_nvidia.so.0", "api_version": "1.4.312"}}.
"""
import argparse, json, os, statistics, subprocess, sys, time


def lines(cmd, env=None):
    """The JSON lines of a command; a failure is printed and returns nothing."""
    try:
        p = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=dict(os.environ, **(env or {})))
    except OSError as e:
        print(f"{cmd[0]}: {e.strerror}", file=sys.stderr, flush=True)
        return []
    if p.returncode:
        print(f"failed ({p.returncode}): {' '.join(cmd)}\n{p.stderr[-600:]}", file=sys.stderr, flush=True)
        return []
    return [json.loads(l) for l in p.stdout.splitlines() if l.startswith("{")]


def steel(a, model, device, picks=""):
    """{test: tok/s} and the hashes of the logits."""
    gen, batch, prompt = (8, 2, 64) if a.quick else (128, 32, 2048)
    base = [a.steel, "bench", model, "-r", "1", "--json", "--skip-cost", "--device", device]
    env = {"STEEL_PICK": picks} if picks else {}
    got, hashes = {}, {}
    for flags, names in ((["-p", prompt, "-n", gen], (f"tg{gen}", f"pp{prompt}")),
                         (["-p", 0, "-n", gen // 2, "-d", 32 if a.quick else 256, "--batch", batch], (f"tg{gen // 2} x{batch}",))):
        for r in lines([*base, *map(str, flags)], env):
            name = next((n for n in names if r["test"].startswith(n)), None)
            if name:
                got[name] = r["tok_s"]
                hashes[name] = r.get("logits_hash")
    return got, hashes


def llama(a, model):
    gen, batch, prompt = (8, 2, 64) if a.quick else (128, 32, 2048)
    exe = lambda name: [os.path.join(a.llama, name), "-m", model, "-ngl", "99", "-ub", "2048", "-b", "2048"]
    got = {}
    for r in lines([*exe("llama-bench"), "-fa", "1", "-p", str(prompt), "-n", str(gen), "-r", "1", "-o", "jsonl"]):
        if "vulkan" not in str(r.get("backends", "")).lower():
            print(f"llama.cpp ran on {r.get('backends')}, not on Vulkan: its figures are left out", file=sys.stderr)
            return {}, {}
        got[f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}"] = r["avg_ts"]
    before = 32 if a.quick else 256
    rows = lines([*exe("llama-batched-bench"), "-fa", "on", "-npp", str(before), "-ntg", str(gen // 2), "-npl", f"1,{batch}",
                  "-c", str(batch * (before + gen)), "--output-format", "jsonl"])
    for r in rows[1:]:
        got[f"tg{r['tg']} x{r['pl']}"] = r["speed_tg"]
    return got, {}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("models", nargs="+")
    ap.add_argument("--steel", default="build/steel")
    ap.add_argument("--llama", help="folder of llama-bench and llama-batched-bench, built with Vulkan")
    ap.add_argument("--picks", default="", help="kernels to force in one more column")
    ap.add_argument("--device", default="cuda", help="the device that Vulkan is compared with")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("-o", "--output", default="vulkan.jsonl")
    a = ap.parse_args()
    out = open(a.output, "w")
    for model in a.models:
        engines = {"Vulkan": lambda: steel(a, model, "vulkan"), a.device: lambda: steel(a, model, a.device)}
        if a.picks:
            engines["Vulkan, " + a.picks] = lambda: steel(a, model, "vulkan", a.picks)
        if a.llama:
            engines["llama.cpp"] = lambda: llama(a, model)
        rates = {}
        for number in range(a.rounds):
            order = list(engines) if number % 2 == 0 else list(engines)[::-1]
            for engine in order:
                t0 = time.monotonic()
                got, hashes = engines[engine]()
                for test, rate in got.items():
                    rates.setdefault(test, {}).setdefault(engine, []).append(rate)
                    out.write(json.dumps({"model": os.path.basename(model), "engine": engine, "round": number, "test": test,
                                          "tok_s": round(rate, 3), "logits_hash": hashes.get(test)}) + "\n")
                    out.flush()
                print(f"{os.path.basename(model)} {engine}: " + ", ".join(f"{t} {r:,.0f}" for t, r in got.items()) +
                      f"  ({time.monotonic() - t0:.0f} s)", file=sys.stderr, flush=True)
        print(f"\n{os.path.basename(model)}, tok/s, medians of {a.rounds}\n\n| test | " + " | ".join(engines) + f" | of {a.device} | of llama.cpp |")
        print("|---" * (len(engines) + 3) + "|")
        for test, by in rates.items():
            m = {e: statistics.median(by[e]) for e in by}
            share = lambda other: f"{m['Vulkan'] / m[other]:.2f}" if "Vulkan" in m and m.get(other) else "-"
            print(f"| {test} | " + " | ".join(f"{m[e]:,.1f}" if e in m else "-" for e in engines) +
                  f" | {share(a.device)} | {share('llama.cpp')} |", flush=True)


main()
