// SPDX-License-Identifier: Apache-2.0
// out[M, N] = quantize(x[M, K]) @ (codes[N, K] * scales[N/128, K/128])^T for few tokens: weights streamed once.
//
// Shape suffixes as in reference.py. Built for one configuration by these macros:
//   ROWS    weight rows of a tile, a multiple of 64: one consumer warpgroup for each 64 rows
//   TOKENS  M rounded up to a width of wgmma's N side: the weights are wgmma's M side, so few tokens waste nothing
//   SPLITS  blocks of a cluster, which share tiles and take consecutive parts of K
//   POW2    activation scales are powers of two
//   CODES   x comes quantized: codes, and scales with the tokens of a block adjacent, columns a multiple of 16 bytes apart
//   STREAM  such x comes through the ring beside the weights, again for each tile, instead of staying in shared memory
//
// A cluster takes tiles in turn. Each of its blocks owns one part of K for the whole launch:
//   1. a producer thread fills a ring in shared memory with weights by TMA, from the very start;
//   2. meanwhile the consumer warps bring x[:, own part of K], quantized, into shared memory, where it stays. Blocks of other
//      clusters do the same again; the part is short, and weights are on their way. So no block waits for the grid. With
//      CODES the producer copies x, by TMA too, and the consumers begin with the first 128 columns that are there;
//   3. consumers multiply 128 columns at a time with FP8 tensor cores and add each block's product, scaled, in fp32
//      registers, as DeepGEMM does; the next block's product may be begun before that. At the end of a tile every warp
//      sends what it has of the sums that another rank owns to that rank's shared memory; the owner adds the SPLITS parts,
//      always in the order of the ranks, and stores them.
//
// A launch may begin before the previous kernel has ended: only x and `out` are touched after griddepcontrol.wait.
//
// Shared memory: ring of `stages` ROWS x 128 codes, then x: one TOKENS x 128 for each block of own columns (STREAM: for each
// stage), both in the 128-byte swizzle that wgmma reads (what rows of x from M on hold only reaches outputs that are never
// stored), then parts of the sums that are added up here, scales of x, barriers.

#include "device.cuh"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

constexpr u32 BLOCK = 128;
constexpr u32 GROUPS = ROWS / 64;
constexpr u32 WARPS = GROUPS * 4;
constexpr u32 CONSUMERS = WARPS * 32;
constexpr u32 THREADS = CONSUMERS + 32;
constexpr u32 WEIGHT_BYTES = ROWS * BLOCK;
constexpr u32 CODE_BYTES = TOKENS * BLOCK;
constexpr u32 GROUPS_OF_8 = TOKENS / 8;
constexpr u32 FRAGMENT_BYTES = 512;                                      // 16 rows x 8 tokens of fp32: one warp's share of a sum
constexpr u32 OWNED = (WARPS * GROUPS_OF_8 + SPLITS - 1) / SPLITS;       // fragments that a rank adds up
constexpr u32 OWNERS = SPLITS < GROUPS_OF_8 ? SPLITS : GROUPS_OF_8;      // ranks that own fragments of a warp
constexpr u32 RECEIVED_BYTES = SPLITS > 1 ? SPLITS * OWNED * FRAGMENT_BYTES : 0;
constexpr u32 FLIGHT = TOKENS >= 64 ? 8 : 4;                             // loads of x in flight, each of 4 x 128 columns
constexpr u32 SCALES = GROUPS_OF_8 < 4 ? GROUPS_OF_8 : 4;                // pairs of scales of x that a thread holds
constexpr u32 RESIDENT = TOKENS <= 32 && ROWS <= 192 ? 2 : 1;            // blocks on a multiprocessor, as registers allow
// A product is begun before the last one is added up, where registers allow. It holds a stage of the ring longer, so that
// pays if the whole part of a block is on its way from the start, or with few rows in rings of so many stages. Kernels that
// take codes have registers for it up to 16 tokens, the others up to 32.
constexpr u32 OVERLAPPED_STAGES = 5;
constexpr bool OVERLAP = ROWS == 64 || (ROWS == 128 && TOKENS <= 64) || TOKENS <= (CODES ? 16 : 32);
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;
constexpr u32 EVERYONE = 1;  // a named barrier

// --- synchronization

DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done = 0;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// The same for what other blocks of the cluster signalled.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  u32 done = 0;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Publishes nothing: it only says that values have been read.
DEVICE void barrier_arrive_remote(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void sync_named(u32 name, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
DEVICE void arrive_named(u32 name, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

// Every thread of the cluster arrives once, where its block's barriers are made (a fence of its own publishes them), and
// waits before it reaches another block.
DEVICE void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Orders ordinary accesses of this thread to shared memory with those of the copy engine and the tensor cores.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- copies

DEVICE void load_codes(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

DEVICE void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

DEVICE void load_weights(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(EVICT_FIRST)
      : "memory");
}

// Volatile, so that it stays behind griddepcontrol.wait: the compiler may take an ordinary load ahead of it.
DEVICE uint4 load_x(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

// The same address in another block of the cluster.
DEVICE u32 remote(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Store 16 bytes in another block; its barrier there counts them.
DEVICE void send(u32 to, const float* from, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(barrier)
      : "memory");
}

DEVICE void store_shared(u32 to, const float* from) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3])
               : "memory");
}

DEVICE float4 load_shared(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// --- tensor cores: `wgmma(d, a, b, accumulate)` for this TOKENS comes from the host, see decode_gemm.py

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products but the `NEWER` last ones. Afterwards these results may be read; naming each register keeps the
// compiler from reading it earlier.
template <u32 NEWER, u32 COUNT>
DEVICE void wgmma_wait(float (&d)[COUNT]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
#pragma unroll
  for (u32 i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#include "wgmma.cuh"

// Rows of 128 bytes with the 128-byte swizzle, 8 rows (1,024 bytes) apart.
DEVICE u64 matrix(u32 address) {
  return ((address & 0x3FFFF) >> 4) | (1u << 16) | (64ull << 32) | (1ull << 62);
}

DEVICE u32 largest(uint4 v, u32 amax) {
  constexpr u32 MAGNITUDES = 0x7FFF7FFFu;
  return larger(larger(v.x & MAGNITUDES, v.y & MAGNITUDES),
                larger(larger(v.z & MAGNITUDES, v.w & MAGNITUDES), amax));
}

// --- the parts of the kernel

struct Work {
  u32 tiles, first, step;   // tiles first, first + step, …
  u32 begin, depth;         // of these columns, in blocks

  DEVICE u32 mine() const { return first < tiles ? (tiles - 1 - first) / step + 1 : 0; }  // tiles
};

struct Memory {  // addresses in shared memory
  u32 ring, x, x_scales, received, full, empty, arrived, freed, copied;
};

#if CODES
struct Activations {
  const TensorMap* codes_MK;
  const float* scales_MKb;
  long long stride;  // between columns of the scales
  u32 m;
};
#else
struct Activations {
  const bf16* x_MK;
  long long stride;
  u32 m, k;
};
#endif

DEVICE Work work_of(u32 n, u32 k) {
  const u32 blocks = (k + BLOCK - 1) / BLOCK, rank = blockIdx.x % SPLITS;
  const u32 begin = rank * blocks / SPLITS, end = (rank + 1) * blocks / SPLITS;
  return {(n + ROWS - 1) / ROWS, blockIdx.x / SPLITS, gridDim.x / SPLITS, begin, end - begin};
}

DEVICE Memory memory_of(const u8* shared, u32 stages, u32 k) {
  const u32 slots = STREAM ? stages : ((k + BLOCK - 1) / BLOCK + SPLITS - 1) / SPLITS;
  Memory at;
  at.ring = shared_address(shared);
  at.x = at.ring + stages * WEIGHT_BYTES;
  at.received = at.x + slots * CODE_BYTES;
  at.x_scales = at.received + RECEIVED_BYTES;
  at.full = at.x_scales + slots * TOKENS * 4;
  at.empty = at.full + stages * 8;
  at.arrived = at.empty + stages * 8;
  at.freed = at.arrived + WARPS * 8;
  at.copied = STREAM ? at.full : at.freed + WARPS * 8;  // a stage of the ring is full when both are there
  return at;
}

// Bring the first tile's scales to the L2 cache, ahead of the weights that would hold them up.
DEVICE void prefetch_scales(const float* scales_NbKb, Work work, u32 n, u32 k) {
  const u32 lane = threadIdx.x % 32, row_block = work.first * ROWS / BLOCK + lane / 8;
  const u32 column_blocks = (k + BLOCK - 1) / BLOCK, row_blocks = (n + BLOCK - 1) / BLOCK;
  if (row_block < row_blocks && row_block * BLOCK < (work.first + 1) * ROWS && work.depth) {
    const u32 column = work.begin + min(lane % 8 * 32, work.depth - 1);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(scales_NbKb + static_cast<u64>(row_block) * column_blocks + column));
  }
}

#if CODES
// Bring a block of own columns of x.
DEVICE void copy_activations(const Activations& x, Memory at, u32 block, u32 slot) {
  const u32 barrier = at.copied + slot * 8, scale_bytes = (x.m + 3) / 4 * 16;
  barrier_expect(barrier, CODE_BYTES + scale_bytes);
  load_codes(at.x + slot * CODE_BYTES, x.codes_MK, block * BLOCK, 0, barrier);
  load_bytes(at.x_scales + slot * TOKENS * 4, x.scales_MKb + block * x.stride, scale_bytes, barrier);
}
#endif

// The producer warp; all its lanes come here, one works.
DEVICE void produce(const TensorMap* map, const Activations& x, Work work, Memory at, u32 stages) {
  const bool leader = threadIdx.x % 32 == 0;
  const u32 mine = work.mine(), total = mine * work.depth;
  u32 stage = 0, phase = 0, block = 0, row = work.first * ROWS;
  auto load = [&] {
    barrier_expect(at.full + stage * 8, WEIGHT_BYTES);
    load_weights(at.ring + stage * WEIGHT_BYTES, map, (work.begin + block) * BLOCK, row, at.full + stage * 8);
    if (++stage == stages) stage = 0, phase ^= 1;
    if (++block == work.depth) block = 0, row += work.step * ROWS;
  };
  const u32 early = min(total, stages);
  if (leader) {
    for (u32 i = 0; i < stages; ++i) {
      barrier_init(at.full + i * 8, STREAM ? 2 : 1);
      barrier_init(at.empty + i * 8, WARPS);
    }
#if CODES && !STREAM
    for (u32 i = 0; i < work.depth; ++i) barrier_init(at.copied + i * 8, 1);
#endif
#if SPLITS > 1
    for (u32 i = 0; i < WARPS; ++i) {
      barrier_init(at.arrived + i * 8, 1);
      barrier_init(at.freed + i * 8, OWNERS);
    }
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
    for (u32 i = 0; i < early; ++i) load();
  }
  __syncwarp();
  arrive_named(EVERYONE, THREADS);
#if SPLITS > 1
  cluster_arrive();
#endif
  if (leader) {
#if CODES
    asm volatile("griddepcontrol.wait;" ::: "memory");  // the previous kernel may just be making x
    for (u32 i = 0; i < (STREAM ? early : mine ? work.depth : 0); ++i)
      copy_activations(x, at, work.begin + i % work.depth, i);
#endif
    for (u32 i = early; i < total; ++i) {
      barrier_wait(at.empty + stage * 8, phase ^ 1);
#if STREAM
      copy_activations(x, at, work.begin + block, stage);
#endif
      load();
    }
  }
#if SPLITS > 1
  cluster_wait();
#endif
}

#if !CODES
// Eight lanes quantize 16 columns each of one token's 128; a warp takes four blocks of a token, several of these at a time.
DEVICE void activate(const Activations& x, Work work, Memory at) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % 8;
  const u32 quads = (work.depth + 3) / 4;
  if (quads == 0) return;
  const u32 tokens_on = WARPS / quads, quads_on = WARPS % quads;
  u32 token = warp / quads, quad = warp % quads;
  while (token < x.m) {
    uint4 low[FLIGHT], high[FLIGHT];
    u32 there = token, here = quad;
    auto advance = [&](u32& t, u32& q) {
      t += tokens_on;
      q += quads_on;
      if (q >= quads) q -= quads, ++t;
    };
#pragma unroll
    for (u32 i = 0; i < FLIGHT; ++i) {
      const u32 block = here * 4 + lane / 8, column = (work.begin + block) * BLOCK + part * 16;
      low[i] = high[i] = make_uint4(0, 0, 0, 0);
      if (there < x.m && block < work.depth && column < x.k) {  // K is a multiple of 16: 16 columns are all inside or all outside
        const uint4* from = reinterpret_cast<const uint4*>(x.x_MK + there * x.stride + column);
        low[i] = load_x(from);
        high[i] = load_x(from + 1);
      }
      advance(there, here);
    }
#pragma unroll
    for (u32 i = 0; i < FLIGHT; ++i) {
      const u32 block = quad * 4 + lane / 8;
      u32 amax = largest(low[i], largest(high[i], 0));
#pragma unroll
      for (u32 distance = 1; distance < 8; distance *= 2)
        amax = larger(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
      const float scale = scale_of(max(amax & 0xFFFFu, amax >> 16) << 16, POW2), inverse = __frcp_rn(scale);
      if (token < x.m && block < work.depth) {
        const u32 to = at.x + block * CODE_BYTES + token * BLOCK + ((part ^ (token % 8)) << 4);
        const auto coded = [&](u32 first, u32 second) { return codes_of(first, second, scale, inverse, POW2); };
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(coded(low[i].x, low[i].y)),
                     "r"(coded(low[i].z, low[i].w)), "r"(coded(high[i].x, high[i].y)), "r"(coded(high[i].z, high[i].w))
                     : "memory");
        if (part == 0)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(at.x_scales + (block * TOKENS + token) * 4), "f"(scale) : "memory");
      }
      advance(token, quad);
    }
  }
}
#endif

// Round 16 rows x 8 tokens to BF16 and store them. sum: (row, token), (row, token + 1), and the same 8 rows on.
DEVICE void store(const float (&sum)[4], bf16* out_MN, u32 row, u32 token, u32 m, u32 n) {
  const u32 lane = threadIdx.x % 32;
  u32 halves[2];
  __syncwarp();
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(halves[half]) : "f"(sum[half * 2 + 1]), "f"(sum[half * 2]));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(halves[half]) : "r"(halves[half]));
  }
  token += lane / 4;
  if (token >= m) return;
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const u32 column = row + half * 8 + lane % 4 * 2;
    bf16* to = out_MN + static_cast<u64>(token) * n + column;
    if (n % 2 == 0) {
      if (column < n) *reinterpret_cast<u32*>(to) = halves[half];
    } else {
      if (column < n) to[0] = static_cast<bf16>(halves[half]);
      if (column + 1 < n) to[1] = static_cast<bf16>(halves[half] >> 16);
    }
  }
}

// --- the kernel

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    decode_gemm(const __grid_constant__ TensorMap map,
#if CODES
                const __grid_constant__ TensorMap x_map, const float* x_scales_MKb, long long x_stride,
#else
                const bf16* x_MK, long long x_stride,
#endif
                const float* __restrict__ scales_NbKb, const bf16* __restrict__ bias_N, bf16* out_MN, u32 m, u32 n, u32 k,
                u32 stages) {
  extern __shared__ __align__(1024) u8 shared[];
  // the shuffle tells the compiler that it is the same in a whole warp, and so are addresses and branches
  const u32 warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work = work_of(n, k);
  const Memory at = memory_of(shared, stages, k);
#if CODES
  const Activations x{&x_map, x_scales_MKb, x_stride, m};
#else
  const Activations x{x_MK, x_stride, m, k};
#endif
  if (warp == WARPS) {
    prefetch_scales(scales_NbKb, work, n, k);
    produce(&map, x, work, at, stages);
    return;
  }
#if SPLITS > 1
  cluster_arrive();
#endif
  asm volatile("griddepcontrol.launch_dependents;");

  // Scales of the weights: a lane holds one block's, and the next 32 blocks' are always on their way.
  const u32 column_blocks = (k + BLOCK - 1) / BLOCK, row_blocks = (n + BLOCK - 1) / BLOCK, rank = blockIdx.x % SPLITS;
  u32 next_tile = work.first, next_block = 0;
  auto fetch_scales = [&] {
    const u32 block = next_block + lane;
    const u32 row_block = min((next_tile * ROWS + warp / 4 * 64) / BLOCK, row_blocks - 1);  // 64 rows never straddle two
    float found = 0;
    if (next_tile < work.tiles && block < work.depth)
      found = __ldg(scales_NbKb + static_cast<u64>(row_block) * column_blocks + work.begin + block);
    next_block += 32;
    if (next_block >= work.depth) next_block = 0, next_tile += work.step;
    return found;
  };
  float later = fetch_scales();

  asm volatile("griddepcontrol.wait;" ::: "memory");
#if !CODES
  activate(x, work, at);
  fence_async();
#endif
#if SPLITS > 1
  cluster_wait();
#endif
  sync_named(EVERYONE, THREADS);

  const bool overlap = OVERLAP && (work.mine() * work.depth <= stages || (ROWS <= 128 && stages >= OVERLAPPED_STAGES));
  const u32 scales_at = at.x_scales + lane % 4 * 8;
  u32 stage = 0, phase = 0, oldest = 0, turn = 0;  // the stage of the next product, and of the first that is not added up
  for (u32 tile = work.first; tile < work.tiles; tile += work.step, ++turn) {
    const u32 row = tile * ROWS + warp * 16;
    float bias[2] = {};
    if (bias_N) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 here = row + half * 8 + lane / 4;
        if (here < n) bias[half] = __uint_as_float(static_cast<u32>(__ldg(bias_N + here)) << 16);
      }
    }
    float sum[TOKENS / 2] = {};
    // A product of 128 columns is begun when its operands are there, and ended when it is scaled and added up.
    auto begin = [&](float (&product)[TOKENS / 2], u32 block) {
      const u32 slot = STREAM ? stage : block;
      const u64 a = matrix(at.ring + stage * WEIGHT_BYTES + warp / 4 * 64 * BLOCK), b = matrix(at.x + slot * CODE_BYTES);
#if CODES && !STREAM
      if (turn == 0) barrier_wait(at.copied + slot * 8, 0);
#endif
      barrier_wait(at.full + stage * 8, phase);
      wgmma_begin();
#pragma unroll
      for (u32 step = 0; step < 4; ++step) wgmma(product, a | step * 2, b | step * 2, step);
      wgmma_commit();
      if (++stage == stages) stage = 0, phase ^= 1;
    };
    auto end = [&](float (&product)[TOKENS / 2], float held, u32 block, bool newer) {
      const float weight_scale = __shfl_sync(0xFFFFFFFFu, held, block % 32);
#pragma unroll
      for (u32 first = 0; first < GROUPS_OF_8; first += SCALES) {
        float2 scale[SCALES];
#pragma unroll
        for (u32 i = 0; i < SCALES; ++i)
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(scale[i].x), "=f"(scale[i].y)
                       : "r"(scales_at + ((STREAM ? oldest : block) * TOKENS + (first + i) * 8) * 4)
                       : "memory");
        if (first == 0) {
          newer ? wgmma_wait<1>(product) : wgmma_wait<0>(product);
          if (!STREAM && lane == 0) barrier_arrive(at.empty + oldest * 8);
        }
#pragma unroll
        for (u32 i = 0; i < SCALES; ++i) {
          const float x = scale[i].x * weight_scale, y = scale[i].y * weight_scale;
          const u32 j = (first + i) * 4;
          sum[j + 0] += product[j + 0] * x;
          sum[j + 1] += product[j + 1] * y;
          sum[j + 2] += product[j + 2] * x;
          sum[j + 3] += product[j + 3] * y;
        }
      }
      if (STREAM) {
        __syncwarp();  // all lanes have read their scales
        if (lane == 0) barrier_arrive(at.empty + oldest * 8);
      }
      if (++oldest == stages) oldest = 0;
    };
    float even[TOKENS / 2], odd[TOKENS / 2];
    __syncwarp();  // lanes part where a bias is loaded and sums are stored; wgmma wants them together
    for (u32 block = 0; block < work.depth;) {
      const u32 last = min(block + 32, work.depth) - 1;
      const float held = later;
      later = fetch_scales();
      if (overlap) {
        begin(even, block);
        for (; block + 1 < last; block += 2) {
          begin(odd, block + 1);
          end(even, held, block, true);
          begin(even, block + 2);
          end(odd, held, block + 1, true);
        }
        if (block < last) {
          begin(odd, block + 1);
          end(even, held, block++, true);
          end(odd, held, block++, false);
        } else {
          end(even, held, block++, false);
        }
      } else {
        for (; block <= last; ++block) {
          begin(even, block);
          end(even, held, block, false);
        }
      }
    }

#if SPLITS > 1
    if (turn) barrier_wait_cluster(at.freed + warp * 8, (turn - 1) & 1);  // the owners have added up the last tile
#pragma unroll
    for (u32 j = 0; j < GROUPS_OF_8; ++j) {
      const u32 fragment = warp * GROUPS_OF_8 + j, owner = fragment % SPLITS, slot = rank * OWNED + fragment / SPLITS;
      const u32 to = at.received + slot * FRAGMENT_BYTES + lane * 16;
      if (owner == rank)
        store_shared(to, sum + j * 4);  // this thread reads it again
      else
        send(remote(to, owner), sum + j * 4, remote(at.arrived + warp * 8, owner));
    }
    // of this warp's fragments those that this rank owns: every SPLITS-th
    const u32 skip = (rank + SPLITS - warp * GROUPS_OF_8 % SPLITS) % SPLITS;
    const u32 owned = skip < GROUPS_OF_8 ? (GROUPS_OF_8 + SPLITS - 1) / SPLITS : 0;  // both are powers of two
    if (lane == 0) barrier_expect(at.arrived + warp * 8, owned * (SPLITS - 1) * FRAGMENT_BYTES);
    barrier_wait_cluster(at.arrived + warp * 8, turn & 1);
    if (owned) {  // as many fragments of each warp as any rank that has some
      constexpr u32 MANY = (GROUPS_OF_8 + SPLITS - 1) / SPLITS;
      float total[MANY][4];
#pragma unroll
      for (u32 i = 0; i < MANY; ++i) {
        const u32 j = skip + i * SPLITS, from = at.received + (warp * GROUPS_OF_8 + j) / SPLITS * FRAGMENT_BYTES + lane * 16;
        float4 part[SPLITS];
#pragma unroll
        for (u32 other = 0; other < SPLITS; ++other) part[other] = load_shared(from + other * OWNED * FRAGMENT_BYTES);
        float4 added = part[0];
#pragma unroll
        for (u32 other = 1; other < SPLITS; ++other)
          added = {added.x + part[other].x, added.y + part[other].y, added.z + part[other].z, added.w + part[other].w};
        total[i][0] = added.x + bias[0], total[i][1] = added.y + bias[0];
        total[i][2] = added.z + bias[1], total[i][3] = added.w + bias[1];
      }
#pragma unroll
      for (u32 i = 0; i < MANY; ++i) store(total[i], out_MN, row, (skip + i * SPLITS) * 8, m, n);
    }
#else
#pragma unroll
    for (u32 j = 0; j < GROUPS_OF_8; ++j) {
      const float values[4] = {sum[j * 4] + bias[0], sum[j * 4 + 1] + bias[0], sum[j * 4 + 2] + bias[1],
                               sum[j * 4 + 3] + bias[1]};
      store(values, out_MN, row, j * 8, m, n);
    }
#endif
#if SPLITS > 1
    __syncwarp();
    if (owned && tile + work.step < work.tiles && lane < SPLITS)
      barrier_arrive_remote(remote(at.freed + warp * 8, lane));
#endif
  }
}
