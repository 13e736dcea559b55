#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Measurements on a GPU, one after the other, into a folder:
#
#     benchmarks/h200.sh FOLDER [PART …]
#
# All parts, or these, in the order below. Weights are generated in SCRATCH (default /dev/shm), when a part needs them: 33 GB for
# Qwen3-8B twice, 61 GB for Qwen3-30B-A3B, 66 GB for Qwen3-32B. A part that fails, or takes longer than LIMIT seconds (default 3600),
# does not stop the others.
set -u
export O=$(realpath -m "${1:?a folder for the results}") W=${SCRATCH:-/dev/shm} HERE=$(dirname "$(realpath "$0")")
shift
chosen=" $* " parts=" "
mkdir -p "$O"
fp8ext() { python3 -P -m vllm_fp8ext.cli "$@"; }
w() { # the folder of a model's weights, which bears its name: shape, seed
  local folder="$W/seed$2/$1"
  mkdir -p "$folder"
  (
    flock 9
    [ -f "$folder/config.json" ] || python3 -P -c "
import sys; from pathlib import Path; from vllm_fp8ext.bench.generated import write_checkpoint
write_checkpoint(Path(sys.argv[3]), sys.argv[1], int(sys.argv[2]), 'cuda')" "$1" "$2" "$folder" >&2
  ) 9>"$folder.lock"
  echo "$folder"
}
two() { echo "$(w "$1" 0) $(w "$1" 1)"; }
export -f fp8ext w two
part() { # name, command
  parts+="$1 "
  [[ $chosen = "  " || $chosen = *" $1 "* ]] || return
  echo "$(date +%T) $1"
  timeout -s INT -k 25 "${LIMIT:-3600}" bash -c "$2" >"$O/$1.log" 2>&1 || echo "  ended with $?: $O/$1.log"
}

half="--serve gpu-memory-utilization=0.5"
# two servers and the trainer's BF16 beside each other: they start at once; KV_BYTES: less where the GPU has less than 141 GB
beside="--together --serve kv-cache-memory-bytes=${KV_BYTES:-30000000000} gpu-memory-utilization=0.3"
large="--serve kv-cache-memory-bytes=4000000000 gpu-memory-utilization=0.4"
part update_8b "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $half --variants blockfp8 stock \
  --transports ipc http files ipc-fp8 --running 0 128 --out \$O/update_8b.json"
part update_8b_ipc "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $beside \
  --transports ipc --running 0 128 --out \$O/update_8b_ipc.json"
part update_8b_buckets "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $beside \
  --transports ipc --buckets --running 0 128 --out \$O/update_8b_buckets.json"
part update_8b_stock "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $beside --variants blockfp8 stock \
  --transports ipc ipc-fp8 --buckets --running 0 128 --out \$O/update_8b_stock.json"
part update_8b_http "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $half \
  --transports http http-plain --out \$O/update_8b_http.json"
part update_memory "python3 -P \$HERE/update_memory.py --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) --out \$O/update_memory.json"
part push_iterable "python3 -P \$HERE/push_iterable.py --shape Qwen3-8B --checkpoint \$(w Qwen3-8B 0) $half \
  --transports ipc http nccl --out \$O/push_iterable.json"
part update_8b_recompute "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $half \
  --transports ipc --running 128 --policy recompute --out \$O/update_8b_recompute.json"
part update_8b_inplace "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $half --transports ipc \
  --settings '{\"staging\": \"inplace\"}' --running 0 128 --out \$O/update_8b_inplace.json"
part update_17b "fp8ext bench update --shape Qwen3-1.7B --checkpoints \$(two Qwen3-1.7B) $beside --variants blockfp8 stock \
  --transports ipc http files --running 0 128 --out \$O/update_17b.json"
part update_8b_nccl "fp8ext bench update --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) $half \
  --transports nccl nccl-fp8 --running 0 128 --out \$O/update_8b_nccl.json" # two GPUs
part update_17b_nccl "fp8ext bench update --shape Qwen3-1.7B --checkpoints \$(two Qwen3-1.7B) $half \
  --transports nccl nccl-fp8 --running 0 128 --out \$O/update_17b_nccl.json" # two GPUs
part phases "python3 -P \$HERE/update_phases.py --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) --serve gpu-memory-utilization=0.4 \
  --parts open stage stage_buckets prepare commit commit_buckets rollback --rounds 2 --running 128 --out \$O/phases.json"
part prefill "python3 -P \$HERE/update_prefill.py --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) --serve gpu-memory-utilization=0.4 \
  --prompts 8192 32768 --running 64 --users 2 --out \$O/prefill.json"
part load "python3 -P \$HERE/load_compare.py --shape Qwen3-8B --checkpoints \$(two Qwen3-8B) --variants blockfp8 fp8_per_block bf16 \
  --traffic updates --steps 4 --processes 4 --output-tokens lognormal:500,0.8,2000 --out \$O/load.json --page \$O/load.html"
part check "fp8ext bench kernels --check"
part host_time "python3 -P \$HERE/host_time.py --out \$O/host_time.json"
part host_step "python3 -P \$HERE/host_step.py --checkpoint \$(w Qwen3-1.7B 0) --kv fp8 --cases 1x1024x256 8x1024x256 32x1024x256 \
  128x1024x256 --out \$O/host_step.json"
part crossover "python3 -P \$HERE/crossover.py --table \$O/crossover.json"
part layers "python3 -P \$HERE/layer_sweep.py --table \$O/decode_gemm_configs_in_layers.json" # with the crossovers that the package has
part kernels "fp8ext bench kernels --out \$O/kernels.json"
part experts "fp8ext bench kernels --only experts --expert-tokens 128 256 512 --out \$O/experts.json"
few="8x1024x1024 1x1024x1024 8x512x256 32x1024x1024"
part rollout_8b_auto "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --kv auto --kv-gib 24 --cases $few --out \$O/rollout_8b_auto.json"
part rollout_8b_fp8 "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --kv fp8 --kv-gib 20 --cases $few 128x1024x1024 \
  --out \$O/rollout_8b_fp8.json"
# weights of three engines fit, and K and V of one
part rollout_17b_auto "fp8ext bench rollout --checkpoint \$(w Qwen3-1.7B 0) --lend --kv auto --kv-gib 57 --out \$O/rollout_17b_auto.json"
part rollout_17b_fp8 "fp8ext bench rollout --checkpoint \$(w Qwen3-1.7B 0) --kv fp8 --kv-gib 29 --out \$O/rollout_17b_fp8.json"
part rollout_8b_256_fp8 "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --lend --kv fp8 --kv-gib 37 \
  --cases 256x1024x1024 1x400x16 1x1024x16 4x1024x16 8x1024x16 --out \$O/rollout_8b_256_fp8.json"
part rollout_8b_256_auto "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --lend --kv auto --kv-gib 74 \
  --cases 128x1024x1024 256x1024x1024 32x1024x1024 --out \$O/rollout_8b_256_auto.json"
# a few prompts at once, and requests that keep coming, with steps that one graph holds and without
wholes="--variants bf16 fp8_per_block blockfp8 --settings '{}' '{\"kernels\":{\"whole_graphs\":false}}' --kv fp8"
part prompts_8b "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) $wholes --kv-gib 12 --repeats 21 \
  --cases 1x400x16 1x100x16 1x1024x16 4x100x16 4x1024x16 8x200x16 16x100x16 --out \$O/prompts_8b.json"
part prompts_17b "fp8ext bench rollout --checkpoint \$(w Qwen3-1.7B 0) $wholes --kv-gib 12 --repeats 21 \
  --cases 1x400x16 8x200x16 4x1024x16 --out \$O/prompts_17b.json"
part steady "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) $wholes --kv-gib 15 --steady 3 \
  --cases 128x400x400 128x1024x1024 32x1024x1024 8x400x400 --out \$O/steady.json"
part batch_invariant "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --variants blockfp8 --kv fp8 \
  --settings '{}' '{\"kernels\": {\"batch_invariant\": true}}' --cases 8x1024x1024 128x1024x1024 --out \$O/batch_invariant.json"
part norm_rope "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --kv fp8 --kv-gib 6 \
  --settings '{}' '{\"kernels\": {\"norm_rope\": false}}' --cases 8x1024x1024 32x1024x1024 1x1024x1024 --out \$O/norm_rope.json"
part kv "fp8ext bench kv --checkpoint \$(w Qwen3-8B 0) --out \$O/kv.json"
# so many short responses that BF16 preempts; few sizes of CUDA graphs, as capturing them takes longer than the windows
part kv_short "fp8ext bench kv --checkpoint \$(w Qwen3-8B 0) --variants blockfp8_kv fp8_per_block blockfp8 bf16 --cases 1024x512x1024 \
  --seconds 10 --repeats 3 --engine '{\"compilation_config\": {\"cudagraph_capture_sizes\": [512, 640, 768, 896, 1024]}}' --out \$O/kv_short.json"
part kv_inplace "fp8ext bench kv --checkpoint \$(w Qwen3-8B 0) --variants bf16 blockfp8_kv --cases 64x512x1024 \
  --settings '{\"staging\": \"inplace\"}' --out \$O/kv_inplace.json"
# a case of prefill, where the history is noted, and one of mostly decoding
part kv_history "fp8ext bench rollout --checkpoint \$(w Qwen3-8B 0) --variants blockfp8 --kv fp8 --cases 64x2048x8 128x1024x256 \
  --settings '{\"kv_scales\": \"calibrate\"}' '{\"kv_scales\": \"history\"}' --repeats 9 --out \$O/kv_history.json"
part kv_accuracy "fp8ext bench kv-accuracy --granularity layer head --out \$O/kv_accuracy.json"
# large models: not all engines at once
part update_32b "fp8ext bench update --shape Qwen3-32B --checkpoints \$(w Qwen3-32B 0) \$(w Qwen3-32B 0) $large --transports files \
  --out \$O/update_32b.json"
part update_30b "fp8ext bench update --shape Qwen3-30B-A3B --checkpoints \$(w Qwen3-30B-A3B 0) \$(w Qwen3-30B-A3B 0) $large \
  --transports ipc --fused --out \$O/update_30b.json"
part rollout_30b "fp8ext bench rollout --checkpoint \$(w Qwen3-30B-A3B 0) --kv auto --apart --kv-gib 49 \
  --cases 1x1024x1024 8x1024x1024 32x1024x1024 128x1024x1024 256x1024x1024 --out \$O/rollout_30b.json"
# blockfp8 first, which compiles DeepGEMM's kernels in many processes: fp8_per_block then finds them
for variants in "blockfp8 fp8_per_block" bf16; do
  part "rollout_30b_many_${variants%% *}" "fp8ext bench rollout --checkpoint \$(w Qwen3-30B-A3B 0) --variants $variants --kv auto --apart \
    --kv-gib 49 --cases 32x1024x1024 128x1024x1024 256x1024x1024 --out \$O/rollout_30b_many_${variants%% *}.json"
  part "rollout_30b_fp8_${variants%% *}" "fp8ext bench rollout --checkpoint \$(w Qwen3-30B-A3B 0) --variants $variants --kv fp8 --kv-gib 14 \
    --cases 8x1024x1024 128x1024x1024 --out \$O/rollout_30b_fp8_${variants%% *}.json"
  part "rollout_32b_${variants%% *}" "fp8ext bench rollout --checkpoint \$(w Qwen3-32B 0) --variants $variants --kv fp8 --apart --kv-gib 66 \
    --cases 8x1024x1024 128x1024x1024 1x1024x1024 32x1024x1024 8x512x256 256x1024x1024 --out \$O/rollout_32b_${variants%% *}.json"
  part "rollout_32b_auto_${variants%% *}" "fp8ext bench rollout --checkpoint \$(w Qwen3-32B 0) --variants $variants --kv auto --apart \
    --kv-gib 66 --cases 8x1024x1024 128x1024x1024 1x1024x1024 32x1024x1024 8x512x256 --out \$O/rollout_32b_auto_${variants%% *}.json"
done
part kv_30b "fp8ext bench kv --checkpoint \$(w Qwen3-30B-A3B 0) --variants bf16 blockfp8_kv --cases 256x512x8192 --out \$O/kv_30b.json"
part correct "python3 -P \$HERE/update_correct.py --shape Qwen3-8B --device cuda --out \$O/update_correct.json"
for name in $chosen; do [[ $parts = *" $name "* ]] || echo "no part $name, but:$parts"; done
ls "$O"
