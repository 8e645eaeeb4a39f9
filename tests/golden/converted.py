"""What `paceline convert` writes, read by other programs: the largest difference of logits, each below its bound.

    f32, bf16, affine8-g64   a folder of safetensors: mlx-lm, against transformers on the same values; of Gemma 4, whose
                             norms are the same in every layout, transformers too, against the source
    f16, q8_0                a GGUF file: the ten best log-probabilities of llama.cpp's server, against the source
    eagle3                   an EAGLE-3 head as a GGUF file: llama.cpp drafts with it, writes the text that it writes without,
                             and accepts at least so many of its guesses

In float32, after every row of a prompt of the golden texts, or after its last row where a server answers.

    .venv/bin/pip install -r tests/golden/requirements.txt mlx-lm==0.32.2 mlx[cpu]==0.32.4
    .venv/bin/python tests/golden/converted.py --paceline target/release/paceline --server llama-server
"""

import argparse
import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import greedy
import store

HERE = Path(__file__).parent.resolve()
N_ROWS = 60
# Logits reach 30. 8-bit blocks round weights, and llama.cpp the rows that meet them too.
BOUNDS = {
    ("f32", "mlx-lm"): 0.001,
    ("bf16", "mlx-lm"): 0.001,
    ("affine8-g64", "mlx-lm"): 0.001,
    ("f32", "transformers"): 0.001,
    ("f16", "llama.cpp"): 0.005,
    ("q8_0", "llama.cpp"): 0.1,
}
# Guesses of the EAGLE-3 head, three a round: the share that llama.cpp accepts at least.
ACCEPTED = 0.3
N_PROMPTS, N_TOKENS = 8, 64


def of_transformers(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].float().numpy()


def of_values(folder, ids):
    """Of transformers on the values of any folder."""
    config = json.loads((folder / "config.json").read_text())
    # Files for mlx-lm call a Qwen without vision like one with it.
    config["model_type"] = config["model_type"].removesuffix("_text") + "_text"
    model = greedy.load(config, store.read_folder(folder))
    if config["model_type"].startswith("gemma4"):
        # A model in bf16 rounds this factor to bf16; programs that run it in float32, as here, do not.
        model.model.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5)
    return of_transformers(model, ids)


def of_mlx(folder, ids):
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    logits = model(mx.array([ids]), cache=make_prompt_cache(model))
    return np.array(logits[0].astype(mx.float32))


@contextlib.contextmanager
def llama(server, file, *more):
    """A function that sends a request to llama.cpp's server on `file`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "-c", "512", "-np", "1", "-ngl", "0", "-t", "2", "--no-warmup", *more]
    process = subprocess.Popen([server, "-m", file, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/health").read()
                break
            except OSError:
                time.sleep(0.2)

        def ask(ids, **options):
            body = json.dumps({"prompt": ids, "temperature": 0, "cache_prompt": False} | options).encode()
            request = urllib.request.Request(f"{url}/completion", body, {"Content-Type": "application/json"})
            return json.loads(urllib.request.urlopen(request).read())

        yield ask
    finally:
        process.kill()
        process.wait()


def of_llama(server, file, ids):
    """Token -> log-probability of the ten best after the prompt."""
    with llama(server, file) as ask:
        best = ask(ids, n_predict=1, n_probs=10)["completion_probabilities"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in best}


def written(server, prompts, file, *more):
    """The texts after `prompts`, and how many guesses were made and accepted."""
    with llama(server, file, *more) as ask:
        answers = [ask(ids, n_predict=N_TOKENS, return_tokens=True, ignore_eos=True) for ids in prompts]
    count = lambda key: sum(answer["timings"].get(key, 0) for answer in answers)
    return [answer["tokens"] for answer in answers], count("draft_n"), count("draft_n_accepted")


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--paceline", default="target/release/paceline")
    parser.add_argument("--server", help="llama.cpp's server; without it GGUF files are not tried")
    parser.add_argument("--models", type=Path, default=HERE.parent.parent / "models")
    parser.add_argument("names", nargs="*", default=["tiny-gemma4", "tiny-qwen3.5"])
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    bad = 0

    def show(name, form, reader, found, wanted):
        nonlocal bad
        far, bound = float(np.abs(found - wanted).max()), BOUNDS[form, reader]
        bad += not far <= bound
        print(f"{name}  {form}  {reader}  {far:.1e}  {'' if far <= bound else f'MORE THAN {bound}'}", flush=True)

    for name in args.names:
        prompts = json.loads((HERE / f"greedy/{name}.json").read_text())["prompts"]
        ids, source = prompts[0]["prompt"][:N_ROWS], args.models / name
        wanted = of_values(source, ids)
        with tempfile.TemporaryDirectory() as out:

            def convert(form, *options):
                to = Path(out) / f"{form}{'.gguf' if options else ''}"
                subprocess.run([args.paceline, "-q", "convert", source, to, "--quant", form, *options], check=True)
                return to

            for form in ("f32", "bf16", "affine8-g64"):
                folder = convert(form)
                show(name, form, "mlx-lm", of_mlx(folder, ids), of_values(folder, ids))
                if form == "f32" and name.startswith("tiny-gemma4"):
                    model = transformers.Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                    show(name, form, "transformers", of_transformers(model, ids), wanted)
            for form in ("f16", "q8_0") if args.server else ():
                best = of_llama(args.server, convert(form, "--format", "gguf"), ids)
                found, tokens = np.array(list(best.values())), list(best)
                show(name, form, "llama.cpp", found, log_softmax(wanted[-1])[tokens])
            head = args.models / f"{name}-eagle3"
            if args.server and head.exists():
                file, target = Path(out) / "head.gguf", Path(out) / "f16.gguf"
                options = ["--quant", "f16", "--format", "gguf", "--tokenizer", source]
                subprocess.run([args.paceline, "-q", "convert", head, file, *options], check=True)
                chosen = [prompt["prompt"] for prompt in prompts[:N_PROMPTS]]
                plain, *_ = written(args.server, chosen, target)
                drafting = ["-md", file, "--spec-type", "draft-eagle3", "--spec-draft-n-max", "3"]
                found, drafted, accepted = written(args.server, chosen, target, *drafting)
                good = found == plain and accepted >= ACCEPTED * drafted > 0
                bad += not good
                text = "equal" if found == plain else "DIFFERS"
                print(f"{name}  eagle3  llama.cpp  {accepted} of {drafted} guesses, text {text}", flush=True)
    raise SystemExit(f"{bad} differ by more than they may" if bad else None)


if __name__ == "__main__":
    main()
