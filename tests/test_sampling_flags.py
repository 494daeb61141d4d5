"""Sampling options of `steel serve` and `steel run`: each is the default of requests, and changes the text as the field of
the same name in a request does. A request's own field wins."""
import json
import subprocess
import sys

from serverlib import Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"

# option, value, field of a request, its value there
NUMBERS = [
    ("--temp", 1.5, "temperature"), ("--top-k", 7, "top_k"), ("--top-p", 0.9, "top_p"), ("--min-p", 0.01, "min_p"),
    ("--repeat-penalty", 1.3, "repeat_penalty"), ("--repeat-last-n", 9, "repeat_last_n"), ("--presence-penalty", 0.5, "presence_penalty"),
    ("--frequency-penalty", 0.25, "frequency_penalty"), ("--typical", 0.75, "typical_p"), ("--top-nsigma", 1.5, "top_n_sigma"),
    ("--xtc-probability", 0.75, "xtc_probability"), ("--xtc-threshold", 0.05, "xtc_threshold"), ("--dynatemp-range", 0.5, "dynatemp_range"),
    ("--dynatemp-exp", 1.5, "dynatemp_exponent"), ("--mirostat", 0, "mirostat"), ("--mirostat-ent", 4, "mirostat_tau"),
    ("--mirostat-lr", 0.2, "mirostat_eta"), ("--dry-multiplier", 0.8, "dry_multiplier"), ("--dry-base", 1.5, "dry_base"),
    ("--dry-allowed-length", 3, "dry_allowed_length"), ("--dry-penalty-last-n", 100, "dry_penalty_last_n"),
]
# Sets of options whose texts must differ from the plain one.
SETS = [
    {"temperature": 1.2, "typical_p": 0.3}, {"temperature": 1.2, "top_n_sigma": 0.5}, {"temperature": 1.2, "xtc_probability": 1, "xtc_threshold": 0.001},
    {"temperature": 1.2, "dynatemp_range": 1.1}, {"temperature": 1.2, "mirostat": 2, "mirostat_tau": 1}, {"temperature": 1.2, "mirostat": 1},
    {"temperature": 1.2, "presence_penalty": 5}, {"temperature": 1.2, "frequency_penalty": 5},
    {"temperature": 0, "dry_multiplier": 5, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    {"temperature": 5, "samplers": "temperature"},
]
FLAG = {field: flag for flag, _, field in NUMBERS}


def flags_of(fields):
    out = []
    for k, v in fields.items():
        if k == "samplers":
            out += ["--samplers", v]
        elif k == "dry_sequence_breakers":
            out += ["--dry-sequence-breaker", "none"] if not v else [x for b in v for x in ("--dry-sequence-breaker", b)]
        else:
            out += [FLAG[k], str(v)]
    return out


def text_of(s, **fields):
    body = {"prompt": "ab ab ab ab c", "max_tokens": 40, "seed": 7, "ignore_eos": True, **fields}
    return s.json("/v1/completions", body)["choices"][0]["text"]


def test_defaults(_):
    """Every option is told by /v1/models and /props."""
    s = Server(BUILD, *[x for flag, value, _ in NUMBERS for x in (flag, str(value))])
    told = json.loads(s.get("/v1/models")[2])["data"][0]["default_sampling"]
    props = json.loads(s.get("/props")[2])["default_generation_settings"]["params"]
    for _, value, field in NUMBERS:
        name = "repetition_penalty" if field == "repeat_penalty" else field
        assert abs(told[name] - value) < 1e-6 and abs(props[field] - value) < 1e-6, (field, value, told, props)


def test_effect(_):
    """An option changes the text as the field does, in the server and in steel run; the field wins over the option."""
    plain = Server(BUILD)
    model = plain.proc.args[2]
    for fields in SETS:
        want = text_of(plain, **fields)
        base = {"temperature": fields["temperature"]}
        assert want != text_of(plain, **base), fields
        s = Server(BUILD, *flags_of(fields), model=model)
        assert text_of(s) == want, (fields, text_of(s), want)
        neutral = {"typical_p": 1, "top_n_sigma": 0, "xtc_probability": 0, "dynatemp_range": 0, "mirostat": 0, "presence_penalty": 0,
                   "frequency_penalty": 0, "dry_multiplier": 0}
        if "samplers" not in fields:
            assert text_of(s, **neutral) == text_of(plain, **base), fields
        s.proc.terminate()
        out = subprocess.run([BUILD + "/steel", "run", model, "-q", "--raw", "-p", "ab ab ab ab c", "-n", "40", "--seed", "7", "--ignore-eos", "-t", "1",
                              "--deterministic", *flags_of(fields)], capture_output=True, stdin=subprocess.DEVNULL)
        assert out.stdout.decode(errors="replace") == want + "\n", (fields, out, want)


def test_breakers(_):
    """--dry-sequence-breaker: given ones replace the usual ones; a request's replace both."""
    plain = Server(BUILD)
    model = plain.proc.args[2]
    dry = {"temperature": 0, "dry_multiplier": 5, "dry_allowed_length": 1}
    none, usual = text_of(plain, **dry, dry_sequence_breakers=[]), text_of(plain, **dry)
    loop = text_of(plain, temperature=0)
    breaker = next(c for c in loop if c.isalnum())
    own = text_of(plain, **dry, dry_sequence_breakers=[breaker])
    assert own != none
    s = Server(BUILD, *flags_of(dict(dry, dry_sequence_breakers=[breaker])), model=model)
    assert text_of(s) == own and text_of(s, dry_sequence_breakers=[]) == none
    s = Server(BUILD, *flags_of(dry), model=model)
    assert text_of(s) == usual


def test_refused(_):
    for command in ("serve", "run"):
        for flags, word in ((["--samplers", "top_k;nonsense"], "--samplers: "), (["--samplers", "top_k;top_k"], "twice"),
                            (["--dry-sequence-breaker", ""], "--dry-sequence-breaker: empty"), (["--xtc-probability", "2"], "xtc-probability"),
                            (["--mirostat", "3"], "mirostat"), (["--dry-base", "0"], "dry-base")):
            out = subprocess.run([BUILD + "/steel", command, *flags], capture_output=True, text=True, stdin=subprocess.DEVNULL)
            assert out.returncode == 2 and word in out.stderr, (flags, out)


run_tests([test_defaults, test_effect, test_breakers, test_refused], None)
