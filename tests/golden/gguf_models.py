"""Writes gguf/NAME.gguf: some of the checkpoints here, converted by llama.cpp's own converter to bf16.

    git clone https://github.com/ggml-org/llama.cpp      # or a fork of it that knows these models
    .venv/bin/python tests/golden/gguf_models.py --llama llama.cpp

The checkpoints have no tokenizer, so the converter's vocabulary is left out, and a list of the right length is put
where it counts entries. The configuration is read from `config.json` as it is: some versions of transformers rename
fields that the converter asks for.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.resolve()
NAMES = ["gemma4-moe", "gemma4-ple", "gemma4-ple-assistant", "qwen3_5-moe"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="a checkout of llama.cpp")
    parser.add_argument("names", nargs="*", default=NAMES)
    args = parser.parse_args()
    llama = args.llama.resolve()
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    os.chdir(llama)

    import transformers
    from conversion import base, gemma

    import convert_hf_to_gguf

    def no_config(*_, **__):
        raise ValueError("read config.json")

    transformers.AutoConfig.from_pretrained = no_config
    for model in (base.TextModel, gemma.Gemma3Model, gemma.Gemma4Model):
        model.set_vocab = lambda self: None
    for name in args.names:
        out = HERE / "gguf" / f"{name}.gguf"
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(HERE / "checkpoints" / name, folder, dirs_exist_ok=True)
            config = json.loads((Path(folder) / "config.json").read_text())
            size = config.get("text_config", config)["vocab_size"]
            vocabulary = {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": []}
            (Path(folder) / "tokenizer.json").write_text(json.dumps(vocabulary))
            sys.argv = ["convert", folder, "--outfile", str(out), "--outtype", "bf16", "--model-name", name]
            convert_hf_to_gguf.main()


main()
