#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Every measurement on a GPU, one after the other, into a folder: benchmarks/h200.sh FOLDER [SCRATCH]
# SCRATCH (default /dev/shm) has room for the weights: 33 GB for Qwen3-8B twice, 66 GB for Qwen3-32B, 61 GB for Qwen3-30B-A3B.
# A part that fails does not stop the others. VLLM_DEEP_GEMM_WARMUP=skip saves minutes where nothing is measured beside traffic, and is set there.
set -u
out=$(realpath "${1:?a folder for the results}")
scratch=${2:-/dev/shm}
here=$(dirname "$(realpath "$0")")
mkdir -p "$out"
fp8ext() { python3 -P -m vllm_fp8ext.cli "$@"; }
part() { # name, seconds, command
  local name=$1 seconds=$2
  shift 2
  echo "$name" && timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || echo "  ended with $?: $out/$name.log"
}
export -f fp8ext

weights() { # shape, seed, folder
  [ -f "$3/config.json" ] || python3 -P -c "
import sys; from pathlib import Path; from vllm_fp8ext.bench.generated import write_checkpoint
write_checkpoint(Path(sys.argv[3]), sys.argv[1], int(sys.argv[2]), 'cuda')" "$@"
}
weights Qwen3-8B 0 "$scratch/8b/a"
weights Qwen3-8B 1 "$scratch/8b/b"
pair="--checkpoints $scratch/8b/a $scratch/8b/b"

part update 1800 bash -c "fp8ext bench update --shape Qwen3-8B $pair --serve gpu-memory-utilization=0.5 \
  --variants blockfp8 stock --transports ipc http files ipc-fp8 --running 0 128 --out $out/update_8b.json"
part phases 900 python3 -P "$here/update_phases.py" --shape Qwen3-8B $pair --serve gpu-memory-utilization=0.5 --out "$out/phases.json"
part load 1800 python3 -P "$here/load_compare.py" --shape Qwen3-8B $pair --variants blockfp8 fp8_per_block bf16 \
  --traffic updates --steps 4 --processes 4 --out "$out/load.json" --page "$out/load.html"
export VLLM_DEEP_GEMM_WARMUP=skip
part check 1800 bash -c "fp8ext bench kernels --check"
part kernels 1800 bash -c "fp8ext bench kernels --out $out/kernels.json"
for kv in auto fp8; do
  part "rollout_8b_$kv" 3600 bash -c "fp8ext bench rollout --checkpoint $scratch/8b/a --kv $kv --kv-gib 24 \
    --cases 8x1024x1024 8x512x256 32x1024x1024 1x1024x1024 --out $out/rollout_8b_$kv.json"
  part "rollout_17b_$kv" 3600 bash -c "fp8ext bench rollout --shape Qwen3-1.7B --kv $kv --kv-gib 34 --out $out/rollout_17b_$kv.json"
done
# with many requests the K and V of two engines fit beside the weights, not of three
part rollout_8b_128 1800 bash -c "fp8ext bench rollout --checkpoint $scratch/8b/a --variants fp8_per_block blockfp8 --kv auto \
  --kv-gib 38.7 --cases 128x1024x1024 --out $out/rollout_8b_128.json"
part rollout_8b_256 1800 bash -c "fp8ext bench rollout --checkpoint $scratch/8b/a --variants bf16 blockfp8 --kv fp8 \
  --kv-gib 38.7 --cases 256x1024x1024 --out $out/rollout_8b_256.json"
part kv 2400 bash -c "fp8ext bench kv --checkpoint $scratch/8b/a --out $out/kv.json"
for granularity in layer head; do
  part "kv_accuracy_$granularity" 1800 python3 -P "$here/kv_accuracy.py" --granularity $granularity --out "$out/kv_accuracy_$granularity.json"
done
# large models: one engine after the other
weights Qwen3-32B 0 "$scratch/Qwen3-32B"
weights Qwen3-30B-A3B 0 "$scratch/Qwen3-30B-A3B"
large="--serve kv-cache-memory-bytes=4000000000 gpu-memory-utilization=0.4"
part rollout_32b 3600 bash -c "fp8ext bench rollout --checkpoint $scratch/Qwen3-32B --kv fp8 --apart --kv-gib 36 \
  --cases 8x1024x1024 8x512x256 32x1024x1024 128x1024x1024 --out $out/rollout_32b.json"
part rollout_8b_256_auto 1800 bash -c "fp8ext bench rollout --checkpoint $scratch/8b/a --apart --kv-gib 74 \
  --cases 256x1024x1024 --out $out/rollout_8b_256_auto.json"
part rollout_30b 3600 bash -c "fp8ext bench rollout --checkpoint $scratch/Qwen3-30B-A3B --apart --kv-gib 49 \
  --cases 1x1024x1024 8x1024x1024 32x1024x1024 128x1024x1024 256x1024x1024 --out $out/rollout_30b.json"
part kv_30b 1800 bash -c "fp8ext bench kv --checkpoint $scratch/Qwen3-30B-A3B --variants bf16 blockfp8_kv --cases 256x512x8192 \
  --out $out/kv_30b.json"
part update_32b 1800 bash -c "fp8ext bench update --shape Qwen3-32B --checkpoints $scratch/Qwen3-32B $scratch/Qwen3-32B $large \
  --transports files --out $out/update_32b.json"
part update_30b 1800 bash -c "fp8ext bench update --shape Qwen3-30B-A3B --checkpoints $scratch/Qwen3-30B-A3B \
  $scratch/Qwen3-30B-A3B $large --transports ipc --fused --out $out/update_30b.json"
part kv_inplace 1800 bash -c "fp8ext bench kv --checkpoint $scratch/8b/a --variants bf16 blockfp8_kv --cases 64x512x1024 \
  --settings '{\"staging\": \"inplace\"}' --out $out/kv_inplace.json"
part batch_invariant 1800 bash -c "fp8ext bench rollout --checkpoint $scratch/8b/a --variants bf16 blockfp8 --kv fp8 \
  --settings '{\"kernels\": {\"batch_invariant\": true}}' --cases 8x1024x1024 --out $out/batch_invariant.json"
part correct 3600 python3 -P "$here/update_correct.py" --shape Qwen3-8B --device cuda --out "$out/update_correct.json"
ls "$out"
