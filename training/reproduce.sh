#!/usr/bin/env bash
# Trains the bundled models side by side on one GPU.
#
#   reproduce.sh CORPUS TOKENIZERS OUT [MODEL…]
#
# CORPUS holds train.jsonl.xz, eval.jsonl.xz and bench_prompts.jsonl; TOKENIZERS
# holds gemma.json and qwen.json. Every model gets OUT/MODEL with its checkpoints,
# report.json and log. SYNTHETIC is the number of characters to generate, REPEAT
# a factor on the epochs of the corpus; OPTIONS goes to train.py. Every finished
# folder in TOWERS gets a picture tower beside them, OUT/NAME-vision.
set -euo pipefail
corpus=$1 tokenizers=$2 out=$3
shift 3
models=("${@:-tiny-gemma4 tiny-qwen3.5}")
read -ra models <<<"${models[*]}"
here=$(dirname "$(readlink -f "$0")")
export PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$out"

jobs_started=()
for model in "${models[@]}"; do
    family=gemma
    [[ $model == *qwen* ]] && family=qwen
    mkdir -p "$out/$model"
    # Trainers compile while the rows are being packed, then wait for them.
    python3 "$here/train.py" "$model" --rows "$out/$family.npy" --corpus "$corpus" \
        --tokenizer "$tokenizers/$family.json" --out "$out/$model" ${OPTIONS:-} \
        >"$out/$model/log" 2>&1 &
    jobs_started+=($!)
done
for folder in ${TOWERS:-}; do
    seen=$out/$(basename "$folder")-vision
    mkdir -p "$seen"
    python3 "$here/train_vision.py" "$folder" --out "$seen" >"$seen/log" 2>&1 &
    jobs_started+=($!)
done
for family in gemma qwen; do
    [[ " ${models[*]} " == *"$family"* ]] || continue
    [[ -e $out/$family.npy ]] && continue
    python3 "$here/data.py" --corpus "$corpus" --tokenizer "$tokenizers/$family.json" \
        --family "$family" --synthetic "${SYNTHETIC:-600e6}" --repeat "${REPEAT:-1}" --out "$out/$family.npy" >"$out/$family.log" 2>&1 || { cat "$out/$family.log"; kill "${jobs_started[@]}"; exit 1; }
done
wait "${jobs_started[@]}"
