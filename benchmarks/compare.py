#!/usr/bin/env python3
"""Runs paceline and llama.cpp in turns over the same models and prompts.

Memory bandwidth of a shared machine moves by a factor within minutes, so no two
figures of different minutes are compared: each round runs both engines one after
the other, and the report has medians over rounds. Every raw output is kept.

Needs only Python 3.9, a release build of paceline and a folder with llama.cpp's
binaries (llama-bench, llama-batched-bench, llama-server, llama-perplexity).
"""

import argparse
import collections
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROWS = [1, 2, 3, 4, 6, 8, 16]
# A step of the peer follows this many tokens and is timed over so many.
PEER_CONTEXT, PEER_TOKENS = 64, 16
PORT = 18080
CLASSES = {
    "synthetic": ["story-synthetic", "chat-synthetic", "code-synthetic"],
    "prose": ["chat-real", "story-continue-real"],
}


class Model:
    """`NAME=OURS,PEER[,PEER_DRAFT]`"""

    def __init__(self, text):
        self.name, _, paths = text.partition("=")
        self.ours, self.peer, *rest = paths.split(",")
        # A model with a head of its own drafts for itself.
        self.peer_draft = rest[0] if rest else None


class Bench:
    def __init__(self, args):
        self.args = args
        self.out = pathlib.Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.report = {"environment": environment(args), "models": {}}

    def command(self, name, line):
        """Runs a command, keeps its output, and returns what it printed."""
        print("  ", name, flush=True)
        start = time.time()
        done = subprocess.run(line, capture_output=True, text=True)
        log = f"$ {' '.join(line)}\n# {time.time() - start:.1f} s, exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        (self.out / f"{name}.txt").write_text(log)
        if done.returncode != 0:
            sys.exit(f"{name} failed: see {self.out / name}.txt")
        return done.stdout

    def ours(self, name, command, model, *flags):
        line = [self.args.paceline, "-q", command, "-m", model.ours, "--device", self.args.device, "--threads", str(self.args.threads), *flags]
        return json.loads(self.command(name, line).splitlines()[-1])

    def peer(self, name, tool, model, *flags):
        line = [str(pathlib.Path(self.args.peer) / tool), "-m", model.peer, *self.layers(), "-t", str(self.args.threads), *flags]
        return self.command(name, line)

    def layers(self, flag="-ngl"):
        """How many layers the peer puts on the GPU, of its draft model with `-ngld`."""
        # A grown model can have more than a hundred.
        return [flag, "0" if self.args.device == "cpu" else "999"]

    def save(self):
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1) + "\n")

    # ── one token, several rows, a prompt ────────────────────────────────

    def steps(self, model, into):
        for i in range(self.args.rounds):
            tag = f"{model.name}.round{i}"
            flags = ["--reps", str(self.args.reps), "--draft-lengths", "0", "--max-tokens", "1", "--json"]
            ours = self.ours(f"{tag}.paceline", "bench", model, *flags)
            jsonl = self.peer(
                f"{tag}.batched", "llama-batched-bench", model, "-tb", str(self.args.threads), "-c", "4096",
                "-npp", str(PEER_CONTEXT), "-ntg", str(PEER_TOKENS), "-npl", ",".join(map(str, ROWS)),
                "--output-format", "jsonl",
            )
            lines = [json.loads(line) for line in jsonl.splitlines() if line.startswith("{")]
            bench = json.loads(self.peer(f"{tag}.llama-bench", "llama-bench", model, "-p", "512", "-n", "32", "-r", "2", "-o", "json"))
            peer_rate = {("prefill" if r["n_gen"] == 0 else "decode"): r["avg_ts"] for r in bench}
            into.setdefault("rounds", []).append({
                "read_ms": ours["read_ms"],
                "read_gbs": ours["read_gbs"],
                "weights_gb": ours["weights_gb"],
                "load_ms": ours["load_ms"],
                "ours_step_ms": ours["step_ms"],
                "ours_prefill_tok_s": ours["prefill_tok_s"],
                "peer_step_ms": {str(r["pl"]): 1e3 * r["t_tg"] / r["tg"] for r in lines},
                "peer_prefill_tok_s": {"512": peer_rate["prefill"]},
                "peer_decode_tok_s": peer_rate["decode"],
            })
            self.save()

    # ── drafts ───────────────────────────────────────────────────────────

    def prompts(self):
        lines = [json.loads(line) for line in open(self.args.prompts) if line.strip()]
        chosen = []
        for name, categories in CLASSES.items():
            of_class = [line for line in lines if line.get("category") in categories]
            # Spread over the categories, however the file is sorted.
            step = max(1, len(of_class) // self.args.per_class)
            of_class = of_class[::step]
            chosen += [{"category": name, **{k: line[k] for k in ("messages", "raw") if k in line}} for line in of_class[: self.args.per_class]]
            chosen += [prompt for tokens in self.args.contexts for prompt in self.behind(tokens, name, of_class)]
        return chosen

    def behind(self, tokens, name, lines):
        """A prompt of each kind of `lines` behind about so many tokens of text: four characters each."""
        text = pathlib.Path(self.args.text).read_text()[: 4 * tokens]
        ask = lambda line: line["raw"] if "raw" in line else line["messages"][-1]["content"]
        return [{"category": f"{name} behind {tokens}", "raw": f"{text}\n\n{ask(line)}"} for line in lines[: self.args.per_context]]

    def speculation(self, model, into):
        prompts = self.prompts()
        file = self.out / "prompts.jsonl"
        file.write_text("".join(json.dumps(p) + "\n" for p in prompts))
        runs = into.setdefault("speculation", [])
        for i in range(self.args.rounds):
            for length in self.args.draft_lengths:
                tag = f"{model.name}.draft{length}.round{i}"
                flags = ["--no-steps", "--prompts", str(file), "--draft-lengths", str(length), "--max-tokens", str(self.args.max_tokens), "--json"]
                for run in self.ours(f"{tag}.paceline", "bench", model, *flags)["runs"]:
                    # The peer does not follow random tokens.
                    if run["class"] not in ("all", "random"):
                        runs.append({"engine": "paceline", "round": i, "class": run["class"], "draft": length, "tok_s": run["tok_s"],
                                     "tokens_per_round": run["tokens_per_round"], "accepted_by_position": run["accepted_by_position"]})
                runs += [dict(run, round=i) for run in self.serve(tag, model, length, prompts)]
                self.save()

    def serve(self, tag, model, length, prompts):
        """The peer over the same prompts, by class."""
        print("  ", f"{tag}.server", flush=True)
        line = [str(pathlib.Path(self.args.peer) / "llama-server"), "-m", model.peer, *self.layers(), "-t", str(self.args.threads),
                "-tb", str(self.args.threads), "-c", str(4096 + max(self.args.contexts, default=0)), "-np", "1", "--port", str(PORT), "--jinja", "--no-webui", "--cache-ram", "0"]
        if length > 0:
            line += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(length)]
            line += ["-md", model.peer_draft, *self.layers("-ngld")] if model.peer_draft else []
        log = open(self.out / f"{tag}.server.txt", "w")
        server = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait(server)
            sums = collections.defaultdict(collections.Counter)
            with open(self.out / f"{tag}.server.jsonl", "w") as raw:
                for n, prompt in enumerate(prompts):
                    reply, text = ask(prompt, self.args.max_tokens)
                    raw.write(json.dumps({"prompt": n, "class": prompt["category"], "timings": reply["timings"], "text": text}) + "\n")
                    t = reply["timings"]
                    # The first token comes with the prompt in both engines.
                    sums[prompt["category"]].update(ms=t["predicted_ms"], tokens=max(0, t["predicted_n"] - 1), drafted=t.get("draft_n", 0), accepted=t.get("draft_n_accepted", 0))
            return [{"engine": "llama.cpp", "class": name, "draft": length, "tok_s": 1e3 * s["tokens"] / s["ms"] if s["ms"] else 0.0,
                     "drafted": s["drafted"], "accepted": s["accepted"]} for name, s in sums.items()]
        finally:
            server.terminate()
            server.wait()
            log.close()

    # ── same text ────────────────────────────────────────────────────────

    def texts(self, model, into):
        same = []
        for length in (0, 3):
            tag = f"{model.name}.texts.draft{length}"
            prompts = [p for p in self.prompts() if len(p.get("messages", ())) == 1]
            self.serve(tag, model, length, prompts)
            for line in open(self.out / f"{tag}.server.jsonl"):
                peer = json.loads(line)
                prompt = prompts[peer["prompt"]]["messages"][-1]["content"]
                flags = ["--temperature", "0", "-n", str(self.args.max_tokens), "--draft-max", str(length), "--json", prompt]
                ours = self.ours(f"{tag}.{peer['prompt']}", "run", model, *flags)
                a, b = ours["text"].strip(), peer["text"].strip()
                prefix = os.path.commonprefix([a, b])
                same.append({"draft": length, "prompt": prompt, "same": a == b, "same_characters": len(prefix), "of": max(len(a), len(b))})
        into["texts"] = same
        self.save()

    # ── perplexity ───────────────────────────────────────────────────────

    def perplexity(self, model, into):
        text = str(self.args.text)
        # Both: windows of 512 tokens side by side, the second half scored.
        ours = {}
        for activations in ("int8", "f32"):
            flags = [text, "--context", "512", "--stride", "512", "--lead", "256", "--activations", activations, "--json"]
            ours[activations] = self.ours(f"{model.name}.perplexity.{activations}", "perplexity", model, *flags)
        printed = self.peer(f"{model.name}.perplexity.peer", "llama-perplexity", model, "-f", text, "-c", "512", "-b", "512")
        log = (self.out / f"{model.name}.perplexity.peer.txt").read_text()
        final = re.search(r"Final estimate: PPL = ([0-9.]+)", printed + log)
        into["perplexity"] = {"ours": ours, "peer": float(final[1]) if final else None}
        self.save()

    def cold(self, model, into):
        """Process start to the first token, files in the page cache."""
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([self.args.paceline, "-q", "run", "-m", model.ours, "--device", self.args.device, "-n", "1", "--threads", str(self.args.threads), "Hello"], capture_output=True, check=True)
            times.append(1e3 * (time.perf_counter() - start))
        into["first_token_ms"] = times
        self.save()

    def run(self):
        for model in map(Model, self.args.model):
            into = self.report["models"].setdefault(model.name, {"ours": model.ours, "peer": model.peer, "peer_draft": model.peer_draft})
            for part in self.args.parts:
                print(model.name, part, flush=True)
                getattr(self, part)(model, into)
        tables(self.report, open(self.out / "report.md", "w"))
        print(f"written to {self.out}/report.md")


def wait(server):
    for _ in range(600):
        if server.poll() is not None:
            sys.exit("llama-server ended: see its log")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit("llama-server does not answer")


def ask(prompt, max_tokens):
    body = {"temperature": 0, "cache_prompt": False}
    if "raw" in prompt:
        path, body = "/completion", {**body, "prompt": prompt["raw"], "n_predict": max_tokens}
    else:
        # Ours writes without thoughts unless it is asked for them.
        path, body = "/v1/chat/completions", {**body, "messages": prompt["messages"], "max_tokens": max_tokens, "chat_template_kwargs": {"enable_thinking": False}}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        reply = json.load(answer)
    return reply, reply["content"] if "raw" in prompt else reply["choices"][0]["message"]["content"]


def environment(args):
    def read(path):
        try:
            return pathlib.Path(path).read_text().strip()
        except OSError:
            return None

    cpu = next((line.split(":")[1].strip() for line in (read("/proc/cpuinfo") or "").splitlines() if line.startswith("model name")), None)
    version = lambda line: subprocess.run(line, capture_output=True, text=True)
    peer = version([str(pathlib.Path(args.peer) / "llama-bench"), "--help"])
    return {
        "cpu": cpu,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "governor": read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "paceline": version([args.paceline, "--version"]).stdout.strip(),
        "llama.cpp": (peer.stdout + peer.stderr).strip().splitlines()[:1],
        "device": args.device,
        "threads": args.threads,
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "date": time.strftime("%Y-%m-%d"),
    }


def median(values):
    values = [v for v in values if v]
    return statistics.median(values) if values else float("nan")


def tables(report, out):
    """The report as Markdown. Every cell is a median of ratios or of values over
    rounds; ratios are taken inside a round."""
    for name, m in report["models"].items():
        print(f"## {name}\n", file=out)
        rounds = m.get("rounds", [])
        if rounds:
            # A GPU has no plain read.
            reads = [r for r in rounds if r["read_ms"]]
            read = f", plain read {median(r['read_gbs'] for r in reads):.1f} GB/s, step of one row {median(r['read_ms'] / r['ours_step_ms']['1'] for r in reads):.0%} of it"
            print(f"{rounds[0]['weights_gb']:.3f} GB a step{read if reads else ''}\n", file=out)
            print("| rows | ours ms | against one row | peer ms | against one row | peer / ours |\n|---:|---:|---:|---:|---:|---:|", file=out)
            for rows in map(str, ROWS):
                have = [r for r in rounds if rows in r["ours_step_ms"] and rows in r["peer_step_ms"]]
                ours, peer = [r["ours_step_ms"] for r in have], [r["peer_step_ms"] for r in have]
                print(f"| {rows} | {median(o[rows] for o in ours):.2f} | {median(o[rows] / o['1'] for o in ours):.2f} | {median(p[rows] for p in peer):.2f} "
                      f"| {median(p[rows] / p['1'] for p in peer):.2f} | {median(p[rows] / o[rows] for o, p in zip(ours, peer)):.2f} |", file=out)
            ratio = median(r["ours_prefill_tok_s"]["512"] / r["peer_prefill_tok_s"]["512"] for r in rounds)
            print(f"\nprefill of 512: ours {median(r['ours_prefill_tok_s']['512'] for r in rounds):.0f}, peer {median(r['peer_prefill_tok_s']['512'] for r in rounds):.0f} tok/s, "
                  f"ratio {ratio:.2f} · plain decode (llama-bench): peer {median(r['peer_decode_tok_s'] for r in rounds):.1f} tok/s, "
                  f"ratio {median(1e3 / r['ours_step_ms']['1'] / r['peer_decode_tok_s'] for r in rounds):.2f}\n", file=out)
        runs = m.get("speculation", [])
        if runs:
            print("| class | draft | ours tok/s | against plain | tokens a round | accepted by position | peer tok/s | against plain | accepted of drafted | ours / peer's best |\n|---|---:|---:|---:|---:|---|---:|---:|---:|---:|", file=out)
            rate = {(r["engine"], r["round"], r["class"], r["draft"]): r["tok_s"] for r in runs}
            lengths, n = sorted({r["draft"] for r in runs}), range(1 + max(r["round"] for r in runs))
            for name in dict.fromkeys(r["class"] for r in runs):
                for d in lengths:
                    get = lambda engine, i, d: rate.get((engine, i, name, d), 0.0)
                    best = lambda i: max(get("llama.cpp", i, d) for d in lengths)
                    per_round = median(r["tokens_per_round"] for r in runs if r["engine"] == "paceline" and r["class"] == name and r["draft"] == d)
                    ours = [r for r in runs if r["engine"] == "paceline" and r["class"] == name and r["draft"] == d]
                    peer = [r for r in runs if r["engine"] == "llama.cpp" and r["class"] == name and r["draft"] == d]
                    # Both write greedily: every round accepts the same.
                    positions = " ".join(f"{share:.2f}" for share in ours[0]["accepted_by_position"]) if ours else ""
                    drafted = sum(r["drafted"] for r in peer)
                    share = f"{sum(r['accepted'] for r in peer) / drafted:.2f}" if drafted else ""
                    over = lambda engine: median(get(engine, i, d) / get(engine, i, 0) for i in n if get(engine, i, 0))
                    print(f"| {name} | {d} | {median(get('paceline', i, d) for i in n):.1f} | {over('paceline'):.2f} | {per_round:.2f} | {positions} | {median(get('llama.cpp', i, d) for i in n):.1f} "
                          f"| {over('llama.cpp'):.2f} | {share} | {median(get('paceline', i, d) / best(i) for i in n if best(i)):.2f} |", file=out)
            print(file=out)
        if "texts" in m:
            print(f"same text: {sum(t['same'] for t in m['texts'])} of {len(m['texts'])}\n", file=out)
        if "perplexity" in m:
            p = m["perplexity"]
            print(f"perplexity: int8 {p['ours']['int8']['perplexity']:.4f}, f32 {p['ours']['f32']['perplexity']:.4f}, peer: {p['peer']}\n", file=out)
        if "first_token_ms" in m:
            print(f"start to first token: {median(m['first_token_ms']):.0f} ms\n", file=out)
    out.close()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--paceline", required=True, help="release build of paceline")
    p.add_argument("--peer", required=True, help="folder of llama.cpp's binaries")
    p.add_argument("--model", action="append", required=True, metavar="NAME=OURS,PEER[,PEER_DRAFT]")
    p.add_argument("--out", required=True, help="folder for raw files and the report")
    p.add_argument("--prompts", help="JSON lines with `category` and `messages`")
    p.add_argument("--text", help="plain text for the perplexity")
    p.add_argument("--parts", type=lambda s: s.split(","), default=["steps", "speculation"], help="of steps, speculation, texts, perplexity, cold")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--reps", type=int, default=7, help="repetitions of a step inside a round")
    p.add_argument("--draft-lengths", type=lambda s: [int(n) for n in s.split(",")], default=[0, 1, 2, 3, 4])
    p.add_argument("--per-class", type=int, default=6, help="prompts of each class")
    p.add_argument("--contexts", type=lambda s: [int(n) for n in s.split(",")], default=[], help="also write behind so many tokens of --text")
    p.add_argument("--per-context", type=int, default=1, help="prompts of each class behind such a text")
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; a GPU holds all layers of both engines")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    Bench(p.parse_args()).run()


if __name__ == "__main__":
    main()
