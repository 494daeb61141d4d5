#!/usr/bin/env python3
"""Tables and pictures from the results of bench/compare.py or bench/compare_gpu.py. Standard library only.

  report.py results.jsonl...                       the tables, as Markdown, on stdout; files of one machine are merged
  report.py results.jsonl... --doc docs/performance.md --section NAME
                                                   puts them between <!-- NAME --> and <!-- /NAME --> of that page,
                                                   its pictures into img/NAME-*.svg beside it
"""
import argparse, json, os, re, statistics, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))


def middle(values):
    """The median, and half of the range relative to it."""
    m = statistics.median(values)
    return m, (max(values) - min(values)) / 2 / m if m else 0


def number(v):
    return f"{v:,.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.2f}"


def ceilings(lines):
    out = {}
    for r in lines:
        if r["kind"] == "ceiling":
            out.setdefault(r["name"], []).append(r)
    return {k: {"value": max(r["value"] for r in v), "unit": v[0]["unit"], "measured": v[0].get("measured", True)}
            for k, v in out.items()}


def limit(ceil, record):
    """Tokens a second at the measured bandwidth and at the peak of operations: the lower of both,
    and which one it is."""
    read = ceil.get("memory read", {}).get("value")
    ops = max((c["value"] for n, c in ceil.items() if n.startswith("int8")), default=None)
    tensor = next((c["value"] for n, c in ceil.items() if n.startswith("tensor")), None)
    bounds = []
    if "+" in record["test"]:  # prompts and answers: two limits in one
        return None, ""
    if read and record.get("bytes_per_token"):  # on a GPU keys and values weigh in; on a CPU they are left out
        kv = record.get("kv_bytes_per_token", 0) if tensor else 0
        bounds.append((read * 1e9 / (record["bytes_per_token"] + kv), "memory"))
    if (tensor or ops) and record.get("ops_per_token"):
        bounds.append(((tensor or ops) * 1e9 / record["ops_per_token"], "tensor cores" if tensor else "int8 peak"))
    return min(bounds) if bounds else (None, "")


def rates(lines):
    """{(model, test): {engine: [tok/s], ...}}, in the order they were measured, with the limit of each."""
    ceil, table, limits = ceilings(lines), {}, {}
    for r in lines:
        if r["kind"] != "run":
            continue
        key = (r["model"], r["test"])
        table.setdefault(key, {}).setdefault(r["engine"], []).append(r["tok_s"])
        if r["engine"] == "Steel":
            limits[key] = limit(ceil, r)
    # llama-batched-bench reports whole runs for every batch; they are shown only beside Steel's
    return {k: e for k, e in table.items() if "Steel" in e or "+" not in k[1]}, limits


def speed_table(model, table, limits):
    rows = ["| test | Steel | llama.cpp | ratio | limit | Steel / limit |", "|---|---|---|---|---|---|"]
    for (m, test), engines in table.items():
        if m != model:
            continue
        cell, mid = {}, {}
        for e in ("Steel", "llama.cpp"):
            if e in engines:
                mid[e], spread = middle(engines[e])
                cell[e] = f"{number(mid[e])} ± {100 * spread:.0f} %"
        bound, what = limits.get((m, test), (None, ""))
        ratio = f"{mid['Steel'] / mid['llama.cpp']:.2f}x" if len(mid) == 2 else "-"
        share = f"{100 * mid['Steel'] / bound:.0f} %" if bound and "Steel" in mid else "-"
        rows.append(f"| {test} | {cell.get('Steel', '-')} | {cell.get('llama.cpp', '-')} | {ratio} | "
                    f"{f'{number(bound)} ({what})' if bound else '-'} | {share} |")
    return rows


def speed_chart(model, title, table, limits):
    groups = []
    for (m, test), engines in table.items():
        if m != model:
            continue
        g = {"name": test, "bars": {e: middle(engines[e])[0] for e in ("Steel", "llama.cpp") if e in engines}}
        if limits.get((m, test), (None,))[0]:
            g["limit"] = limits[m, test][0]
        groups.append(g)
    return {"title": title, "unit": "tok/s", "groups": groups}


def starts(lines):
    out = {}
    for r in lines:
        if r["kind"] == "start":
            out.setdefault((r["model"], r["memory"]), {}).setdefault(r["engine"], []).append(r)
    return out


def start_table(data):
    rows = ["| memory | engine | start to first token and exit | of which loading |", "|---|---|---|---|"]
    for (_, memory), engines in data.items():
        for e, records in engines.items():
            wall, spread = middle([r["seconds"] for r in records])
            load = [r["load_s"] for r in records if "load_s" in r]
            rows.append(f"| {memory} | {e} | {wall:.2f} s ± {100 * spread:.0f} % | "
                        f"{f'{statistics.median(load):.2f} s' if load else '-'} |")
    return rows


def start_chart(title, data):
    groups = [{"name": "memory " + memory, "bars": {e: middle([r["seconds"] for r in v])[0] for e, v in engines.items()}}
              for (_, memory), engines in data.items()]
    return {"title": title, "unit": "s", "less": True, "groups": groups}


def serving(lines):
    out = {}
    for r in lines:
        if r["kind"] == "serve":
            out.setdefault((r["model"], r["clients"], r.get("temperature", 0)), []).append(r)
    return out


def serve_name(n, temperature):
    return f"{n}, drawn" if temperature else f"{n}, greedy"


def serve_table(data, table):
    rows = ["| clients | whole run: raw | served | share | generation: raw | served | share | first token, p50 / p99 | "
            "between tokens, p50 / p99 |", "|---|---|---|---|---|---|---|---|---|"]
    for (model, n, temperature), records in data.items():
        served, raw = (middle([r[k] for r in records])[0] for k in ("tok_s", "raw_tok_s"))
        gap = middle([r["itl_ms"]["p50"] for r in records])[0]
        decode = next((middle(e["Steel"])[0] for (m, t), e in table.items()
                       if m == model and "Steel" in e and re.match(rf"tg\d+ x{n} @", t)), None)
        steady = n * 1e3 / gap if gap else 0
        rows.append(f"| {serve_name(n, temperature)} | {number(raw)} | {number(served)} | {100 * served / raw if raw else 0:.0f} % | "
                    f"{number(decode) if decode else '-'} | {number(steady)} | "
                    f"{f'{100 * steady / decode:.0f} %' if decode else '-'} | "
                    + " | ".join(f"{middle([r[k]['p50'] for r in records])[0]:.1f} / "
                                 f"{middle([r[k]['p99'] for r in records])[0]:.1f} ms" for k in ("ttft_ms", "itl_ms")) + " |")
    return rows


def serve_chart(title, data):
    groups = [{"name": serve_name(n, t), "bars": {"steel serve": middle([r["tok_s"] for r in v])[0],
                                                "raw": middle([r["raw_tok_s"] for r in v])[0]}}
              for (_, n, t), v in data.items()]
    return {"title": title, "unit": "tok/s", "groups": groups}


def profile_tables(lines):
    """Per test: time, bytes and operations of each stage, and the nearer of its two limits."""
    ceil, out = ceilings(lines), []
    read = ceil.get("memory read", {}).get("value")
    ops = next((c["value"] for n, c in ceil.items() if n.startswith(("tensor", "int8"))), None)
    for r in lines:
        if r["kind"] != "profile":
            continue
        rows = ["| stage | us a step | MB read | TB/s | GFLOP | TFLOP/s | nearer limit |", "|---|---|---|---|---|---|---|"]
        for name, s in r["stages"].items():
            us, shares = s["us"], []
            if read and s["bytes"]:
                shares.append((s["bytes"] / us * 1e-3 / read, "memory"))
            if ops and s["ops"]:
                shares.append((s["ops"] / us * 1e-3 / ops, "arithmetic"))
            near = max(shares) if shares else None
            rows.append(f"| {name} | {us:,.0f} | {s['bytes'] * 1e-6:,.1f} | {s['bytes'] / us * 1e-6:.2f} | "
                        f"{s['ops'] * 1e-9:,.1f} | {s['ops'] / us * 1e-6:,.1f} | "
                        f"{f'{100 * near[0]:.0f} % ({near[1]})' if near else '-'} |")
        total = sum(s["us"] for s in r["stages"].values())
        rows.append(f"| all | {total:,.0f} | | | | | |")
        out.append((f"{r['model']}, {r['test']}, op by op", rows, None, ""))
    return out


def blocks(lines):
    """The report as a list of (heading, table rows, chart or None, file name of the chart)."""
    machine = next((r for r in lines if r["kind"] == "machine"), {})
    where = machine.get("name") or machine.get("cpu", "")
    table, limits = rates(lines)
    out, ceil = [], ceilings(lines)
    threads = f", {machine['threads']} threads" if machine.get("threads") else ""
    if ceil:
        how = f"Ceilings with {machine['threads']} threads, measured" if threads else "Ceilings"
        out.append((how, ["| what | at most |", "|---|---|"] +
                    [f"| {n} | {c['value']:,.1f} {c['unit']}{'' if c['measured'] else ' (known, not measured here)'} |"
                     for n, c in ceil.items()], None, ""))
    for model in dict.fromkeys(m for m, _ in table):
        rounds = sorted({len(v) for k, e in table.items() if k[0] == model for v in e.values()})
        many = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else rounds[0]
        how = f"medians of {many} interleaved rounds" if rounds[-1] > 1 else "one round, side by side"
        out.append((f"{model}, tokens per second, {how}",
                    speed_table(model, table, limits),
                    speed_chart(model, f"{model} on {where}{threads}", table, limits), model))
    data = starts(lines)
    if data:
        model = next(iter(data))[0]
        out.append((f"Start of {model}, file in the page cache", start_table(data),
                    start_chart(f"Start of {model} on {where}, seconds (less is better)", data), "start"))
    data = serving(lines)
    if data:
        model = next(iter(data))[0]
        out.append((f"steel serve with {model}, answers' tokens per second", serve_table(data, table),
                    serve_chart(f"steel serve on {where}: the whole run, prompts included", data), "serve"))
    return out + profile_tables(lines)


def text(lines):
    return "\n\n".join(f"**{heading}**\n\n" + "\n".join(rows) for heading, rows, _, _ in blocks(lines))


def write_doc(lines, doc, section):
    import plot
    parts = []
    folder = os.path.join(os.path.dirname(doc), "img")
    os.makedirs(folder, exist_ok=True)
    for heading, rows, chart, name in blocks(lines):
        part = f"**{heading}**\n\n" + "\n".join(rows)
        if chart:
            file = f"{section}-{re.sub('[^a-z0-9]+', '-', name.lower())}.svg"
            with open(os.path.join(folder, file), "w") as f:
                f.write(plot.chart(chart))
            part += f"\n\n![{chart['title']}](img/{file})"
        parts.append(part)
    with open(doc) as f:
        page = f.read()
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    if begin not in page or end not in page:
        sys.exit(f"{doc}: no {begin} ... {end}")
    head, rest = page.split(begin, 1)
    with open(doc, "w") as f:
        f.write(head + begin + "\n" + "\n\n".join(parts) + "\n" + end + rest.split(end, 1)[1])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", nargs="+")
    p.add_argument("--doc")
    p.add_argument("--section")
    args = p.parse_args()
    lines = []
    for path in args.results:
        with open(path) as f:
            lines += [json.loads(l) for l in f if l.strip()]
    if bool(args.doc) != bool(args.section):
        p.error("--doc and --section go together")
    if args.doc:
        write_doc(lines, args.doc, args.section)
    else:
        print(text(lines))


if __name__ == "__main__":
    main()
